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
  void* y;  // rows of all parts' columns
  int64_t y_stride;
  int64_t m;      // number of rows
  int64_t dtype;    // of x
  int64_t y_dtype;  // that of x, or float32
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

void panels(const HsWeight& part, Range range, const void* x, int64_t x_stride, const QuantizedRows& rows, const Output& y) {
  switch (part.format) {
    case kDenseF32: return panels_dense_f32(part, range, x, x_stride, y);
    case kDenseBF16: return panels_dense_bf16(part, range, x, x_stride, y);
    case kInt8: return panels_int8(part, range, rows, y);
    case kQ8_0: return panels_q8_0(part, range, rows, y);
    case kQ4_0: return panels_q4_0(part, range, rows, y);
    case kQ4_1: return panels_q4_1(part, range, rows, y);
  }
}

// From so many rows for each thread on, threads share rows and not panels: fewer would not make up for every thread reading all weights.
constexpr int64_t kRowsOfOneThread = 96, kDenseRowsOfOneThread = 256;

// How often the rows are cut so that layers of few columns occupy every thread too.
int64_t num_row_chunks(const LinearArgs& args, int64_t num_panels, int64_t num_threads) {
  constexpr int64_t kPanelsPerThread = 4, kMinRows = 32;
  const int64_t wanted = (kPanelsPerThread * num_threads + num_panels - 1) / num_panels;
  return std::max<int64_t>(1, std::min(wanted, args.m / kMinRows));
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
      const auto first_from = [&](int64_t position) { return std::clamp<int64_t>((position - start + each - 1) / each, 0, num); };
      const Range range{first_from(stretch.begin), first_from(stretch.end)};
      if (range.begin < range.end) panels(*part, range, x, args.x_stride, rows, {y, args.y_stride, args.y_dtype, count});
      start += num * each;
      y += part->n * y_bytes;
    }
  }
};

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
    Rows{args, quantized, mine.begin, mine.end - mine.begin}.multiply({0, all_costs}, 0);
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
    Rows{args, quantized, begin, end - begin}.multiply(mine, chunk * all_costs);
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

HS_DEFINE_OP(linear, LinearArgs, linear)
HS_DEFINE_OP(embedding, EmbeddingArgs, embedding)

}  // namespace hs
