// Sixteen lanes of float or integer, on whatever vector width the target has.
//
// One source serves every instruction set: HS_ISA_AVX512 (with bf16 and vnni), HS_ISA_AVX2 (with fma) or neither of them, which is
// plain C++ with the compiler's vector extensions and so runs on any CPU, NEON included. The packed layouts are the same for all.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(HS_ISA_AVX512) || defined(HS_ISA_AVX2)
#include <immintrin.h>
#endif

#define HS_INLINE inline __attribute__((always_inline))

namespace hs {

#if defined(HS_ISA_AVX512)
constexpr int kNativeBytes = 64;
#elif defined(HS_ISA_AVX2)
constexpr int kNativeBytes = 32;
#else
constexpr int kNativeBytes = 16;
#endif

constexpr int kLanes = 16;                       // of every vector type here
constexpr int kParts = 64 / kNativeBytes;        // native registers per vector
constexpr int kPartLanes = kNativeBytes / 4;

typedef float native_f32 __attribute__((vector_size(kNativeBytes)));
typedef int32_t native_i32 __attribute__((vector_size(kNativeBytes)));
typedef uint32_t native_u32 __attribute__((vector_size(kNativeBytes)));
typedef native_f32 unaligned_f32 __attribute__((aligned(4), may_alias));
typedef native_i32 unaligned_i32 __attribute__((aligned(4), may_alias));

using bf16 = uint16_t;  // the upper half of a float

struct f32x16 {
  native_f32 part[kParts];
};
struct i32x16 {
  native_i32 part[kParts];
};

#define HS_EACH_PART for (int p = 0; p < kParts; ++p)

HS_INLINE f32x16 set1(float value) {
  f32x16 out;
  HS_EACH_PART out.part[p] = value - native_f32{};
  return out;
}
HS_INLINE i32x16 set1(int32_t value) {
  i32x16 out;
  HS_EACH_PART out.part[p] = value - native_i32{};
  return out;
}
HS_INLINE f32x16 zero() { return set1(0.0f); }

HS_INLINE f32x16 load(const float* from) {
  f32x16 out;
  HS_EACH_PART out.part[p] = *reinterpret_cast<const unaligned_f32*>(from + p * kPartLanes);
  return out;
}
HS_INLINE void store(float* to, f32x16 value) {
  HS_EACH_PART *reinterpret_cast<unaligned_f32*>(to + p * kPartLanes) = value.part[p];
}
HS_INLINE i32x16 load_i32(const void* from) {
  i32x16 out;
  HS_EACH_PART out.part[p] = *reinterpret_cast<const unaligned_i32*>(static_cast<const char*>(from) + p * kNativeBytes);
  return out;
}
HS_INLINE void store_i32(void* to, i32x16 value) {
  HS_EACH_PART *reinterpret_cast<unaligned_i32*>(static_cast<char*>(to) + p * kNativeBytes) = value.part[p];
}
// The low bytes of the lanes, as 16 bytes.
HS_INLINE void store_bytes(void* to, i32x16 value) {
#if defined(HS_ISA_AVX512)
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)value.part[0]));
#elif defined(HS_ISA_AVX2)
  const __m256i low = _mm256_set1_epi32(255);
  const __m256i pairs =
      _mm256_packus_epi32(_mm256_and_si256((__m256i)value.part[0], low), _mm256_and_si256((__m256i)value.part[1], low));
  const __m256i ordered = _mm256_permute4x64_epi64(pairs, _MM_SHUFFLE(3, 1, 2, 0));
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
#else
  int32_t lanes[16];
  store_i32(lanes, value);
  for (int i = 0; i < 16; ++i) static_cast<uint8_t*>(to)[i] = uint8_t(lanes[i]);
#endif
}

#define HS_BINARY(type, op)                        \
  HS_INLINE type operator op(type a, type b) {     \
    type out;                                      \
    HS_EACH_PART out.part[p] = a.part[p] op b.part[p]; \
    return out;                                    \
  }
