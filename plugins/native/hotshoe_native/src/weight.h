// A linear layer's packed weight, as Python hands it over: a chain of parts, each in a format of its own.
//
// Every format packs its rows (the output columns) in panels of 32, so that one thread can compute 32 outputs of every input row on its
// own. Threads share the panels of a layer; how the inside of a panel looks is known to the functions of its format only.
#pragma once

#include "op.h"

namespace hs {

enum WeightFormat : int64_t { kDenseF32 = 0, kDenseBF16 = 1, kInt8 = 2, kQ8_0 = 3, kQ4_0 = 4, kQ4_1 = 5 };

constexpr int kPanelColumns = 32;

// One part: `n` output columns of `k` inputs.
struct HsWeight {
  int64_t format;       // a WeightFormat
  int64_t n, k;
  const void* data;     // panels, padded with zeros to whole ones
  int64_t panel_bytes;
  const float* scales;  // per column, for the formats that have them; padded like data
  const float* bias;    // [n], or null
  const HsWeight* next; // the part whose columns follow; null = last
};

inline int64_t num_panels(int64_t n) { return (n + kPanelColumns - 1) / kPanelColumns; }
inline const void* panel(const HsWeight& part, int64_t index) { return static_cast<const char*>(part.data) + index * part.panel_bytes; }

// Where a part's outputs go: column j of row i is element i * stride + j, counted from the part's first column.
struct Output {
  void* data;
  int64_t stride;
  int64_t dtype;  // a DType
  int64_t num_rows;
  const void* gates = nullptr;  // of dtype, or null: outputs are rounded to dtype, and multiplied by the silu of their gates
  int64_t gates_stride = 0;     // gates lie as outputs do
};

// Panels [begin, end) of a part, and the panel that this thread reads after them: one as large, or null if there is none.
struct Panels {
  int64_t begin, end;
  const void* then = nullptr;
};

// Each format defines, for some panels of a part and every row of y:
//
//   void panels_<format>(const HsWeight& part, const Panels& panels, const QuantizedRows& x, const Output& y);     quantized.h
//   void panels_dense_<dtype>(const HsWeight& part, const Panels& panels, const void* x, int64_t x_stride, const Output& y);     dense.h
//
// including the bias, writing no column at or past part.n, and adding up a row's products in an order that depends on nothing but k.

}  // namespace hs
