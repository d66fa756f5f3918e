// Quantized panels times quantized rows: tiles of a few rows by 32 columns, accumulators in registers.
#include "output.h"
#include "quantized_dot.h"

namespace hs {
namespace {

#if defined(HS_ISA_AVX512)
constexpr int kTileRows = 6;
constexpr int kTileVectors = 2;
#else
constexpr int kTileRows = 4;
constexpr int kTileVectors = 1;
#endif
constexpr int kPanelVectors = kPanelColumns / kLanes;

#define HS_EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < Rows; ++r)
#define HS_EACH_VECTOR _Pragma("GCC unroll 2") for (int v = 0; v < kTileVectors; ++v)

// What a format is to a tile: unsigned bytes per step, the correction for their offset, and what the sum of a group counts for.
struct Int8 {
  using Group = Int8Group;
  using Products = ByteDot;
  static HS_INLINE i32x16 bytes(const Group& w, int step, int vector) { return load_i32(w.q + step * kStepBytes + vector * 64); }
  static HS_INLINE int32_t correction(const QuantizedGroup& x) { return x.minus_128_sums; }
  static HS_INLINE f32x16 add(f32x16 total, f32x16 products, const Group&, int, const QuantizedGroup& x) {
    return fma(products, set1(x.scale), total);
  }
};

struct Q8_0 {
  using Group = Q8_0Group;
  using Products = ByteDot;
  static HS_INLINE i32x16 bytes(const Group& w, int step, int vector) { return load_i32(w.q + step * kStepBytes + vector * 64); }
  static HS_INLINE int32_t correction(const QuantizedGroup& x) { return x.minus_128_sums; }
  static HS_INLINE f32x16 add(f32x16 total, f32x16 products, const Group& w, int vector, const QuantizedGroup& x) {
    return fma(products * load_f16(w.d + vector * kLanes), set1(x.scale), total);
  }
};

HS_INLINE i32x16 nibbles(const uint8_t* q, int step, int vector) {
  const i32x16 both = load_i32(q + step % 4 * kStepBytes + vector * 64);
  return (step < 4 ? both : shift_right_logical(both, 4)) & set1(0x0f0f0f0f);
}

struct Q4_0 {
  using Group = Q4_0Group;
  using Products = NibbleDot;
  static HS_INLINE i32x16 bytes(const Group& w, int step, int vector) { return nibbles(w.q, step, vector); }
  static HS_INLINE int32_t correction(const QuantizedGroup& x) { return x.minus_8_sums; }
  static HS_INLINE f32x16 add(f32x16 total, f32x16 products, const Group& w, int vector, const QuantizedGroup& x) {
    return fma(products * load_f16(w.d + vector * kLanes), set1(x.scale), total);
  }
};

struct Q4_1 {
  using Group = Q4_1Group;
  using Products = NibbleDot;
  static HS_INLINE i32x16 bytes(const Group& w, int step, int vector) { return nibbles(w.q, step, vector); }
  static HS_INLINE int32_t correction(const QuantizedGroup&) { return 0; }
  static HS_INLINE f32x16 add(f32x16 total, f32x16 products, const Group& w, int vector, const QuantizedGroup& x) {
    total = fma(products, load_f16(w.d + vector * kLanes) * set1(x.scale), total);
    return fma(load_f16(w.m + vector * kLanes), set1(x.scaled_sum), total);
  }
};

// Memory to fetch into the second-level cache while a tile is computed: some cache lines per group.
struct Ahead {
  const char* from;
  int64_t num_lines;

  HS_INLINE void fetch() {
    for (int64_t i = 0; i < num_lines; ++i, from += 64) __builtin_prefetch(from, 0, 2);
  }
};

// What the tiles of a part have in common.
template <typename Format>
struct Product {
  using Group = typename Format::Group;

  const HsWeight& part;
  const QuantizedRows& x;
  const Output& y;