HS_BINARY(f32x16, +)
HS_BINARY(f32x16, -)
HS_BINARY(f32x16, *)
HS_BINARY(f32x16, /)
HS_BINARY(i32x16, +)
HS_BINARY(i32x16, -)
HS_BINARY(i32x16, &)
HS_BINARY(i32x16, |)
#undef HS_BINARY

HS_INLINE f32x16 as_f32(i32x16 bits) {
  f32x16 out;
  HS_EACH_PART out.part[p] = (native_f32)bits.part[p];
  return out;
}
HS_INLINE i32x16 as_i32(f32x16 value) {
  i32x16 out;
  HS_EACH_PART out.part[p] = (native_i32)value.part[p];
  return out;
}
HS_INLINE f32x16 to_f32(i32x16 value) {
  f32x16 out;
  HS_EACH_PART out.part[p] = __builtin_convertvector(value.part[p], native_f32);
  return out;
}
// Rounds to nearest even; |value| < 2^22.
HS_INLINE i32x16 to_i32(f32x16 value) {
#if defined(HS_ISA_AVX512)
  return {{(native_i32)_mm512_cvtps_epi32((__m512)value.part[0])}};
#elif defined(HS_ISA_AVX2)
  return {{(native_i32)_mm256_cvtps_epi32((__m256)value.part[0]), (native_i32)_mm256_cvtps_epi32((__m256)value.part[1])}};
#else
  const f32x16 magic = set1(12582912.0f);  // 1.5 * 2^23
  i32x16 out;
  HS_EACH_PART {
    native_f32 shifted = value.part[p] + magic.part[p];
    out.part[p] = (native_i32)shifted - (native_i32)magic.part[p];
  }
  return out;
#endif
}
HS_INLINE i32x16 shift_left(i32x16 value, int bits) {
  i32x16 out;
  HS_EACH_PART out.part[p] = value.part[p] << bits;
  return out;
}
HS_INLINE i32x16 shift_right(i32x16 value, int bits) {
  i32x16 out;
  HS_EACH_PART out.part[p] = value.part[p] >> bits;
  return out;
}
HS_INLINE i32x16 shift_right_logical(i32x16 value, int bits) {
  i32x16 out;
  HS_EACH_PART out.part[p] = (native_i32)((native_u32)value.part[p] >> bits);
  return out;
}

// a * b + c, in one rounding where the target can.
HS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(HS_ISA_AVX512)
  return {{(native_f32)_mm512_fmadd_ps((__m512)a.part[0], (__m512)b.part[0], (__m512)c.part[0])}};
#elif defined(HS_ISA_AVX2)
  return {{(native_f32)_mm256_fmadd_ps((__m256)a.part[0], (__m256)b.part[0], (__m256)c.part[0]),
           (native_f32)_mm256_fmadd_ps((__m256)a.part[1], (__m256)b.part[1], (__m256)c.part[1])}};
#else
  return a * b + c;
#endif
}
HS_INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(HS_ISA_AVX512)
  return {{(native_f32)_mm512_max_ps((__m512)a.part[0], (__m512)b.part[0])}};
#else
  f32x16 out;
  HS_EACH_PART out.part[p] = a.part[p] > b.part[p] ? a.part[p] : b.part[p];
  return out;
#endif
}
HS_INLINE i32x16 max(i32x16 a, i32x16 b) {
  i32x16 out;
  HS_EACH_PART out.part[p] = a.part[p] > b.part[p] ? a.part[p] : b.part[p];
  return out;
}
HS_INLINE f32x16 min(f32x16 a, f32x16 b) {
#if defined(HS_ISA_AVX512)
  return {{(native_f32)_mm512_min_ps((__m512)a.part[0], (__m512)b.part[0])}};
#else
  f32x16 out;
  HS_EACH_PART out.part[p] = a.part[p] < b.part[p] ? a.part[p] : b.part[p];
  return out;
#endif
}
HS_INLINE f32x16 abs(f32x16 value) { return as_f32(as_i32(value) & set1(int32_t(0x7fffffff))); }

