// Attention of a tile of rows over one segment of keys. A row is a query head of a token; the rows of a tile share a KV head.
//
// What happens to a row doesn't depend on the rows beside it: how many share a loop, how many keys of a run are computed although it
// may not see them, and where a tile begins, changes no bit of its result. Weights of hidden keys are exactly 0.
#pragma once

#include "attention.h"
#include "simd.h"

#include <algorithm>

namespace hs {

// Pages of float32.
struct PagesF32 {
  using Element = float;
  static constexpr int kPerWord = 1;
  static HS_INLINE f32x16 accumulate(f32x16 acc, i32x16 page, i32x16 x) { return fma(as_f32(page), as_f32(x), acc); }
};

// Pages of bf16, in pairs.
struct PagesBF16 {
  using Element = bf16;
  static constexpr int kPerWord = 2;
  static HS_INLINE f32x16 accumulate(f32x16 acc, i32x16 page, i32x16 x) { return dot_bf16(acc, page, x); }
};

inline int64_t words(int64_t count, int per_word) { return (count + per_word - 1) / per_word; }
inline int64_t padded(int64_t head_dim_v) { return words(head_dim_v, kLanes) * kLanes; }

// 2 ^ x for x that aren't far above 0, relative error about 1e-7; exactly 1 at 0.
HS_INLINE f32x16 exp2(f32x16 x) {
#if defined(HS_ISA_AVX512)
  const f32x16 whole = {{(native_f32)_mm512_roundscale_ps((__m512)x.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}};
  const f32x16 r = x - whole;
#else
  x = max(x, set1(-126.0f));
  const f32x16 magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
  const f32x16 shifted = x + magic;
  const f32x16 r = x - (shifted - magic);
#endif
  f32x16 p = set1(0.00132647273f);
  p = fma(p, r, set1(0.00967151279f));
  p = fma(p, r, set1(0.0555073374f));
  p = fma(p, r, set1(0.240222421f));
  p = fma(p, r, set1(0.693146978f));
  p = fma(p, r, set1(1.0f));
#if defined(HS_ISA_AVX512)
  return {{(native_f32)_mm512_scalef_ps((__m512)p.part[0], (__m512)whole.part[0])}};
#else
  return as_f32(as_i32(p) + shift_left(as_i32(shifted), 23));
#endif
}
HS_INLINE float exp2_of(float x) {
  alignas(64) float lanes[16];
  store(lanes, exp2(set1(x)));
  return lanes[0];
}

// Softmax in progress: values weighted by 2 ^ (logit - maximum), the sum of these weights, and the maximum. Logits are in units of
// the raw product of q and k (or of the capped logit) until they meet the factor that makes them powers of two.
struct RowStates {
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* values;   // [rows][padded head_dim_v]

  static int64_t floats(int64_t rows, int64_t head_dim_v) { return rows * (2 + padded(head_dim_v)); }
  static RowStates at(float* memory, int64_t rows, int64_t head_dim_v) {
    return {memory + rows * padded(head_dim_v), memory + rows * (padded(head_dim_v) + 1), memory};
  }
};

constexpr float kNoLogit = -1e30f;  // of hidden keys; the maximum of a row that has seen none

// The rows that are computed together, and all they have in common.
struct Tile {
  const uint32_t* q;       // [rows][q_words]: words of head_dim
  int64_t q_words;
  int64_t rows;            // head by head of each token
  int64_t group_size;      // heads of a token
  int64_t first_position;  // of the first token
  int64_t window;
  int64_t head_dim_v;
  float factor;         // of logits, to powers of two
  float softcap_scale;  // capped logit = softcap * tanh(softcap_scale * product)
  float softcap;        // 0: none

  int64_t position(int64_t row) const { return first_position + row / group_size; }
  // The keys that a row sees of a run starting at `start`: [first, end), as lanes of the run.
  int first(int64_t row, int64_t start) const {
    return window ? int(std::clamp<int64_t>(position(row) - window + 1 - start, 0, kRunKeys)) : 0;
  }
  int end(int64_t row, int64_t start) const { return int(std::clamp<int64_t>(position(row) + 1 - start, 0, kRunKeys)); }
};

// Where a run of keys lies: 16 tokens at a time.
struct Run {
  static constexpr int kGroups = kRunKeys / kLanes;
  const uint32_t* k[kGroups];  // [q_words][k_stride], the first 16 of each
  const uint32_t* v[kGroups];  // [words of 16][padded head_dim_v]
  int64_t k_stride;
  int64_t start;  // position of the first key
};

// How many rows and vectors fit the registers.
#if defined(HS_ISA_AVX512)
constexpr int kMaxRows = 6, kMaxVectors = 4;
#elif defined(HS_ISA_AVX2)
constexpr int kMaxRows = 4, kMaxVectors = 1;
#else
constexpr int kMaxRows = 2, kMaxVectors = 1;
#endif

// Calls body(std::integral_constant<int, N>) for N = count, 1 <= count <= Max.
template <int Max, typename Body>
HS_INLINE void with_constant(int count, Body&& body) {
  if constexpr (Max > 1) {
    if (count < Max) return with_constant<Max - 1>(count, body);
  }
  body(std::integral_constant<int, Max>{});
}

// Splits `count` into nearly equal pieces of at most Max: calls body(begin, std::integral_constant<int, size>).
template <int Max, typename Body>
HS_INLINE void in_pieces(int64_t count, Body&& body) {
  const int64_t pieces = words(count, Max);
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t begin = count * i / pieces, end = count * (i + 1) / pieces;
    with_constant<Max>(int(end - begin), [&](auto size) { body(begin, size); });
  }
}

// logits[row][16 * group...] = q k^T of some rows and groups of keys.
template <class Pages, int Rows, int Groups>
HS_INLINE void multiply_keys(const Tile& tile, const Run& run, int64_t row, int group, float (*logits)[kRunKeys]) {
  f32x16 acc[Rows][Groups];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < Groups; ++g) acc[r][g] = zero();
  const uint32_t* q = tile.q + row * tile.q_words;
  const int64_t num_words = tile.q_words, stride = run.k_stride;
  for (int64_t word = 0; word < num_words; ++word) {
    i32x16 keys[Groups];
#pragma GCC unroll 4
    for (int g = 0; g < Groups; ++g) keys[g] = load_i32(run.k[group + g] + word * stride);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const i32x16 x = set1(int32_t(q[r * num_words + word]));
#pragma GCC unroll 4
      for (int g = 0; g < Groups; ++g) acc[r][g] = Pages::accumulate(acc[r][g], keys[g], x);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < Groups; ++g) store(logits[r] + (group + g) * kLanes, acc[r][g]);
}

