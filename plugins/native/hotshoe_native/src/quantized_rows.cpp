// Activations to 8 bits: one scale per row and group of 32.
#include "quantized.h"

namespace hs {
namespace {

constexpr int kChunk = kLanes;  // groups whose scales are computed together, one in a lane
constexpr float kSmallestNormal = 1.17549435e-38f, kLargest = 3.40282347e38f;

// Maximum as integers, which for absolute values puts infinity and NaN above all numbers: neither gets lost.
struct Max {
  static HS_INLINE native_i32 of(native_i32 a, native_i32 b) { return a > b ? a : b; }
};
// Without signs: what isn't finite converts to the lowest integer, and its sums mean nothing.
struct Sum {
  static HS_INLINE native_i32 of(native_i32 a, native_i32 b) { return (native_i32)((native_u32)a + (native_u32)b); }
};

template <typename Fold>
HS_INLINE i32x16 fold(i32x16 a, i32x16 b) {
  i32x16 out;
  HS_EACH_PART out.part[p] = Fold::of(a.part[p], b.part[p]);
  return out;
}

// Lane i of the result is all lanes of vectors[i], folded.
template <typename Fold>
HS_INLINE i32x16 fold_each(const i32x16 (&vectors)[kLanes]) {
#if defined(HS_ISA_AVX512)
  // Two vectors at a time are folded into one that holds half as many lanes of each, until one is left.
  const auto half = [](__m512i lower, __m512i upper) { return Fold::of((native_i32)lower, (native_i32)upper); };
  native_i32 ones[8], twos[4], fours[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512i a = (__m512i)vectors[i].part[0], b = (__m512i)vectors[i + 8].part[0];
    ones[i] = half(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = (__m512i)ones[i], b = (__m512i)ones[i + 4];
    twos[i] = half(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));
  }
  // every 128 bits are of another vector
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i a = (__m512i)twos[i], b = (__m512i)twos[i + 2];
    fours[i] = half(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  const __m512i a = (__m512i)fours[0], b = (__m512i)fours[1];
  const __m512i even = _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), 0x88));
  const __m512i odd = _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return {{(native_i32)_mm512_permutexvar_epi32(order, (__m512i)half(even, odd))}};
#elif defined(HS_ISA_AVX2)
  // the same, for eight vectors whose parts are folded first
  const auto half = [](__m256i lower, __m256i upper) { return (__m256i)Fold::of((native_i32)lower, (native_i32)upper); };
  i32x16 out;
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p) {
    __m256i whole[8], ones[4], twos[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) whole[i] = half((__m256i)vectors[8 * p + i].part[0], (__m256i)vectors[8 * p + i].part[1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      ones[i] = half(_mm256_permute2x128_si256(whole[i], whole[i + 4], 0x20), _mm256_permute2x128_si256(whole[i], whole[i + 4], 0x31));
    // every 128 bits are of another vector
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) twos[i] = half(_mm256_unpacklo_epi64(ones[i], ones[i + 2]), _mm256_unpackhi_epi64(ones[i], ones[i + 2]));
    const __m256 a = _mm256_castsi256_ps(twos[0]), b = _mm256_castsi256_ps(twos[1]);
    const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), odd = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
    out.part[p] = (native_i32)_mm256_shuffle_epi32(half(even, odd), _MM_SHUFFLE(3, 1, 2, 0));
  }
  return out;
#else
  alignas(64) int32_t folded[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    native_i32 all = vectors[i].part[0];
    for (int p = 1; p < kParts; ++p) all = Fold::of(all, vectors[i].part[p]);
    native_i32 one = {all[0]};
    for (int lane = 1; lane < kPartLanes; ++lane) one = Fold::of(one, native_i32{all[lane]});
    folded[i] = one[0];
  }
  return load_i32(folded);
#endif
}

// A group's values, in two vectors.
struct Halves {
  f32x16 first, second;
};

template <typename T>
HS_INLINE Halves load_group(const T* x) {
#if defined(HS_ISA_AVX512)
  if constexpr (sizeof(T) == 2) {  // those at even places, and the others
    const i32x16 pairs = {{(native_i32)_mm512_loadu_si512(x)}};  // aligned to two bytes
    return {as_f32(shift_left(pairs, 16)), as_f32(pairs & set1(int32_t(0xffff0000)))};
  }
#endif
  return {load(x), load(x + kLanes)};
}

// Integers made of load_group<T>, to bytes in the order of the group.
template <typename T>
HS_INLINE void store_group(int8_t* to, i32x16 first, i32x16 second) {
#if defined(HS_ISA_AVX512)
  if constexpr (sizeof(T) == 2) {
    const __m512i words = _mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)first.part[0], (__m512i)shift_left(second, 16).part[0]);
    const __m256i bytes = _mm512_cvtepi16_epi8(words);
    std::memcpy(to, &bytes, 32);
  } else {
    const __m128i halves[2] = {_mm512_cvtepi32_epi8((__m512i)first.part[0]), _mm512_cvtepi32_epi8((__m512i)second.part[0])};
    std::memcpy(to, halves, 32);
  }
#else
  store_bytes(to, first);
  store_bytes(to + kLanes, second);
#endif
}

template <typename T>
struct Chunk {
  const T* from[kChunk];
  QuantizedGroup* to[kChunk];
};