HS_INLINE bool any_at_most(f32x16 value, float bound) {
#if defined(HS_ISA_AVX512)
  return _mm512_cmp_ps_mask((__m512)value.part[0], _mm512_set1_ps(bound), _CMP_LE_OQ) != 0;
#else
  native_i32 is{};
  HS_EACH_PART is |= value.part[p] <= bound - native_f32{};
  bool out = false;
  for (int i = 0; i < kPartLanes; ++i) out = out || is[i];
  return out;
#endif
}
// False where a lane is NaN.
HS_INLINE bool all_at_most(f32x16 value, float bound) {
#if defined(HS_ISA_AVX512)
  return _mm512_cmp_ps_mask((__m512)value.part[0], _mm512_set1_ps(bound), _CMP_NLE_UQ) == 0;
#else
  native_i32 is = native_i32{} - 1;
  HS_EACH_PART is &= value.part[p] <= bound - native_f32{};
  bool out = true;
  for (int i = 0; i < kPartLanes; ++i) out = out && is[i];
  return out;
#endif
}

// Lane i of `value` where i < count, else lane i of `other`.
HS_INLINE f32x16 first_lanes(int count, f32x16 value, f32x16 other) {
#if defined(HS_ISA_AVX512)
  const __mmask16 mask = count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
  return {{(native_f32)_mm512_mask_mov_ps((__m512)other.part[0], mask, (__m512)value.part[0])}};
#else
  f32x16 out;
  HS_EACH_PART {
    native_i32 lane;
    for (int i = 0; i < kPartLanes; ++i) lane[i] = p * kPartLanes + i;
    out.part[p] = lane < count ? value.part[p] : other.part[p];
  }
  return out;
#endif
}

// Sums and maxima in a fixed order: pairs of halves.
HS_INLINE float sum(f32x16 value) {
  alignas(64) float lanes[16];
  store(lanes, value);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}