// values[row] = values[row] * correction[row] + weights v, over words [first, end) of the run; the last key may be alone in its word.
template <class Pages, int Rows, int Vectors>
HS_INLINE void multiply_values(const Run& run, int64_t columns, int64_t column, int first, int end, bool is_last_alone,
                               const uint32_t (*weights)[kRunKeys], const float* corrections, float* values) {
  constexpr int kWordsPerGroup = kLanes / Pages::kPerWord;
  f32x16 acc[Rows][Vectors];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) acc[r][c] = load(values + r * columns + column + c * kLanes) * set1(corrections[r]);
  const auto add_word = [&](const uint32_t* from, int word, auto is_alone) __attribute__((always_inline)) {
    i32x16 v[Vectors];
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) {
      v[c] = load_i32(from + c * kLanes);
      if (is_alone) v[c] = v[c] & set1(int32_t(0x0000ffff));  // whatever lies beside it: 0 times NaN is NaN
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const i32x16 x = set1(int32_t(weights[r][word]));
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) acc[r][c] = Pages::accumulate(acc[r][c], v[c], x);
    }
  };
  const int whole = is_last_alone ? end - 1 : end;
  for (int word = first; word < whole;) {
    const int group = word / kWordsPerGroup, group_end = std::min((group + 1) * kWordsPerGroup, whole);
    const uint32_t* from = run.v[group] + column + (word % kWordsPerGroup) * columns;
    for (; word < group_end; ++word, from += columns) add_word(from, word, std::false_type{});
  }
  if (is_last_alone) {
    const int word = end - 1;
    add_word(run.v[word / kWordsPerGroup] + column + (word % kWordsPerGroup) * columns, word, std::true_type{});
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) store(values + r * columns + column + c * kLanes, acc[r][c]);
}

HS_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 power = exp2(min(abs(x), set1(20.0f)) * set1(2.885390082f));  // e ^ 2|x|
  const f32x16 magnitude = set1(1.0f) - set1(2.0f) / (power + set1(1.0f));
  return as_f32(as_i32(magnitude) | (as_i32(x) & set1(int32_t(0x80000000))));
}

// Lanes [first, end) of `value`, the others of `other`.
HS_INLINE f32x16 middle_lanes(int first, int end, f32x16 value, f32x16 other) {
  return first_lanes(first, other, first_lanes(end, value, other));
}