  int64_t num_groups() const { return part.k / kGroup; }
  const Group* panel(int64_t index) const { return static_cast<const Group*>(hs::panel(part, index)); }
};

// Rows [row, row + Rows) by kTileVectors vectors of columns of a panel, from `first_vector` on.
template <typename Format, int Rows>
void tile(const Product<Format>& product, int64_t row, int64_t panel, int first_vector, Ahead ahead) {
  const HsWeight& part = product.part;
  const Output& y = product.y;
  const int64_t x_stride = QuantizedRows::stride(part.k), num_groups = product.num_groups();
  const int64_t column = panel * kPanelColumns + first_vector * kLanes;
  f32x16 totals[Rows][kTileVectors];
  prefetch_outputs<Rows>(y, row, column);
  HS_EACH_ROW HS_EACH_VECTOR totals[r][v] = zero();
  const auto* w = product.panel(panel);
  const char* rows = reinterpret_cast<const char*>(product.x.row(row));
  for (int64_t g = 0; g < num_groups; ++g, ++w, rows += sizeof(QuantizedGroup)) {
    ahead.fetch();
    typename Format::Products products[Rows][kTileVectors];
    const QuantizedGroup* x_rows[Rows];
    HS_EACH_ROW x_rows[r] = reinterpret_cast<const QuantizedGroup*>(rows + r * x_stride);
    HS_EACH_ROW HS_EACH_VECTOR products[r][v] = Format::Products::begin(Format::correction(*x_rows[r]));
    _Pragma("GCC unroll 8") for (int step = 0; step < kSteps; ++step) {
      i32x16 bytes[kTileVectors];
      HS_EACH_VECTOR bytes[v] = Format::bytes(*w, step, first_vector + v);
      HS_EACH_ROW {
        int32_t four;
        std::memcpy(&four, x_rows[r]->q + 4 * step, 4);
        HS_EACH_VECTOR products[r][v].add(bytes[v], set1(four));
      }
    }
    HS_EACH_ROW HS_EACH_VECTOR {
      const f32x16 sums = to_f32(products[r][v].end(Format::correction(*x_rows[r])));
      totals[r][v] = Format::add(totals[r][v], sums, *w, first_vector + v, *x_rows[r]);
    }
  }
  if (part.scales) {
    HS_EACH_VECTOR {
      const f32x16 scales = load(part.scales + column + v * kLanes);
      HS_EACH_ROW totals[r][v] = totals[r][v] * scales;
    }
  }
  write_outputs(part, row, column, totals, y);
}

// The tile of num_rows rows, 1 to kTileRows.
template <typename Format, int Rows = kTileRows>
HS_INLINE void tile_of(int64_t num_rows, const Product<Format>& product, int64_t row, int64_t panel, int first_vector, Ahead ahead) {
  if constexpr (Rows > 1) {
    if (num_rows < Rows) return tile_of<Format, Rows - 1>(num_rows, product, row, panel, first_vector, ahead);
  }
  tile<Format, Rows>(product, row, panel, first_vector, ahead);
}

constexpr int64_t kAheadBytes = 4096;

// A lone tile waits for memory, and fetches what it needs soon. Of several the first one would, while the others find the panel in the
// cache: so together they fetch the next panel, each of them a part.
template <typename Group>
Ahead ahead_of(const Group* w, int64_t num_tiles, const void* next) {
  constexpr int64_t kGroupLines = sizeof(Group) / 64;
  const char* here = reinterpret_cast<const char*>(w);
  if (num_tiles == 1) return {here + kAheadBytes, kGroupLines};
  return {static_cast<const char*>(next), next ? (kGroupLines + num_tiles - 1) / num_tiles : 0};
}

// Input rows that stay in a second-level cache while panels pass by.
constexpr int64_t kBlockBytes = 256 * 1024;

template <typename Format>
void panels(const HsWeight& part, const Panels& panels, const QuantizedRows& x, const Output& y) {
  const Product<Format> product{part, x, y};
  const int64_t num_groups = product.num_groups(), block_rows = quantized_block_rows(part);
  for (int64_t block = 0; block < y.num_rows; block += block_rows) {
    const int64_t end = block + block_rows < y.num_rows ? block + block_rows : y.num_rows;
    const int64_t num_tiles = (end - block + kTileRows - 1) / kTileRows;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      Ahead ahead = ahead_of(product.panel(panel), num_tiles, panel + 1 < panels.end ? product.panel(panel + 1) : panels.then);
      for (int64_t i = 0; i < num_tiles; ++i) {
        const int64_t row = block + (end - block) * i / num_tiles, num_rows = block + (end - block) * (i + 1) / num_tiles - row;
        for (int v = 0; v < kPanelVectors; v += kTileVectors) tile_of<Format>(num_rows, product, row, panel, v, ahead);
        if (num_tiles > 1) ahead.from += num_groups * ahead.num_lines * 64;
      }
    }
  }
}

}  // namespace

void panels_int8(const HsWeight& part, const Panels& range, const QuantizedRows& x, const Output& y) { panels<Int8>(part, range, x, y); }
void panels_q8_0(const HsWeight& part, const Panels& range, const QuantizedRows& x, const Output& y) { panels<Q8_0>(part, range, x, y); }
void panels_q4_0(const HsWeight& part, const Panels& range, const QuantizedRows& x, const Output& y) { panels<Q4_0>(part, range, x, y); }
void panels_q4_1(const HsWeight& part, const Panels& range, const QuantizedRows& x, const Output& y) { panels<Q4_1>(part, range, x, y); }

int64_t quantized_block_rows(const HsWeight& part) {
  const int64_t num_rows = kBlockBytes / QuantizedRows::stride(part.k);
  return num_rows > kTileRows ? num_rows / kTileRows * kTileRows : kTileRows;
}

}  // namespace hs