HS_INLINE float largest(f32x16 value) {
#if defined(HS_ISA_AVX512)
  return _mm512_reduce_max_ps((__m512)value.part[0]);
#else
  alignas(64) float lanes[16];
  store(lanes, value);
  float best = lanes[0];
  for (int i = 1; i < 16; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
#endif
}
HS_INLINE int32_t sum(i32x16 value) {
#if defined(HS_ISA_AVX512)
  return _mm512_reduce_add_epi32((__m512i)value.part[0]);
#else
  alignas(64) int32_t lanes[16];
  store_i32(lanes, value);
  int32_t total = 0;
  for (int i = 0; i < 16; ++i) total += lanes[i];
  return total;
#endif
}
HS_INLINE int32_t largest(i32x16 value) {
#if defined(HS_ISA_AVX512)
  return _mm512_reduce_max_epi32((__m512i)value.part[0]);
#else
  alignas(64) int32_t lanes[16];
  store_i32(lanes, value);
  int32_t best = lanes[0];
  for (int i = 1; i < 16; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
#endif
}

// exp, relative error about 1e-6; 0 below -87, x <= 88.
HS_INLINE f32x16 exp(f32x16 x) {
  x = max(x, set1(-87.5f));
  const i32x16 n = to_i32(x * set1(1.44269504f));
  const f32x16 k = to_f32(n);
  f32x16 r = fma(k, set1(-0.693359375f), x);
  r = fma(k, set1(2.12194440e-4f), r);
  f32x16 p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return as_f32(as_i32(p) + shift_left(n, 23));
}
// 2 ^ x; exactly 1 at 0. Relative error about 1e-7, or 1e-4 in two steps less, a twentieth of what rounding to bf16 changes. Below
// 2^-126 it may be anything that is less, above 2^127 anything that is more than 2^126.
template <bool IsPrecise = true>
HS_INLINE f32x16 exp2(f32x16 x) {
#if defined(HS_ISA_AVX512)
  const f32x16 whole = {{(native_f32)_mm512_roundscale_ps((__m512)x.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}};
  const f32x16 r = x - whole;
#else
  x = min(set1(127.0f), max(set1(-126.0f), x));  // in this order NaN stays what it is
  const f32x16 magic = set1(12583039.0f);  // 1.5 * 2^23 + 127: adding it rounds, and leaves the exponent of the whole power
  const f32x16 shifted = x + magic;
  const f32x16 r = x - (shifted - magic);
#endif
  f32x16 p;
  if constexpr (IsPrecise) {
    p = set1(0.00132647273f);
    p = fma(p, r, set1(0.00967151279f));
    p = fma(p, r, set1(0.0555073374f));
    p = fma(p, r, set1(0.240222421f));
    p = fma(p, r, set1(0.693146978f));
  } else {
    p = set1(0.05500893f);
    p = fma(p, r, set1(0.24221096f));
    p = fma(p, r, set1(0.69328293f));
  }
  p = fma(p, r, set1(1.0f));
#if defined(HS_ISA_AVX512)
  return {{(native_f32)_mm512_scalef_ps((__m512)p.part[0], (__m512)whole.part[0])}};
#else
  return p * as_f32(shift_left(as_i32(shifted), 23));
#endif
}
HS_INLINE float exp2_of(float x) {
  alignas(64) float lanes[16];
  store(lanes, exp2(set1(x)));
  return lanes[0];
}
// x * sigmoid(x)
HS_INLINE f32x16 silu_of(f32x16 x) { return x / (set1(1.0f) + exp2(x * set1(-1.44269504f))); }

HS_INLINE float to_float(bf16 value) {
  uint32_t bits = uint32_t(value) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
// Nearest even; a NaN stays one.
HS_INLINE bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
HS_INLINE float to_float(float value) { return value; }

HS_INLINE f32x16 load(const bf16* from) {
#if defined(HS_ISA_AVX512)
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {{(native_f32)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))}};
#elif defined(HS_ISA_AVX2)
  f32x16 out;
  HS_EACH_PART {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8 * p));
    out.part[p] = (native_f32)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  return out;
#else
  alignas(64) float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = to_float(from[i]);
  return load(lanes);
#endif
}
HS_INLINE void store(bf16* to, f32x16 value) {
#if defined(HS_ISA_AVX512)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value.part[0]);
  std::memcpy(to, &rounded, 32);
#else
  alignas(64) float lanes[16];
  store(lanes, value);
  for (int i = 0; i < 16; ++i) to[i] = to_bf16(lanes[i]);
#endif
}
// Thirty-two values as bf16, two to a lane.
HS_INLINE i32x16 packed_bf16(f32x16 first, f32x16 second) {
#if defined(HS_ISA_AVX512)
  return {{(native_i32)_mm512_cvtne2ps_pbh((__m512)second.part[0], (__m512)first.part[0])}};
#else
  alignas(64) bf16 lanes[32];
  store(lanes, first), store(lanes + kLanes, second);
  return load_i32(lanes);
#endif
}
// Thirty-two lanes, of which nothing depends on which value is in which: those of bf16 are the lower halves of sixteen words and then
// the upper ones, which takes half as many instructions as to load sixteen twice.
struct f32x32 {
  f32x16 half[2];
};
HS_INLINE f32x32 load_32(const float* from) { return {{load(from), load(from + kLanes)}}; }
HS_INLINE f32x32 unpacked(i32x16 pairs) { return {{as_f32(shift_left(pairs, 16)), as_f32(pairs & set1(int32_t(0xffff0000)))}}; }
HS_INLINE f32x32 load_32(const bf16* from) {
  i32x16 pairs;
  std::memcpy(&pairs, from, 64);
  return unpacked(pairs);
}
// Returns what it stores, rounded.
HS_INLINE f32x32 store_32(float* to, f32x32 value) {
  store(to, value.half[0]), store(to + kLanes, value.half[1]);
  return value;
}
HS_INLINE f32x32 store_32(bf16* to, f32x32 value) {
#if defined(HS_ISA_AVX512)
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)value.half[1].part[0], (__m512)value.half[0].part[0]);
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const i32x16 pairs = {{(native_i32)_mm512_permutexvar_epi16(_mm512_load_si512(order), halves)}};
  std::memcpy(to, &pairs, 64);
  return unpacked(pairs);
