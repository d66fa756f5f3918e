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

// Twelve independent chains hide the latency of one instruction; in assembly, so that they stay in registers.
#define CHAINS(instruction)                                                            \
  instruction " %%zmm12, %%zmm12, %%zmm0\n" instruction " %%zmm12, %%zmm12, %%zmm1\n"   \
  instruction " %%zmm12, %%zmm12, %%zmm2\n" instruction " %%zmm12, %%zmm12, %%zmm3\n"   \
  instruction " %%zmm12, %%zmm12, %%zmm4\n" instruction " %%zmm12, %%zmm12, %%zmm5\n"   \
  instruction " %%zmm12, %%zmm12, %%zmm6\n" instruction " %%zmm12, %%zmm12, %%zmm7\n"   \
  instruction " %%zmm12, %%zmm12, %%zmm8\n" instruction " %%zmm12, %%zmm12, %%zmm9\n"   \
  instruction " %%zmm12, %%zmm12, %%zmm10\n" instruction " %%zmm12, %%zmm12, %%zmm11\n"
#define CLOBBERS                                                                                \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12"

// Both return the number of multiplications and additions done; 0 where the processor has no such instruction.
double multiply_bf16(int64_t rounds) {
#if defined(__AVX512BF16__)
  asm volatile("vpxorq %%zmm12, %%zmm12, %%zmm12" ::: "xmm12");
  for (int64_t i = 0; i < rounds; ++i) asm volatile(CHAINS("vdpbf16ps") ::: CLOBBERS);
  return 12 * 64.0 * rounds;
#else
  return 0 * rounds;
#endif
}

double multiply_int8(int64_t rounds) {
#if defined(__AVX512VNNI__)
  asm volatile("vpxorq %%zmm12, %%zmm12, %%zmm12" ::: "xmm12");
  for (int64_t i = 0; i < rounds; ++i) asm volatile(CHAINS("vpdpbusd") ::: CLOBBERS);
  return 12 * 128.0 * rounds;
#else
  return 0 * rounds;
#endif
}

}  // extern "C"
