// Matrix products with dense weights.
//
// A tile is some rows of x by the columns of a panel, or of four panels where there are too few rows to keep the multipliers busy. All
// its sums stay in registers while K goes by, so that the order of additions is the same for every number of rows, and a tile runs at
// the speed of the multipliers if the panel comes out of a near cache. It does: rows are taken tile after tile inside a panel, and
// meanwhile the tiles of one panel fetch the next, each its part of it.
#include "dense.h"

#include <algorithm>

#include "output.h"
#include "simd.h"

namespace hs {
namespace {

constexpr int64_t kStepBytes = kPanelColumns * 4;
constexpr int kVectors = kPanelColumns / kLanes;  // per panel

// The most rows of a tile, by the number of registers; where products of bfloat16 take several instructions, spilling sums is cheap.
#if defined(HS_ISA_AVX512)
constexpr int kMaxRowsF32 = 8, kMaxRowsBF16 = 8;
constexpr int kMaxPanels = 4;
#else
constexpr int kMaxRowsF32 = 3, kMaxRowsBF16 = 6;
constexpr int kMaxPanels = 1;
#endif

// How far ahead of its use a weight that is used once is fetched; the hardware is ahead of that, but would keep it.
constexpr int64_t kOnceBytes = 2048;

// Rows of x that are used again for every panel: half of a level 2 cache.
constexpr int64_t kRowBlockBytes = 512 << 10;

struct F32 {
  using Value = float;
  static constexpr int kPerStep = 1, kMaxRows = kMaxRowsF32;
  static HS_INLINE f32x16 multiply_add(f32x16 sum, i32x16 w, i32x16 x) { return fma(as_f32(w), as_f32(x), sum); }
};

struct BF16 {
  using Value = bf16;
  static constexpr int kPerStep = 2, kMaxRows = kMaxRowsBF16;
  static HS_INLINE f32x16 multiply_add(f32x16 sum, i32x16 w, i32x16 x) { return dot_bf16(sum, w, x); }
};

// What the tiles of a part have in common.
template <typename Format>
struct Product {
  using Value = typename Format::Value;

  const HsWeight& part;
  const Value* x;
  int64_t x_stride;
  const Output& y;

  int64_t whole_steps() const { return part.k / Format::kPerStep; }
  const char* panel(int64_t index) const { return static_cast<const char*>(hs::panel(part, index)); }
};

// Memory that a tile asks into the level 2 cache while it works.
struct Prefetch {
  const char* from;
  int64_t bytes_per_step;

  HS_INLINE void step() {
    __builtin_prefetch(from, 0, 2);
    __builtin_prefetch(from + 64, 0, 2);
    from += bytes_per_step;
  }
};

template <typename Format, int kRows, int kSums>
HS_INLINE void multiply_step(f32x16 (&sums)[kRows][kSums], const char* w, int64_t panel_bytes, const int32_t (&x)[kRows]) {
  i32x16 weights[kSums];
#pragma GCC unroll 8
  for (int v = 0; v < kSums; ++v) weights[v] = load_i32(w + v / kVectors * panel_bytes + v % kVectors * 64);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const i32x16 value = set1(x[r]);
#pragma GCC unroll 8
    for (int v = 0; v < kSums; ++v) sums[r][v] = Format::multiply_add(sums[r][v], weights[v], value);
  }
}

// Rows [row, row + kRows) by panels [panel, panel + kPanels).
template <typename Format, int kRows, int kPanels>
void tile(const Product<Format>& product, int64_t row, int64_t panel, Prefetch prefetches) {
  const int64_t panel_bytes = product.part.panel_bytes, whole_steps = product.whole_steps();
  const auto* x = product.x + row * product.x_stride;
  const char* w = product.panel(panel);
  prefetch_outputs<kRows>(product.y, row, panel * kPanelColumns);
  f32x16 sums[kRows][kPanels * kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanels * kVectors; ++v) sums[r][v] = zero();
  }

  int32_t values[kRows];
  for (int64_t step = 0; step < whole_steps; ++step, w += kStepBytes) {
    if constexpr (kPanels == 1) {
      prefetches.step();
    } else {
      // read once: what others need, as Python between two steps, shall stay in the caches
#pragma GCC unroll 8
      for (int v = 0; v < kPanels * kVectors; ++v) prefetch_once(w + kOnceBytes + v / kVectors * panel_bytes + v % kVectors * 64);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) std::memcpy(&values[r], x + r * product.x_stride + step * Format::kPerStep, 4);
    multiply_step<Format>(sums, w, panel_bytes, values);
  }
  if (whole_steps * Format::kPerStep < product.part.k) {  // the last value of an odd k, beside a zero
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      values[r] = 0;
      std::memcpy(&values[r], x + r * product.x_stride + product.part.k - 1, sizeof(*x));
    }
    multiply_step<Format>(sums, w, panel_bytes, values);
  }

  write_outputs(product.part, row, panel * kPanelColumns, sums, product.y);
}

