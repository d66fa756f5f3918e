// What pages may hold, and how a word of them meets a query or a weight.
#pragma once

#include "attention.h"
#include "simd.h"

namespace hs {

inline int64_t words(int64_t count, int per_word) { return (count + per_word - 1) / per_word; }
inline int64_t padded(int64_t count) { return words(count, kLanes) * kLanes; }  // to whole vectors

// Pages of float32.
struct PagesF32 {
  using Element = float;
  using Sum = f32x16;
  static constexpr int kPerWord = 1;
  static constexpr int kDigits = 1;       // that a query or a weight is written with, each in words of its own
  static constexpr int kHeaderWords = 0;  // before the words of a key or of a query
  static HS_INLINE Sum start(uint32_t) { return zero(); }
  static HS_INLINE f32x16 logits(Sum sum, const uint32_t*, int64_t, uint32_t) { return sum; }
  static HS_INLINE Sum add_key(Sum acc, i32x16 page, i32x16 q) { return fma(as_f32(page), as_f32(q), acc); }
  static HS_INLINE Sum add_value(Sum acc, i32x16 page, i32x16 weight) { return fma(as_f32(page), as_f32(weight), acc); }
  // Writes the weights of 32 keys, and returns their lanes' sum with theirs.
  static HS_INLINE f32x16 put_weights(uint32_t* to, f32x16 first, f32x16 second, f32x16 sum) {
    store_i32(to, as_i32(first));
    store_i32(to + kLanes, as_i32(second));
    return sum + first + second;
  }
};

// Pages of bf16, in pairs.
struct PagesBF16 {
  using Element = bf16;
  using Sum = f32x16;
  static constexpr int kPerWord = 2;
  static constexpr int kDigits = 1;
  static constexpr int kHeaderWords = 0;
  static HS_INLINE Sum start(uint32_t) { return zero(); }
  static HS_INLINE f32x16 logits(Sum sum, const uint32_t*, int64_t, uint32_t) { return sum; }
  static HS_INLINE Sum add_key(Sum acc, i32x16 page, i32x16 q) { return dot_bf16(acc, page, q); }
  static HS_INLINE Sum add_value(Sum acc, i32x16 page, i32x16 weight) { return dot_bf16(acc, page, weight); }
  // The sum is that of weights as they were rounded: a key that has nearly all the weight gives its very value.
  static HS_INLINE f32x16 put_weights(uint32_t* to, f32x16 first, f32x16 second, f32x16 sum) {
    const i32x16 rounded = packed_bf16(first, second);
    store_i32(to, rounded);
    return dot_bf16(sum, rounded, set1(int32_t(0x3f803f80)));
  }
};

// acc[i] + sum over j < 4 of u[4i + j] * s[4i + j]: unsigned by signed bytes, exact if two neighbouring products fit into 16 bits.
HS_INLINE i32x16 dot_small(i32x16 acc, i32x16 u, i32x16 s) {
#if defined(HS_ISA_AVX512)
  return dot_u8_s8(acc, u, s);
#elif defined(HS_ISA_AVX2)
  i32x16 out;
  HS_EACH_PART {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)u.part[p], (__m256i)s.part[p]);
    out.part[p] = acc.part[p] + (native_i32)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  return out;
#else
  typedef int16_t shorts __attribute__((vector_size(kNativeBytes)));
  typedef uint16_t unsigned_shorts __attribute__((vector_size(kNativeBytes)));
  i32x16 out;
  HS_EACH_PART {
    const shorts us = (shorts)u.part[p], ss = (shorts)s.part[p];
    const shorts even = (us & 255) * ((shorts)((unsigned_shorts)ss << 8) >> 8);
    const native_i32 pairs = (native_i32)(even + (shorts)((unsigned_shorts)us >> 8) * (ss >> 8));
    out.part[p] = acc.part[p] + ((native_i32)((native_u32)pairs << 16) >> 16) + (pairs >> 16);
  }
  return out;
#endif
}

// Pages of bytes. A token has a scale for its key and one for its value; both stand before the words of its key.
//
// Products are exact sums of integers. A query and a weight would lose too much as one byte each, so they have two digits to base 128,
// the upper one first. Digits are small enough for `dot_small`: the bytes of a key are k + 128 and digits of a query from -64 to 64; the
// bytes of a value are signed and digits of a weight from 0 to 127.
struct PagesI8 {
  using Element = int8_t;
  using Sum = i32x16;
  static constexpr int kPerWord = 4;
  static constexpr int kDigits = 2;
  static constexpr int kHeaderWords = 2;
  static constexpr int kKeyScale = 0, kValueScale = 1;  // of a key's header; a query's has what its sums start with, then its scale
  static constexpr float kMostOfPage = 127, kMostOfQuery = 8127, kMostOfWeight = 16383;
  static HS_INLINE Sum start(uint32_t word) { return set1(int32_t(word)); }
  static HS_INLINE Sum add_key(Sum acc, i32x16 page, i32x16 q) { return dot_small(acc, page, q); }
  static HS_INLINE Sum add_value(Sum acc, i32x16 page, i32x16 weight) { return dot_small(acc, weight, page); }
  static HS_INLINE f32x16 logits(Sum sum, const uint32_t* keys, int64_t stride, uint32_t query_scale) {
    const f32x16 key_scales = as_f32(load_i32(keys + kKeyScale * stride));
    return to_f32(sum) * (key_scales * as_f32(set1(int32_t(query_scale))));
  }
};

// Sixteen times four weights of two digits, as bytes in the order of the keys.
HS_INLINE void store_digits(const i32x16 (&weights)[4], uint32_t* upper, uint32_t* lower) {
#if defined(HS_ISA_AVX512)
  const __m512i first = _mm512_packus_epi32((__m512i)weights[0].part[0], (__m512i)weights[1].part[0]);
  const __m512i second = _mm512_packus_epi32((__m512i)weights[2].part[0], (__m512i)weights[3].part[0]);
  // packing leaves four bytes of each group in each quarter
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i low = _mm512_set1_epi16(127);
  const __m512i uppers = _mm512_packus_epi16(_mm512_srli_epi16(first, 7), _mm512_srli_epi16(second, 7));
  const __m512i lowers = _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low));
  _mm512_storeu_si512(upper, _mm512_permutexvar_epi32(order, uppers));
  _mm512_storeu_si512(lower, _mm512_permutexvar_epi32(order, lowers));
#else
  for (int g = 0; g < 4; ++g) {
    store_bytes(upper + 4 * g, shift_right_logical(weights[g], 7));
    store_bytes(lower + 4 * g, weights[g] & set1(127));
  }
#endif
}

constexpr float kLeastTold = 1e-30f;  // magnitudes below aren't told from 0 where a scale is made for them

// Calls body(Pages{}) for what the pages hold.
template <typename Body>
HS_INLINE auto with_pages(int64_t kv_dtype, Body&& body) {
  if (kv_dtype == kF32) return body(PagesF32{});
  if (kv_dtype == kI8) return body(PagesI8{});
  return body(PagesBF16{});
}

}  // namespace hs