// All but the bytes.
template <typename T>
HS_INLINE void store_scales(const Chunk<T>& chunk, f32x16 scale, i32x16 total) {
  i32x16 negative;
  HS_EACH_PART negative.part[p] = (native_i32)(0 - (native_u32)total.part[p]);
  const i32x16 fields[4] = {as_i32(scale), as_i32(scale * to_f32(total)), shift_left(negative, 3), shift_left(negative, 7)};
#if defined(HS_ISA_AVX512)
  const __m512i a = (__m512i)fields[0].part[0], b = (__m512i)fields[1].part[0];
  const __m512i c = (__m512i)fields[2].part[0], d = (__m512i)fields[3].part[0];
  const __m512i lower[2] = {_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d)};
  const __m512i upper[2] = {_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d)};
  // 128 bits are a group, in each of them every fourth
  const __m512i each[4] = {_mm512_unpacklo_epi64(lower[0], lower[1]), _mm512_unpackhi_epi64(lower[0], lower[1]),
                           _mm512_unpacklo_epi64(upper[0], upper[1]), _mm512_unpackhi_epi64(upper[0], upper[1])};
  const auto put = [&](int i, __m128i value) { std::memcpy(&chunk.to[i]->scale, &value, sizeof(value)); };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    put(i, _mm512_castsi512_si128(each[i]));
    put(i + 4, _mm512_extracti32x4_epi32(each[i], 1));
    put(i + 8, _mm512_extracti32x4_epi32(each[i], 2));
    put(i + 12, _mm512_extracti32x4_epi32(each[i], 3));
  }
#else
  alignas(64) int32_t values[4][kChunk];
  for (int f = 0; f < 4; ++f) store_i32(values[f], fields[f]);
  for (int i = 0; i < kChunk; ++i) {
    const int32_t of_group[4] = {values[0][i], values[1][i], values[2][i], values[3][i]};
    std::memcpy(&chunk.to[i]->scale, of_group, sizeof(of_group));
  }
#endif
}

// Whether all are at least kSmallestNormal and at most kLargest; none is negative.
HS_INLINE bool are_normal(f32x16 values) {
  const i32x16 bits = as_i32(values);
#if defined(HS_ISA_AVX512)
  const __m512i offset = _mm512_sub_epi32((__m512i)bits.part[0], _mm512_set1_epi32(0x00800000));
  return _mm512_cmpge_epu32_mask(offset, _mm512_set1_epi32(0x7f000000)) == 0;
#else
  alignas(64) int32_t lanes[kLanes];
  store_i32(lanes, bits);
  bool all = true;
  for (int i = 0; i < kLanes; ++i) all &= lanes[i] >= 0x00800000 && lanes[i] < 0x7f800000;
  return all;
#endif
}

template <typename T>
void quantize_chunk(const Chunk<T>& chunk) {
  i32x16 magnitudes[kChunk], totals[kChunk];
#pragma GCC unroll 16
  for (int i = 0; i < kChunk; ++i) {
    const Halves x = load_group(chunk.from[i]);
    magnitudes[i] = fold<Max>(as_i32(abs(x.first)), as_i32(abs(x.second)));
  }
  const f32x16 scale = as_f32(fold_each<Max>(magnitudes)) / set1(127.0f);
  alignas(64) float scales[kChunk], inverses[kChunk];
  store(scales, scale);
  store(inverses, set1(1.0f) / scale);
#pragma GCC unroll 16
  for (int i = 0; i < kChunk; ++i) {
    const Halves x = load_group(chunk.from[i]);
    const i32x16 first = to_i32(x.first * set1(inverses[i])), second = to_i32(x.second * set1(inverses[i]));
    store_group<T>(chunk.to[i]->q, first, second);
    totals[i] = fold<Sum>(first, second);
  }
  store_scales(chunk, scale, fold_each<Sum>(totals));
  if (are_normal(scale)) return;
  for (int i = 0; i < kChunk; ++i) {
    if (scales[i] >= kSmallestNormal && scales[i] <= kLargest) continue;
    // 1 / scale is infinite for zeros and for subnormal scales: such groups, below 1.5e-36, count as zeros. Of infinity and NaN, the
    // scale tells: what they convert to means nothing.
    const float kept = scales[i] < kSmallestNormal ? 0.0f : scales[i];
    *chunk.to[i] = {{}, kept, kept * 0.0f, 0, 0};
  }
}

template <typename T>
void quantize(const T* x, int64_t x_stride, Range groups, const QuantizedRows& out) {
  const int64_t per_row = out.k / kGroup, first_row = groups.begin / per_row, out_stride = QuantizedRows::stride(out.k);
  int64_t place = groups.begin % per_row;
  x += first_row * x_stride;
  char* to = reinterpret_cast<char*>(out.row(first_row));
  for (int64_t left = groups.end - groups.begin; left > 0; left -= kChunk) {
    Chunk<T> chunk;
    const int count = int(left < kChunk ? left : kChunk);
    for (int i = 0; i < count; ++i) {
      chunk.from[i] = x + place * kGroup;
      chunk.to[i] = reinterpret_cast<QuantizedGroup*>(to) + place;
      if (++place == per_row) {
        place = 0;
        x += x_stride;
        to += out_stride;
      }
    }
    for (int i = count; i < kChunk; ++i) {  // the last group again
      chunk.from[i] = chunk.from[count - 1];
      chunk.to[i] = chunk.to[count - 1];
    }
    quantize_chunk(chunk);
  }
}

}  // namespace

void quantize_rows(const void* x, int64_t x_stride, int64_t dtype, Range groups, const QuantizedRows& out) {
  if (dtype == kF32) {
    quantize(static_cast<const float*>(x), x_stride, groups, out);
  } else {
    quantize(static_cast<const bf16*>(x), x_stride, groups, out);
  }
}

}  // namespace hs
