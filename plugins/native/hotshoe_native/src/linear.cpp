// What weights are for: linear layers and embeddings, over parts of any format.
#include <algorithm>
#include <cstring>

#include "dense.h"
#include "quantized.h"
#include "simd.h"

namespace hs {
namespace {

struct LinearArgs {
  const void* x;  // rows of weight->k values
  int64_t x_stride;
  void* y;  // rows of all parts' columns; linear_silu_and_mul: of one part's
  int64_t y_stride;
  int64_t m;      // number of rows
  int64_t dtype;    // of x
  int64_t y_dtype;  // that of x, or float32; linear_silu_and_mul: that of x
  const HsWeight* weight;
  void* scratch;  // m * QuantizedRows::stride(k) bytes if a part is quantized
};

bool is_dense(const HsWeight& part) { return part.format == kDenseF32 || part.format == kDenseBF16; }

// Time that a panel takes, in quarters of a byte per weight.
int64_t cost(const HsWeight& part) {
  switch (part.format) {
    case kDenseF32: return 8;
    case kDenseBF16: return 4;
    case kInt8: case kQ8_0: return 2;
    default: return 1;
  }
}

void panels(const HsWeight& part, const Panels& range, const void* x, int64_t x_stride, const QuantizedRows& rows, const Output& y) {
  switch (part.format) {
    case kDenseF32: return panels_dense_f32(part, range, x, x_stride, y);
    case kDenseBF16: return panels_dense_bf16(part, range, x, x_stride, y);
    case kInt8: return panels_int8(part, range, rows, y);
    case kQ8_0: return panels_q8_0(part, range, rows, y);
    case kQ4_0: return panels_q4_0(part, range, rows, y);
    case kQ4_1: return panels_q4_1(part, range, rows, y);
  }
}

int64_t block_rows(const HsWeight& part) { return is_dense(part) ? dense_block_rows(part) : quantized_block_rows(part); }

// From so many rows for each thread on, threads share rows and not panels: fewer would not make up for every thread reading all weights.
constexpr int64_t kRowsOfOneThread = 96, kDenseRowsOfOneThread = 256;

// How often the rows are cut so that layers of few columns occupy every thread too.
int64_t num_row_chunks(const LinearArgs& args, int64_t num_panels, int64_t num_threads) {
  constexpr int64_t kPanelsPerThread = 4, kMinRows = 32;
  const int64_t wanted = (kPanelsPerThread * num_threads + num_panels - 1) / num_panels;
  return std::max<int64_t>(1, std::min(wanted, args.m / kMinRows));
}

// Of `num` things that lie side by side from `start` on, `each` long, those that begin in `stretch`.
Range begun_in(Range stretch, int64_t start, int64_t each, int64_t num) {
  const auto first_from = [&](int64_t position) { return std::clamp<int64_t>((position - start + each - 1) / each, 0, num); };
  return {first_from(stretch.begin), first_from(stretch.end)};
}

// The part of a layer's product that a thread computes, for some rows.
struct Rows {
  const LinearArgs& args;
  const QuantizedRows& quantized;  // its data is null if no part is quantized
  int64_t begin, count;

  // Panels of all parts lie side by side on an axis of cost; those that begin in `stretch`, which counts from `start`.
  void multiply(Range stretch, int64_t start) const {
    const int64_t x_bytes = args.dtype == kF32 ? 4 : 2, y_bytes = args.y_dtype == kF32 ? 4 : 2;
    const char* x = static_cast<const char*>(args.x) + begin * args.x_stride * x_bytes;
    char* y = static_cast<char*>(args.y) + begin * args.y_stride * y_bytes;
    const QuantizedRows rows{quantized.data ? quantized.row(begin) : nullptr, quantized.k};
    for (const HsWeight* part = args.weight; part; part = part->next) {
      const int64_t each = cost(*part), num = num_panels(part->n);
      const Range mine = begun_in(stretch, start, each, num);
      if (mine.begin < mine.end) panels(*part, {mine.begin, mine.end}, x, args.x_stride, rows, {y, args.y_stride, args.y_dtype, count});
      start += num * each;
      y += part->n * y_bytes;
    }
  }
};

// The same of a layer of two parts with as many columns each, gates and factors: y is the silu of gates times factors. Gates of some rows
// and panels wait in a near cache for their factors; bits are those of the products in y_dtype and the op silu_and_mul.
struct GatedRows : Rows {
  static constexpr int64_t kMaxBytes = 32 << 10;  // of gates that wait

  // Pairs of panels lie side by side on the axis of cost.
  void multiply(Range stretch, int64_t start) const {
    const HsWeight &gate = *args.weight, &up = *gate.next;
    const Range pairs = begun_in(stretch, start, cost(gate) + cost(up), num_panels(gate.n));
    if (pairs.begin == pairs.end) return;
    const int64_t most = kMaxBytes / (kPanelColumns * (args.dtype == kF32 ? 4 : 2));  // rows times panels
    const int64_t most_rows = std::min({block_rows(gate), block_rows(up), most}), num_blocks = (count + most_rows - 1) / most_rows;
    for (int64_t i = 0; i < num_blocks; ++i) {
      const int64_t first = begin + count * i / num_blocks, num_rows = begin + count * (i + 1) / num_blocks - first;
      const int64_t num_pairs = std::clamp<int64_t>(most / num_rows, 1, pairs.end - pairs.begin);
      for (int64_t pair = pairs.begin; pair < pairs.end; pair += num_pairs) {
        const Range some{pair, std::min(pair + num_pairs, pairs.end)};
        GatedRows{{args, quantized, first, num_rows}}.multiply_pairs(some, some.end < pairs.end);
      }
    }
  }

