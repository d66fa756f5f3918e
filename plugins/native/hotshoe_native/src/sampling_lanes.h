// Comparisons of sixteen lanes, and what sampling does with them: selecting, counting, compressing.
#pragma once

#include "simd.h"

namespace hs {

#if defined(HS_ISA_AVX512)

struct Lanes {
  __mmask16 mask;
};

// Lanes with a >= b; never those of a NaN.
HS_INLINE Lanes at_least(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask((__m512)a.part[0], (__m512)b.part[0], _CMP_GE_OQ)}; }
HS_INLINE Lanes operator&(Lanes a, Lanes b) { return {__mmask16(a.mask & b.mask)}; }
HS_INLINE Lanes and_not(Lanes a, Lanes b) { return {__mmask16(a.mask & ~b.mask)}; }
// Bit i is lane i.
HS_INLINE uint32_t bits(Lanes lanes) { return lanes.mask; }

HS_INLINE f32x16 select(Lanes lanes, f32x16 value, f32x16 other) {
  return {{(native_f32)_mm512_mask_mov_ps((__m512)other.part[0], lanes.mask, (__m512)value.part[0])}};
}
HS_INLINE f32x16 add_where(Lanes lanes, f32x16 sum, f32x16 value) {
  return {{(native_f32)_mm512_mask_add_ps((__m512)sum.part[0], lanes.mask, (__m512)sum.part[0], (__m512)value.part[0])}};
}
// Writes the lanes one behind the other, and rubbish behind them: 16 floats in all.
HS_INLINE void compress(float* to, Lanes lanes, f32x16 value) {
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(lanes.mask, (__m512)value.part[0]));
}

#else

struct Lanes {
  native_i32 part[kParts];
};

HS_INLINE Lanes at_least(f32x16 a, f32x16 b) {
  Lanes out;
  HS_EACH_PART out.part[p] = a.part[p] >= b.part[p];
  return out;
}
HS_INLINE Lanes operator&(Lanes a, Lanes b) {
  Lanes out;
  HS_EACH_PART out.part[p] = a.part[p] & b.part[p];
  return out;
}
HS_INLINE Lanes and_not(Lanes a, Lanes b) {
  Lanes out;
  HS_EACH_PART out.part[p] = a.part[p] & ~b.part[p];
  return out;
}
HS_INLINE uint32_t bits(Lanes lanes) {
#if defined(HS_ISA_AVX2)
  const uint32_t low = _mm256_movemask_ps((__m256)lanes.part[0]), high = _mm256_movemask_ps((__m256)lanes.part[1]);
  return low | high << 8;
#else
  uint32_t out = 0;
  HS_EACH_PART for (int i = 0; i < kPartLanes; ++i) out |= uint32_t(lanes.part[p][i] & 1) << (p * kPartLanes + i);
  return out;
#endif
}
HS_INLINE f32x16 select(Lanes lanes, f32x16 value, f32x16 other) {
  f32x16 out;
  HS_EACH_PART out.part[p] = (native_f32)(((native_i32)value.part[p] & lanes.part[p]) | ((native_i32)other.part[p] & ~lanes.part[p]));
  return out;
}
HS_INLINE f32x16 add_where(Lanes lanes, f32x16 sum, f32x16 value) { return sum + select(lanes, value, zero()); }
HS_INLINE void compress(float* to, Lanes lanes, f32x16 value) {
  alignas(64) float all[16];
  store(all, value);
  for (uint32_t left = bits(lanes); left != 0; left &= left - 1) *to++ = all[__builtin_ctz(left)];
}

#endif

HS_INLINE int count(Lanes lanes) { return __builtin_popcount(bits(lanes)); }
HS_INLINE bool any(Lanes lanes) { return bits(lanes) != 0; }
// The first `count` lanes of a row's end, `fill` in the others.
HS_INLINE f32x16 load_or(const float* from, int count, f32x16 fill) {
  return count == kLanes ? load(from) : first_lanes(count, load_some(from, count), fill);
}
HS_INLINE f32x16 load_or(const bf16* from, int count, f32x16 fill) {
  return count == kLanes ? load(from) : first_lanes(count, load_some(from, count), fill);
}

}  // namespace hs