// Some rows of a tile over one run of keys.
template <class Pages, int Rows>
void attend_run(const Tile& tile, const Run& run, int64_t row, const RowStates& states, float* lane_sums) {
  const int first = tile.first(row, run.start), end = tile.end(row + Rows - 1, run.start);  // of any row
  if (first >= end) return;
  const bool is_partly_hidden = tile.end(row, run.start) < kRunKeys || tile.first(row + Rows - 1, run.start) > 0;
  const int groups = (end + kLanes - 1) / kLanes;
  alignas(64) float logits[Rows][kRunKeys];
  alignas(64) uint32_t weights[Rows][kRunKeys];
  for (int group = 0; group < groups; group += kMaxVectors)
    with_constant<kMaxVectors>(std::min(groups - group, kMaxVectors), [&](auto count) __attribute__((always_inline)) {
      multiply_keys<Pages, Rows, count>(tile, run, row, group, logits);
    });

  if (tile.softcap != 0)
    for (int r = 0; r < Rows; ++r)
      for (int g = 0; g < groups; ++g) {
        float* at = logits[r] + g * kLanes;
        store(at, tanh(load(at) * set1(tile.softcap_scale)) * set1(tile.softcap));
      }
  if (is_partly_hidden)
    for (int r = 0; r < Rows; ++r) {
      const int row_first = tile.first(row + r, run.start), row_end = tile.end(row + r, run.start);
      for (int g = 0; g < groups; ++g) {
        float* at = logits[r] + g * kLanes;
        store(at, middle_lanes(row_first - g * kLanes, row_end - g * kLanes, load(at), set1(kNoLogit)));
      }
    }

  alignas(64) float old_maxima[kLanes] = {}, maxima[kLanes] = {}, corrections[kLanes];
  for (int r = 0; r < Rows; ++r) {
    f32x16 most = load(logits[r]);
    for (int g = 1; g < groups; ++g) most = max(most, load(logits[r] + g * kLanes));
    old_maxima[r] = states.maximum[row + r];
    states.maximum[row + r] = maxima[r] = std::max(old_maxima[r], largest(most));
  }
  const f32x16 factor = set1(tile.factor);
  store(corrections, exp2((load(old_maxima) - load(maxima)) * factor));

  for (int r = 0; r < Rows; ++r) {
    const f32x16 shift = set1(maxima[r]);
    float* sums = lane_sums + (row + r) * kLanes;
    f32x16 sum = load(sums) * set1(corrections[r]);
    auto* row_weights = reinterpret_cast<typename Pages::Element*>(weights[r]);
    for (int g = 0; g < groups; ++g) {
      const f32x16 logit = load(logits[r] + g * kLanes);
      f32x16 weight = exp2((logit - shift) * factor);
      if (is_partly_hidden)
        weight = middle_lanes(tile.first(row + r, run.start) - g * kLanes, tile.end(row + r, run.start) - g * kLanes, weight, zero());
      sum = sum + weight;
      store(row_weights + g * kLanes, weight);
    }
    store(sums, sum);
  }

  const int64_t columns = padded(tile.head_dim_v);
  in_pieces<kMaxVectors>(columns / kLanes, [&](int64_t vector, auto count) __attribute__((always_inline)) {
    multiply_values<Pages, Rows, count>(run, columns, vector * kLanes, first / Pages::kPerWord, int(words(end, Pages::kPerWord)),
                                        Pages::kPerWord == 2 && end % 2, weights, corrections, states.values + row * columns);
  });
}

// All rows of a tile over the runs of one segment; find_run(start) says where a run lies. `lane_sums` is scratch, [rows][16].
template <class Pages, typename FindRun>
void attend_segment(const Tile& tile, int64_t segment, const RowStates& states, float* lane_sums, FindRun&& find_run) {
  const int64_t columns = padded(tile.head_dim_v);
  std::fill_n(states.maximum, tile.rows, kNoLogit);
  std::fill_n(lane_sums, tile.rows * kLanes, 0.0f);
  std::fill_n(states.values, tile.rows * columns, 0.0f);
  const int64_t first_visible = tile.window ? std::max<int64_t>(tile.first_position - tile.window + 1, 0) : 0;
  const int64_t begin = std::max(segment * kSegmentKeys, first_visible / kRunKeys * kRunKeys);
  const int64_t end = std::min((segment + 1) * kSegmentKeys, tile.position(tile.rows - 1) + 1);
  for (int64_t start = begin; start < end; start += kRunKeys) {
    const Run run = find_run(start);
    in_pieces<kMaxRows>(tile.rows, [&](int64_t row, auto count) {
      attend_run<Pages, count>(tile, run, row, states, lane_sums);
    });
  }
  for (int64_t r = 0; r < tile.rows; ++r) states.sum[r] = sum(load(lane_sums + r * kLanes));
}

// Adds the result of the next segment to that of those before it.
HS_INLINE void merge_segment(const Tile& tile, const RowStates& total, const RowStates& next) {
  const int64_t columns = padded(tile.head_dim_v);
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (next.maximum[r] == kNoLogit) continue;
    float* values = total.values + r * columns;
    const float* others = next.values + r * columns;
    if (total.maximum[r] == kNoLogit) {
      total.maximum[r] = next.maximum[r];
      total.sum[r] = next.sum[r];
      std::copy_n(others, columns, values);
      continue;
    }
    const float maximum = std::max(total.maximum[r], next.maximum[r]);
    const float a = exp2_of((total.maximum[r] - maximum) * tile.factor), b = exp2_of((next.maximum[r] - maximum) * tile.factor);
    total.maximum[r] = maximum;
    alignas(64) float sums[kLanes];
    store(sums, fma(set1(next.sum[r]), set1(b), set1(total.sum[r]) * set1(a)));
    total.sum[r] = sums[0];
    for (int64_t c = 0; c < columns; c += kLanes) store(values + c, fma(load(others + c), set1(b), load(values + c) * set1(a)));
  }
}

}  // namespace hs