  // Some pairs of panels, few enough that the gates find room, and whether the next one follows.
  void multiply_pairs(Range pairs, bool has_next) const {
    const HsWeight &gate = *args.weight, &up = *gate.next;
    const int64_t value_bytes = args.dtype == kF32 ? 4 : 2, stride = (pairs.end - pairs.begin) * kPanelColumns;
    const char* x = static_cast<const char*>(args.x) + begin * args.x_stride * value_bytes;
    char* y = static_cast<char*>(args.y) + begin * args.y_stride * value_bytes;
    const QuantizedRows rows{quantized.data ? quantized.row(begin) : nullptr, quantized.k};
    alignas(64) char waiting[kMaxBytes];
    char* gates = waiting - pairs.begin * kPanelColumns * value_bytes;  // of the part's first column
    const bool are_alike = gate.format == up.format;
    const void* then = are_alike ? panel(up, pairs.begin) : nullptr;
    panels(gate, {pairs.begin, pairs.end, then}, x, args.x_stride, rows, {gates, stride, args.dtype, count});
    then = are_alike && has_next ? panel(gate, pairs.end) : nullptr;
    panels(up, {pairs.begin, pairs.end, then}, x, args.x_stride, rows, {y, args.y_stride, args.dtype, count, gates, stride});
  }
};

template <typename Product>
void linear(const LinearArgs& args, const Team& team) {
  int64_t all_panels = 0, all_costs = 0;
  bool is_quantized = false;
  for (const HsWeight* part = args.weight; part; part = part->next) {
    all_panels += num_panels(part->n);
    all_costs += num_panels(part->n) * cost(*part);
    is_quantized |= !is_dense(*part);
  }
  const QuantizedRows quantized{is_quantized ? args.scratch : nullptr, args.weight->k};
  const int64_t groups = quantized.k / kGroup;  // of a row

  // Many rows: each thread has some for itself, and what it reads and writes stays in its cache.
  if (args.m >= (is_quantized ? kRowsOfOneThread : kDenseRowsOfOneThread) * team.num_threads) {
    const Range mine = share(args.m, team);
    if (is_quantized) quantize_rows(args.x, args.x_stride, args.dtype, {mine.begin * groups, mine.end * groups}, quantized);
    Product{Rows{args, quantized, mine.begin, mine.end - mine.begin}}.multiply({0, all_costs}, 0);
    return;
  }

  // Few rows: each thread has some of the weights for itself, a stretch of the axis of cost, which the chunks of rows repeat.
  if (is_quantized) {
    quantize_rows(args.x, args.x_stride, args.dtype, share(args.m * groups, team), quantized);
    team.barrier();
  }
  const int64_t num_chunks = num_row_chunks(args, all_panels, team.num_threads);
  const Range mine = share(all_costs * num_chunks, team);
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t begin = args.m * chunk / num_chunks, end = args.m * (chunk + 1) / num_chunks;
    Product{Rows{args, quantized, begin, end - begin}}.multiply(mine, chunk * all_costs);
  }
}

struct EmbeddingArgs {
  const int64_t* token_ids;
  void* out;  // [num_tokens, weight->k]
  int64_t num_tokens;
  int64_t dtype;  // of out; that of a dense weight
  const HsWeight* weight;
};

void embedding(const EmbeddingArgs& args, const Team& team) {
  const int64_t row_bytes = args.weight->k * (args.dtype == kF32 ? 4 : 2);
  const Range tokens = share(args.num_tokens, team);
  for (int64_t i = tokens.begin; i < tokens.end; ++i) {
    void* out = static_cast<char*>(args.out) + i * row_bytes;
    int64_t row = args.token_ids[i];
    const HsWeight* part = args.weight;
    for (; part && row >= part->n; part = part->next) row -= part->n;
    if (!part || row < 0) {
      std::memset(out, 0xff, row_bytes);  // an id that there is no row for: not a number, which nobody can mistake for a result
    } else if (is_dense(*part)) {
      dense_row(*part, row, out);
    } else if (args.dtype == kF32) {
      dequantize_row(*part, row, static_cast<float*>(out));
    } else {
      dequantize_row(*part, row, static_cast<bf16*>(out));
    }
  }
}

}  // namespace

HS_DEFINE_OP(linear, LinearArgs, linear<Rows>)
HS_DEFINE_OP(linear_silu_and_mul, LinearArgs, linear<GatedRows>)
HS_DEFINE_OP(embedding, EmbeddingArgs, embedding)

}  // namespace hs
