// Weights of 4 and 8 bits, times activations that are rounded to 8 bits as they come.
//
// Along K everything goes in groups of 32, so k is a multiple of 32. A group of an input row is 32 signed bytes q and one scale s, x = s * q
// (s = max|x| / 127). A group of a weight panel is 32 columns of 32 unsigned bytes or nibbles, with the scales of its format. Products of
// a group add up in integers, exactly; groups add up in float32, first to last, whatever the number of rows: batches do not change results.
//
// A group of a panel is laid out as [8][32][4]: four neighbours along K, for each of 32 columns, eight times. Formats:
//
//   kInt8   1024 bytes w + 128; one float32 scale per column, for all of K, in HsWeight::scales
//   kQ8_0   32 float16 d, 1024 bytes q + 128            w = d * q
//   kQ4_0   32 float16 d, 512 bytes of nibbles          w = d * (q - 8)
//   kQ4_1   32 float16 d, 32 float16 m, 512 nibbles     w = d * q + m
//
// A byte of nibbles holds the element of step t < 4 in its lower half, that of step t + 4 in its upper half.
#pragma once

#include "simd.h"
#include "weight.h"

namespace hs {

constexpr int kGroup = 32;  // values along K that share a scale

// A group of an input row.
struct QuantizedGroup {
  int8_t q[kGroup];
  float scale;
  float scaled_sum;          // scale * sum of q
  int32_t minus_8_sums;      // -8 * sum of q
  int32_t minus_128_sums;    // -128 * sum of q
};
static_assert(sizeof(QuantizedGroup) == 48, "Python allocates them");

// Input rows after quantize_rows.
struct QuantizedRows {
  void* data;
  int64_t k;

  // Every row starts at a cache line.
  static int64_t stride(int64_t k) { return (k / kGroup * int64_t(sizeof(QuantizedGroup)) + 63) / 64 * 64; }
  QuantizedGroup* row(int64_t i) const {
    return reinterpret_cast<QuantizedGroup*>(static_cast<char*>(data) + i * stride(k));
  }
};

// Quantize some of the groups of x, counted through all rows, which are x_stride elements of `dtype` apart.
void quantize_rows(const void* x, int64_t x_stride, int64_t dtype, Range groups, const QuantizedRows& out);

// See weight.h.
void panels_int8(const HsWeight& part, const Panels& panels, const QuantizedRows& x, const Output& y);
void panels_q8_0(const HsWeight& part, const Panels& panels, const QuantizedRows& x, const Output& y);
void panels_q4_0(const HsWeight& part, const Panels& panels, const QuantizedRows& x, const Output& y);
void panels_q4_1(const HsWeight& part, const Panels& panels, const QuantizedRows& x, const Output& y);

// How many rows of x stay in a cache while panels pass by: more are taken in blocks.
int64_t quantized_block_rows(const HsWeight& part);

// One row (output column) of a quantized part: k values.
void dequantize_row(const HsWeight& part, int64_t row, float* out);
void dequantize_row(const HsWeight& part, int64_t row, bf16* out);

}  // namespace hs
