// Integer products of a group: 32 values along K, for 16 columns and one row, added up exactly.
//
// A dot starts, takes the unsigned bytes of its columns and four values of the row per step, and ends with the sum. Both ends are told
// the correction for the offset that makes weights unsigned, -offset * sum of q: targets use it where it costs least.
#pragma once

#include "quantized_layout.h"

namespace hs {

#if defined(HS_ISA_AVX512)

struct Dot {
  i32x16 sums;
  static HS_INLINE Dot begin(int32_t correction) { return {set1(correction)}; }
  HS_INLINE void add(i32x16 bytes, i32x16 four) { sums = dot_u8_s8(sums, bytes, four); }
  HS_INLINE i32x16 end(int32_t) const { return sums; }
};
using ByteDot = Dot;    // bytes are w + 128
using NibbleDot = Dot;  // bytes below 16

#else

typedef int16_t native_i16 __attribute__((vector_size(kNativeBytes)));
typedef uint16_t native_u16 __attribute__((vector_size(kNativeBytes)));

// Even and odd bytes of 16-bit lanes, with their signs.
HS_INLINE native_i16 even_bytes(native_i32 value) { return (native_i16)((native_u16)value << 8) >> 8; }
HS_INLINE native_i16 odd_bytes(native_i32 value) { return (native_i16)value >> 8; }

// Sums of neighbouring 16-bit lanes.
HS_INLINE native_i32 sum_pairs(native_i16 value) {
#if defined(HS_ISA_AVX2)
  return (native_i32)_mm256_madd_epi16((__m256i)value, _mm256_set1_epi16(1));
#else
  return ((native_i32)((native_u32)value << 16) >> 16) + ((native_i32)value >> 16);
#endif
}

// Keeps the compiler from adding up in another order, which needs more registers than there are.
template <typename Vector>
HS_INLINE void keep_in_register(Vector& value) {
#if defined(HS_ISA_AVX2)
  asm("" : "+x"(value));
#else
  (void)value;
#endif
}

// Takes the 128 off again: two products of signed bytes fit into 16 bits, |2 * 128 * 127| < 2^15, and there is nothing to correct.
struct ByteDot {
  i32x16 sums;
  static HS_INLINE ByteDot begin(int32_t) { return {set1(0)}; }
  HS_INLINE void add(i32x16 bytes, i32x16 four) {
    HS_EACH_PART {
      const native_i32 w = bytes.part[p] ^ int32_t(0x80808080);
#if defined(HS_ISA_AVX2)
      const __m256i signed_four = _mm256_sign_epi8((__m256i)four.part[p], (__m256i)w);
      const native_i16 pairs = (native_i16)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), signed_four);
#else
      const native_i16 pairs = even_bytes(w) * even_bytes(four.part[p]) + odd_bytes(w) * odd_bytes(four.part[p]);
#endif
      sums.part[p] += sum_pairs(pairs);
      keep_in_register(sums.part[p]);
    }
  }
  HS_INLINE i32x16 end(int32_t) const { return sums; }
};

// Stays in 16 bits for the whole group: |16 * 15 * 127| < 2^15.
struct NibbleDot {
  native_i16 pairs[kParts];
  static HS_INLINE NibbleDot begin(int32_t) { return {}; }
  HS_INLINE void add(i32x16 bytes, i32x16 four) {
    HS_EACH_PART {
#if defined(HS_ISA_AVX2)
      pairs[p] += (native_i16)_mm256_maddubs_epi16((__m256i)bytes.part[p], (__m256i)four.part[p]);
#else
      pairs[p] += even_bytes(bytes.part[p]) * even_bytes(four.part[p]) + odd_bytes(bytes.part[p]) * odd_bytes(four.part[p]);
#endif
      keep_in_register(pairs[p]);
    }
  }
  HS_INLINE i32x16 end(int32_t correction) const {
    i32x16 out;
    HS_EACH_PART out.part[p] = sum_pairs(pairs[p]) + correction;
    return out;
  }
};

#endif

}  // namespace hs