#else
  for (int h = 0; h < 2; ++h) {
    alignas(64) float lanes[16];
    store(lanes, value.half[h]);
    for (int i = 0; i < kLanes; ++i) to[2 * i + h] = to_bf16(lanes[i]);
  }
  return load_32(to);
#endif
}
// Sixteen IEEE half-precision values; exact, subnormals too.
HS_INLINE f32x16 load_f16(const uint16_t* from) {
#if defined(HS_ISA_AVX512)
  return {{(native_f32)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))}};
#elif defined(HS_ISA_AVX2)
  f32x16 out;
  HS_EACH_PART out.part[p] = (native_f32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8 * p)));
  return out;
#else
  alignas(64) int32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = from[i];
  const i32x16 bits = load_i32(lanes);
  const i32x16 magnitude = shift_left(bits & set1(int32_t(0x7fff)), 13);
  i32x16 scaled = as_i32(as_f32(magnitude) * set1(5.192296858534828e33f));  // 2^112: the exponents' biases differ by so much
  HS_EACH_PART {
    const native_i32 is_not_finite = magnitude.part[p] >= 0x7c00 << 13;
    scaled.part[p] |= is_not_finite & (255 << 23);
  }
  return as_f32(scaled | shift_left(bits & set1(int32_t(0x8000)), 16));
#endif
}
// First `count` lanes only, for the end of a row.
template <typename T>
HS_INLINE f32x16 load_some(const T* from, int count) {
  T lanes[16] = {};
  std::memcpy(lanes, from, sizeof(T) * count);
  return load(lanes);
}
template <typename T>
HS_INLINE void store_some(T* to, f32x16 value, int count) {
  T lanes[16];
  store(lanes, value);
  std::memcpy(to, lanes, sizeof(T) * count);
}

// acc[i] + w[2i] * x[2i] + w[2i + 1] * x[2i + 1]: `w` and `x` hold 16 pairs of bf16.
HS_INLINE f32x16 dot_bf16(f32x16 acc, i32x16 w, i32x16 x) {
#if defined(HS_ISA_AVX512)
  return {{(native_f32)_mm512_dpbf16_ps((__m512)acc.part[0], (__m512bh)w.part[0], (__m512bh)x.part[0])}};
#else
  const i32x16 upper = set1(int32_t(0xffff0000));
  acc = fma(as_f32(shift_left(w, 16)), as_f32(shift_left(x, 16)), acc);
  return fma(as_f32(w & upper), as_f32(x & upper), acc);
#endif
}

#if defined(HS_ISA_AVX512)
// acc[i] + sum over j < 4 of u[4i + j] * s[4i + j]: unsigned by signed bytes, exact. Others need more instructions for that than for what is
// asked of them: quantized_dot.h, attention_formats.h.
HS_INLINE i32x16 dot_u8_s8(i32x16 acc, i32x16 u, i32x16 s) {
  return {{(native_i32)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)u.part[0], (__m512i)s.part[0])}};
}
#endif

HS_INLINE void prefetch(const void* where) { __builtin_prefetch(where, 0, 3); }
// For what is read from memory once: caches that it passes on its way aren't filled with it, which reads a tenth faster.
HS_INLINE void prefetch_once(const void* where) { __builtin_prefetch(where, 0, 0); }

}  // namespace hs
