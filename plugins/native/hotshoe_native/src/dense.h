// Weights that are plain numbers, float32 or bfloat16.
//
// A step of a panel is 128 bytes: four bytes along K for each of 32 columns, that is [32] float32 or [32][2] bfloat16. So panels are
// [k][32] and [ceil(k / 2)][32][2]. Inputs have the dtype of the weight, outputs that or float32; sums are float32, one per
// output, first k to last.
#pragma once

#include "weight.h"

namespace hs {

// See weight.h; rows of x are x_stride elements apart.
void panels_dense_f32(const HsWeight& part, const Panels& panels, const void* x, int64_t x_stride, const Output& y);
void panels_dense_bf16(const HsWeight& part, const Panels& panels, const void* x, int64_t x_stride, const Output& y);

// How many rows of x stay in a cache while panels pass by: more are taken in blocks.
int64_t dense_block_rows(const HsWeight& part);

// One row (output column) of a dense part.
void dense_row(const HsWeight& part, int64_t row, void* out);

}  // namespace hs
