// Activations to 8 bits: one scale per row and group of 32.
#include "quantized.h"

namespace hs {
namespace {

constexpr int kChunk = 16;  // groups whose scales are computed together
constexpr float kSmallestNormal = 1.17549435e-38f, kLargest = 3.40282347e38f;

// Maximum as integers, which for absolute values puts infinity and NaN above all numbers: neither gets lost.
HS_INLINE i32x16 max_bits(i32x16 a, i32x16 b) {
  i32x16 out;
  HS_EACH_PART out.part[p] = a.part[p] > b.part[p] ? a.part[p] : b.part[p];
  return out;
}

template <typename T>
HS_INLINE int32_t largest_bits(const T* x) {
  const i32x16 magnitudes = max_bits(as_i32(abs(load(x))), as_i32(abs(load(x + kLanes))));
#if defined(HS_ISA_AVX512)
  return _mm512_reduce_max_epi32((__m512i)magnitudes.part[0]);
#else
  alignas(64) int32_t lanes[kLanes];
  store_i32(lanes, magnitudes);
  int32_t largest = lanes[0];
  for (int i = 1; i < kLanes; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  return largest;
#endif
}

// 16 bytes.
HS_INLINE void store_bytes(int8_t* to, i32x16 value) {
#if defined(HS_ISA_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)value.part[0]));
#else
  alignas(64) int32_t lanes[kLanes];
  store_i32(lanes, value);
  for (int i = 0; i < kLanes; ++i) to[i] = int8_t(lanes[i]);
#endif
}

template <typename T>
HS_INLINE void quantize_group(const T* x, float scale, float inverse, QuantizedGroup* out) {
  const i32x16 first = to_i32(load(x) * set1(inverse));
  const i32x16 second = to_i32(load(x + kLanes) * set1(inverse));
  store_bytes(out->q, first);
  store_bytes(out->q + kLanes, second);
#if defined(HS_ISA_AVX512)
  const int32_t total = _mm512_reduce_add_epi32((__m512i)(first + second).part[0]);
#else
  const int32_t total = sum(first + second);
#endif
  out->scale = scale;
  out->scaled_sum = scale * float(total);
  out->minus_8_sums = -8 * total;
  out->minus_128_sums = -128 * total;
}

template <typename T>
void quantize_row(const T* x, int64_t k, QuantizedGroup* out) {
  for (int64_t done = 0; done < k / kGroup; done += kChunk) {
    const int count = int(k / kGroup - done < kChunk ? k / kGroup - done : kChunk);
    alignas(64) int32_t magnitudes[kChunk] = {};
    for (int i = 0; i < count; ++i) magnitudes[i] = largest_bits(x + (done + i) * kGroup);
    alignas(64) float scales[kChunk], inverses[kChunk];
    const f32x16 scale = as_f32(load_i32(magnitudes)) / set1(127.0f);
    store(scales, scale);
    store(inverses, set1(1.0f) / scale);
    for (int i = 0; i < count; ++i) {
      QuantizedGroup* group = out + done + i;
      if (scales[i] >= kSmallestNormal && scales[i] <= kLargest) {
        quantize_group(x + (done + i) * kGroup, scales[i], inverses[i], group);
      } else {
        // 1 / scale is infinite for zeros and for subnormal scales: such groups, below 1.5e-36, count as zeros. Of infinity and NaN, the
        // scale tells: what they convert to means nothing.
        const float kept = scales[i] < kSmallestNormal ? 0.0f : scales[i];
        *group = {{}, kept, kept * 0.0f, 0, 0};
      }
    }
  }
}

}  // namespace

void quantize_rows(const void* x, int64_t x_stride, int64_t dtype, Range rows, const QuantizedRows& out) {
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    if (dtype == kF32) {
      quantize_row(static_cast<const float*>(x) + i * x_stride, out.k, out.row(i));
    } else {
      quantize_row(static_cast<const bf16*>(x) + i * x_stride, out.k, out.row(i));
    }
  }
}

}  // namespace hs