// The tile of num_rows rows, 1 to kRows, by one panel.
template <typename Format, int kRows = Format::kMaxRows>
void one_panel(const Product<Format>& product, int64_t row, int64_t num_rows, int64_t panel, Prefetch prefetches) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return one_panel<Format, kRows - 1>(product, row, num_rows, panel, prefetches);
  }
  tile<Format, kRows, 1>(product, row, panel, prefetches);
}

// One or two rows: bound by reading the weights, and by the latency of a sum if there are few of them.
template <typename Format>
void few_rows(const Product<Format>& product, int64_t num_rows, const Panels& panels) {
  int64_t panel = panels.begin;
  for (; panel + kMaxPanels <= panels.end; panel += kMaxPanels) {
    if (num_rows == 1) {
      tile<Format, 1, kMaxPanels>(product, 0, panel, {});
    } else {
      tile<Format, 2, kMaxPanels>(product, 0, panel, {});
    }
  }
  for (; panel < panels.end; ++panel) one_panel(product, 0, num_rows, panel, {product.panel(panel), 0});
}

template <typename Format>
void many_rows(const Product<Format>& product, Range rows, const Panels& panels) {
  // tiles of equal height, give or take one row
  const int64_t num_rows = rows.end - rows.begin, num_tiles = (num_rows + Format::kMaxRows - 1) / Format::kMaxRows;
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const bool is_last = panel + 1 == panels.end;
    const char* next = is_last && panels.then ? static_cast<const char*>(panels.then) : product.panel(is_last ? panel : panel + 1);
    for (int64_t i = 0; i < num_tiles; ++i) {
      const int64_t begin = rows.begin + num_rows * i / num_tiles, end = rows.begin + num_rows * (i + 1) / num_tiles;
      const Prefetch prefetches{next + product.part.panel_bytes * i / num_tiles, kStepBytes / num_tiles};
      one_panel(product, begin, end - begin, panel, prefetches);
    }
  }
}

template <typename Format>
int64_t block_rows(int64_t k) {
  const int64_t row_bytes = k * int64_t(sizeof(typename Format::Value));
  return std::max<int64_t>(kRowBlockBytes / row_bytes / Format::kMaxRows, 1) * Format::kMaxRows;
}

template <typename Format>
void panels_dense(const HsWeight& part, const Panels& panels, const void* x, int64_t x_stride, const Output& y) {
  using Value = typename Format::Value;
  const Product<Format> product{part, static_cast<const Value*>(x), x_stride, y};
  if (y.num_rows <= 2) {
    if (y.num_rows > 0) few_rows(product, y.num_rows, panels);
    return;
  }
  const int64_t block = block_rows<Format>(part.k);
  for (int64_t begin = 0; begin < y.num_rows; begin += block) {
    many_rows(product, {begin, std::min(begin + block, y.num_rows)}, panels);
  }
}

template <typename Format>
void copy_row(const HsWeight& part, int64_t row, void* out) {
  using Value = typename Format::Value;
  const char* from = static_cast<const char*>(panel(part, row / kPanelColumns)) + row % kPanelColumns * 4;
  auto* to = static_cast<char*>(out);
  int64_t num_bytes = part.k * int64_t(sizeof(Value));
  for (; num_bytes >= 4; num_bytes -= 4, from += kStepBytes, to += 4) std::memcpy(to, from, 4);
  if (num_bytes > 0) std::memcpy(to, from, num_bytes);
}

}  // namespace

void panels_dense_f32(const HsWeight& part, const Panels& panels, const void* x, int64_t x_stride, const Output& y) {
  panels_dense<F32>(part, panels, x, x_stride, y);
}

void panels_dense_bf16(const HsWeight& part, const Panels& panels, const void* x, int64_t x_stride, const Output& y) {
  panels_dense<BF16>(part, panels, x, x_stride, y);
}

int64_t dense_block_rows(const HsWeight& part) {
  return part.format == kDenseF32 ? block_rows<F32>(part.k) : block_rows<BF16>(part.k);
}

void dense_row(const HsWeight& part, int64_t row, void* out) {
  if (part.format == kDenseF32) {
    copy_row<F32>(part, row, out);
  } else {
    copy_row<BF16>(part, row, out);
  }
}

}  // namespace hs
