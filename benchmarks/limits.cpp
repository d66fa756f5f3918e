// What this processor can do at most, for limits.py: read memory, and multiply in registers without touching it.
//
// One thread each; limits.py runs as many at once as it has threads.
#include <cstddef>
#include <cstdint>

extern "C" {

// Reads `bytes` (a multiple of 512) once.
uint64_t read_once(const uint64_t* data, size_t bytes) {
  uint64_t sums[64] = {};
  for (size_t i = 0; i < bytes / 8; i += 64) {
    __builtin_prefetch(data + i + 512);
    for (int j = 0; j < 64; ++j) sums[j] += data[i + j];
  }
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  return total;
}

// Sixteen independent chains hide the latency of one instruction (twelve don't, on Zen 5); in assembly, so that they stay in registers.
#define CHAIN(instruction, sum) instruction " %%zmm16, %%zmm16, %%zmm" #sum "\n"
#define CHAINS(instruction)                                                                           \
  CHAIN(instruction, 0) CHAIN(instruction, 1) CHAIN(instruction, 2) CHAIN(instruction, 3)             \
  CHAIN(instruction, 4) CHAIN(instruction, 5) CHAIN(instruction, 6) CHAIN(instruction, 7)             \
  CHAIN(instruction, 8) CHAIN(instruction, 9) CHAIN(instruction, 10) CHAIN(instruction, 11)           \
  CHAIN(instruction, 12) CHAIN(instruction, 13) CHAIN(instruction, 14) CHAIN(instruction, 15)
#define CLOBBERS                                                                                      \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",   \
  "xmm12", "xmm13", "xmm14", "xmm15", "xmm16"

// Both return the number of multiplications and additions done; 0 where the processor has no such instruction.
double multiply_bf16(int64_t rounds) {
#if defined(__AVX512BF16__)
  asm volatile("vpxorq %%zmm16, %%zmm16, %%zmm16" ::: "xmm16");
  for (int64_t i = 0; i < rounds; ++i) asm volatile(CHAINS("vdpbf16ps") ::: CLOBBERS);
  return 16 * 64.0 * rounds;
#else
  return 0 * rounds;
#endif
}

double multiply_int8(int64_t rounds) {
#if defined(__AVX512VNNI__)
  asm volatile("vpxorq %%zmm16, %%zmm16, %%zmm16" ::: "xmm16");
  for (int64_t i = 0; i < rounds; ++i) asm volatile(CHAINS("vpdpbusd") ::: CLOBBERS);
  return 16 * 128.0 * rounds;
#else
  return 0 * rounds;
#endif
}

}  // extern "C"
