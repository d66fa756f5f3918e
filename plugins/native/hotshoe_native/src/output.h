// How the sums of a tile become outputs: what is common to all formats.
#pragma once

#include "simd.h"
#include "weight.h"

namespace hs {

// Lines that are written at the end of a tile are asked for at its start: where rows are a multiple of 4 KiB apart, as with many
// vocabularies, they push each other out of the cache before.
template <int kRows>
HS_INLINE void prefetch_outputs(const Output& y, int64_t row, int64_t column) {
  const int64_t element_bytes = y.dtype == kF32 ? 4 : 2;
  const char* line = static_cast<const char*>(y.data) + (row * y.stride + column) * element_bytes;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, line += y.stride * element_bytes) __builtin_prefetch(line, 1, 3);
}

// The last columns of a part: `count` of num_columns in every row of sums.
template <typename T>
__attribute__((noinline)) void write_last_columns(const float* sums, int num_rows, int num_columns, int count, const float* bias, T* y,
                                                  int64_t y_stride) {
  for (int r = 0; r < num_rows; ++r, sums += num_columns, y += y_stride) {
    for (int begin = 0; begin < count; begin += kLanes) {
      const int some = count - begin < kLanes ? count - begin : kLanes;
      const f32x16 sum = load(sums + begin);
      store_some(y + begin, bias ? sum + load_some(bias + begin, some) : sum, some);
    }
  }
}

// As an activation of type T would hold it.
template <typename T>
HS_INLINE f32x16 rounded(f32x16 value) {
  T lanes[kLanes];
  store(lanes, value);
  return load(lanes);
}

// As write_outputs, for sums of num_columns columns that lie in memory, times the silu of their gates: a call, as exp takes much code.
template <typename T>
__attribute__((noinline)) void write_gated(const HsWeight& part, int64_t row, int64_t column, const float* sums, int num_rows,
                                           int num_columns, const Output& y) {
  const int64_t count = part.n - column;
  const float* bias = part.bias ? part.bias + column : nullptr;
  const T* gates = static_cast<const T*>(y.gates) + row * y.gates_stride + column;
  T* out = static_cast<T*>(y.data) + row * y.stride + column;
  for (int r = 0; r < num_rows; ++r, sums += num_columns, gates += y.gates_stride, out += y.stride) {
    for (int begin = 0; begin < num_columns; begin += kLanes) {
      f32x16 sum = load(sums + begin);
      if (begin + kLanes <= count) {
        if (bias) sum = sum + load(bias + begin);
        store(out + begin, silu_of(load(gates + begin)) * rounded<T>(sum));
      } else if (begin < count) {
        const int some = int(count) - begin;
        if (bias) sum = sum + load_some(bias + begin, some);
        store_some(out + begin, silu_of(load_some(gates + begin, some)) * rounded<T>(sum), some);
      }
    }
  }
}

template <int kRows, int kVectors>
HS_INLINE void spill(const f32x16 (&sums)[kRows][kVectors], float (&to)[kRows][kVectors * kLanes]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(to[r] + v * kLanes, sums[r][v]);
}

template <int kRows, int kVectors, typename T>
HS_INLINE void write_tile(const HsWeight& part, int64_t column, f32x16 (&sums)[kRows][kVectors], T* y, int64_t y_stride) {
  constexpr int kColumns = kVectors * kLanes;
  const int64_t count = part.n - column;
  const float* bias = part.bias ? part.bias + column : nullptr;
  if (__builtin_expect(count < kColumns, 0)) {
    if (count <= 0) return;
    alignas(64) float columns[kRows][kColumns];
    spill(sums, columns);
    return write_last_columns(columns[0], kRows, kColumns, int(count), bias, y, y_stride);
  }
  if (bias) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const f32x16 biases = load(bias + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sums[r][v] = sums[r][v] + biases;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, y += y_stride)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(y + v * kLanes, sums[r][v]);
}

// Sums of kRows rows from `row` on and of columns of `part` from `column` on, to y: the bias is added, and no column at or past part.n
// is written.
template <int kRows, int kVectors>
HS_INLINE void write_outputs(const HsWeight& part, int64_t row, int64_t column, f32x16 (&sums)[kRows][kVectors], const Output& y) {
  if (y.gates) {
    constexpr int kColumns = kVectors * kLanes;
    alignas(64) float columns[kRows][kColumns];
    spill(sums, columns);
    return y.dtype == kF32 ? write_gated<float>(part, row, column, columns[0], kRows, kColumns, y)
                           : write_gated<bf16>(part, row, column, columns[0], kRows, kColumns, y);
  }
  const int64_t offset = row * y.stride + column;
  if (y.dtype == kF32) {
    write_tile(part, column, sums, static_cast<float*>(y.data) + offset, y.stride);
  } else {
    write_tile(part, column, sums, static_cast<bf16*>(y.data) + offset, y.stride);
  }
}

}  // namespace hs
