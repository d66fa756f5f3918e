// Attention of a tile of rows over one segment of keys. A row is a query head of a token; the rows of a tile share a KV head.
//
// What happens to a row doesn't depend on the rows beside it: how many share a loop, how many keys of a run are computed although it
// may not see them, and where a tile begins, changes no bit of its result. Weights of hidden keys are exactly 0.
#pragma once

#include "attention_run.h"

#include <algorithm>
#include <type_traits>

namespace hs {

// Softmax in progress: values weighted by 2 ^ (logit - reference), the sum of these weights, and the reference, of logits to base 2. The
// sum is 0 as long as no key was seen.
struct RowStates {
  float* reference;  // [rows], and a vector more can be read
  float* sum;        // [rows]
  float* values;     // [rows][padded head_dim_v]

  static int64_t floats(int64_t rows, int64_t head_dim_v) { return 2 * padded(rows) + rows * padded(head_dim_v); }
  static RowStates at(float* memory, int64_t rows) { return {memory, memory + padded(rows), memory + 2 * padded(rows)}; }
};

constexpr float kNoLogit = -1e30f;  // of a hidden key

// Where the first run of a segment begins that is seen from some position or from later ones.
inline int64_t first_run(int64_t segment, int64_t first_position, int64_t window) {
  const int64_t first_visible = window ? std::max<int64_t>(first_position - window + 1, 0) : 0;
  return std::max(segment * kSegmentKeys, first_visible / kRunKeys * kRunKeys);
}

// The rows that are computed together, and all they have in common.
struct Tile {
  const uint32_t* q;         // [rows][q_words]
  int64_t q_words;           // a header, then head_words for each digit
  int64_t head_words;        // of head_dim
  int64_t rows;              // head by head of each token
  const int64_t* positions;  // [rows]
  int64_t window;
  int64_t head_dim_v;
  float factor;         // makes logits those to base 2
  float softcap_scale;  // capped logit = softcap * tanh(softcap_scale * product)
  float softcap;        // 0: none

  int64_t end() const { return positions[rows - 1] + 1; }
  // The keys that a row sees of a run starting at `start`: [first, end), as lanes of the run.
  int first_lane(int64_t row, int64_t start) const {
    return window ? int(std::clamp<int64_t>(positions[row] - window + 1 - start, 0, kRunKeys)) : 0;
  }
  int end_lane(int64_t row, int64_t start) const { return int(std::clamp<int64_t>(positions[row] + 1 - start, 0, kRunKeys)); }
  // A bit for each of them.
  uint64_t seen(int64_t row, int64_t start) const {
    static_assert(kRunKeys == 64);
    const auto below = [](int lane) { return lane == kRunKeys ? ~uint64_t(0) : (uint64_t(1) << lane) - 1; };
    return below(end_lane(row, start)) & ~below(first_lane(row, start));
  }
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

// A value that stays in a register: compilers would rather load it again for each row.
HS_INLINE i32x16 kept(i32x16 value) {
#if defined(HS_ISA_AVX512)
  native_i32 part = value.part[0];
  asm("" : "+v"(part));
  return {{part}};
#else
  return value;
#endif
}

// How sums of digits come about: side by side where registers are enough, else the lower ones are added to 128 times the upper ones.
template <class Pages, int Rows, int Columns>
struct Sums {
  static constexpr int kTogether = Rows * Pages::kDigits <= kMaxRows ? Pages::kDigits : 1;

  typename Pages::Sum of[kTogether][Rows][Columns];

  // Calls add(first_digit, sums) once or for each digit.
  template <typename Add>
  HS_INLINE void add(Add&& add) {
    add(std::integral_constant<int, 0>{});
    if constexpr (Pages::kDigits > 1) {
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < Columns; ++c) {
          of[0][r][c] = shift_left(of[0][r][c], 7);
          if constexpr (kTogether > 1) of[0][r][c] = of[0][r][c] + of[1][r][c];
        }
      if constexpr (kTogether == 1) add(std::integral_constant<int, 1>{});
    }
  }
};

// logits[row][16 * group...] = q k^T of some rows and groups of keys. Fetches memory meanwhile: what is `ahead`, or of the next run.
template <class Pages, int Rows, int Groups, bool IsAhead>
HS_INLINE void multiply_keys(const Tile& tile, const Run& run, const Run& next, Ahead<Pages>& ahead, int64_t row, int group,
                             float (*logits)[kRunKeys]) {
  Sums<Pages, Rows, Groups> acc;
  // two pointers and a distance reach six rows, so registers are left for the keys
  const int64_t distance = tile.q_words;
  const uint32_t *q = tile.q + row * distance, *fourth = q + 3 * distance;
  const auto word_of = [&](int r, int64_t word) __attribute__((always_inline)) {
    return r < 3 ? q[r * distance + word] : fourth[(r - 3) * distance + word];
  };
  uint32_t scales[Rows] = {};
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < Groups; ++g) {
      acc.of[0][r][g] = Pages::start(word_of(r, 0));
      if constexpr (acc.kTogether > 1) acc.of[1][r][g] = set1(0);
    }
  const uint32_t *from[Groups], *next_from[Groups];
#pragma GCC unroll 4
  for (int g = 0; g < Groups; ++g) from[g] = run.k[group + g], next_from[g] = next.k[group + g];
  int64_t offset = 0;
  const auto fetch = [&](int64_t at) __attribute__((always_inline)) {
    if constexpr (IsAhead) return ahead.step();
#pragma GCC unroll 4
    for (int g = 0; g < Groups; ++g) prefetch_once(next_from[g] + at);
  };
  if constexpr (Pages::kHeaderWords > 1)
    for (int r = 0; r < Rows; ++r) scales[r] = word_of(r, 1);
  for (int word = 0; word < Pages::kHeaderWords; ++word, ++q, ++fourth, offset += run.k_stride) fetch(offset);
  acc.add([&](auto digit) __attribute__((always_inline)) {
    int64_t at = offset;
    for (const uint32_t* const q_end = q + tile.head_words; q < q_end; ++q, ++fourth, at += run.k_stride) {
      i32x16 keys[Groups];
#pragma GCC unroll 4
      for (int g = 0; g < Groups; ++g) keys[g] = kept(load_i32(from[g] + at));
      if (digit == 0) fetch(at);
#pragma GCC unroll 2
      for (int d = 0; d < acc.kTogether; ++d)
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
          const i32x16 x = set1(int32_t(word_of(r, d * tile.head_words)));
#pragma GCC unroll 4
          for (int g = 0; g < Groups; ++g) acc.of[d][r][g] = Pages::add_key(acc.of[d][r][g], keys[g], x);
        }
    }
  });
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < Groups; ++g)
      store(logits[r] + (group + g) * kLanes, Pages::logits(acc.of[0][r][g], from[g], run.k_stride, scales[r]));
}

// What a run's weights are to the values: words of each digit, and what earlier sums and those of this run have to be multiplied with.
template <class Pages, int Rows>
struct Weights {
  alignas(64) uint32_t words[Pages::kDigits][Rows][kRunKeys / Pages::kPerWord];
  alignas(64) float corrections[kLanes];
  alignas(64) float scales[kLanes];  // of bytes
};

// values[row] = values[row] * correction[row] + weights v, over words [first, end) of the run; the last key may be alone in its word.
template <class Pages, int Rows, int Vectors, bool IsAhead>
HS_INLINE void multiply_values(const Run& run, const Run& next, Ahead<Pages>& ahead, int64_t columns, int64_t column, int first,
                               int end, bool is_last_alone, const Weights<Pages, Rows>& weights, float* values) {
  constexpr int kWordsPerGroup = kLanes / Pages::kPerWord;
  Sums<Pages, Rows, Vectors> acc;
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c)
      for (int d = 0; d < acc.kTogether; ++d) acc.of[d][r][c] = {};
  const auto fetch = [&](const uint32_t* next_from) __attribute__((always_inline)) {
    if constexpr (IsAhead) return ahead.step();
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) prefetch_once(next_from + c * kLanes);
  };
  acc.add([&](auto digit) __attribute__((always_inline)) {
    const auto add_word = [&](const uint32_t* from, const uint32_t* next_from, int word, auto is_alone) __attribute__((always_inline)) {
      i32x16 v[Vectors];
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) {
        v[c] = kept(load_i32(from + c * kLanes));
        if (is_alone) v[c] = v[c] & set1(int32_t(0x0000ffff));  // whatever lies beside it: 0 times NaN is NaN
      }
      if (digit == 0) fetch(next_from);
#pragma GCC unroll 2
      for (int d = 0; d < acc.kTogether; ++d)
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
          const i32x16 x = set1(int32_t(weights.words[digit + d][r][word]));
#pragma GCC unroll 4
          for (int c = 0; c < Vectors; ++c) acc.of[d][r][c] = Pages::add_value(acc.of[d][r][c], v[c], x);
        }
    };
    const int whole = is_last_alone ? end - 1 : end;
    for (int word = first; word < whole;) {
      const int group = word / kWordsPerGroup, group_end = std::min((group + 1) * kWordsPerGroup, whole);
      const int64_t offset = column + (word % kWordsPerGroup) * columns;
      const uint32_t *from = run.v[group] + offset, *next_from = next.v[group] + offset;
      for (; word < group_end; ++word, from += columns, next_from += columns) add_word(from, next_from, word, std::false_type{});
    }
    if (is_last_alone) {
      const int word = end - 1, group = word / kWordsPerGroup;
      const int64_t offset = column + (word % kWordsPerGroup) * columns;
      add_word(run.v[group] + offset, next.v[group] + offset, word, std::true_type{});
    }
  });
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) {
      float* to = values + r * columns + column + c * kLanes;
      // only now, as products would have to wait for what earlier runs left
      const f32x16 earlier = load(to), correction = set1(weights.corrections[r]);
      if constexpr (Pages::kDigits == 1) {
        store(to, fma(earlier, correction, acc.of[0][r][c]));
      } else {
        store(to, fma(to_f32(acc.of[0][r][c]), set1(weights.scales[r]), earlier * correction));
      }
    }
}

// What the weights of a run are multiplied with to become steps of values, and what a step is.
struct ValueScales {
  f32x16 per_unit[Run::kGroups];
  float size;

  // visible(group, scales) clears those of hidden keys.
  template <typename Visible>
  static HS_INLINE ValueScales of(const Run& run, int groups, Visible&& visible) {
    ValueScales out;
    f32x16 most = set1(kLeastTold);
#pragma GCC unroll 4
    for (int g = 0; g < groups; ++g) {
      out.per_unit[g] = visible(g, as_f32(load_i32(run.k[g] + PagesI8::kValueScale * run.k_stride)));
      most = max(most, out.per_unit[g]);
    }
    const float largest_scale = largest(most);
    out.size = largest_scale / PagesI8::kMostOfWeight;
    const f32x16 factor = set1(PagesI8::kMostOfWeight / largest_scale);
#pragma GCC unroll 4
    for (int g = 0; g < groups; ++g) out.per_unit[g] = out.per_unit[g] * factor;
    return out;
  }
};

HS_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 power = exp2(min(abs(x), set1(20.0f)) * set1(2.885390082f));  // e ^ 2|x|
  const f32x16 magnitude = set1(1.0f) - set1(2.0f) / (power + set1(1.0f));
  return as_f32(as_i32(magnitude) | (as_i32(x) & set1(int32_t(0x80000000))));
}

// The largest lane, in every lane.
HS_INLINE f32x16 largest_everywhere(f32x16 value) {
#if defined(HS_ISA_AVX512)
  __m512 x = (__m512)value.part[0];
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, _MM_SHUFFLE(1, 0, 3, 2)));
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, _MM_SHUFFLE(2, 3, 0, 1)));
  x = _mm512_max_ps(x, _mm512_permute_ps(x, _MM_SHUFFLE(1, 0, 3, 2)));
  x = _mm512_max_ps(x, _mm512_permute_ps(x, _MM_SHUFFLE(2, 3, 0, 1)));
  return {{(native_f32)x}};
#else
  return set1(largest(value));
#endif
}

// Lanes of `value` whose bits are set in the lowest 16 of `mask`, the others of `other`.
HS_INLINE f32x16 lanes_of(uint64_t mask, f32x16 value, f32x16 other) {
#if defined(HS_ISA_AVX512)
  return {{(native_f32)_mm512_mask_mov_ps((__m512)other.part[0], __mmask16(mask), (__m512)value.part[0])}};
#else
  if ((mask & 0xffff) == 0xffff) return value;
  f32x16 out;
  HS_EACH_PART {
    native_i32 bit;
    for (int i = 0; i < kPartLanes; ++i) bit[i] = 1 << (p * kPartLanes + i);
    out.part[p] = (int32_t(mask) & bit) != 0 ? value.part[p] : other.part[p];
  }
  return out;
#endif
}

// Products of some rows with a run of keys, of which each row may see others. If `IsWhole`, all see all.
template <int Rows, bool IsWhole>
struct Logits {
  Logits(const Tile& tile, const Run& run, int64_t row, int num_groups, const float (*products)[kRunKeys])
      : groups(IsWhole ? Run::kGroups : num_groups), products(products), factor(set1(tile.factor)) {
    if (!IsWhole)
      for (int r = 0; r < Rows; ++r) seen[r] = tile.seen(row + r, run.start);
  }

  HS_INLINE f32x16 visible(int r, int g, f32x16 value, float other) const {
    return IsWhole ? value : lanes_of(seen[r] >> g * kLanes, value, set1(other));
  }
  // Sixteen logits, plus `shift`.
  HS_INLINE f32x16 relative(int r, int g, f32x16 shift) const { return fma(load(products[r] + g * kLanes), factor, shift); }
  // In every lane.
  HS_INLINE f32x16 largest(int r) const {
    f32x16 most = visible(r, 0, load(products[r]) * factor, kNoLogit);
#pragma GCC unroll 4
    for (int g = 1; g < groups; ++g) most = max(most, visible(r, g, load(products[r] + g * kLanes) * factor, kNoLogit));
    return largest_everywhere(most);
  }

  int groups;
  const float (*products)[kRunKeys];
  f32x16 factor;
  uint64_t seen[Rows];
};

constexpr float kMostOfSum = 0x1p60f;  // of weights in a lane

// Writes weights by the references as they are, and adds them to `sums`. Returns a bit for each row whose sums are too large.
template <class Pages, int Rows, bool IsWhole>
HS_INLINE uint32_t weigh_by(const float* references, const Logits<Rows, IsWhole>& logits, Weights<Pages, Rows>& weights,
                            f32x16 (&sums)[Rows]) {
  f32x16 total = zero();
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    const f32x16 shift = set1(-references[r]);
    uint32_t* to = weights.words[0][r];
#pragma GCC unroll 2
    for (int g = 0; g < logits.groups; g += 2) {  // of an odd number, the one too many is hidden
      f32x16 pair[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
        pair[i] = logits.visible(r, g + i, exp2<Pages::kPerWord == 1>(logits.relative(r, g + i, shift)), 0);
      sums[r] = Pages::put_weights(to + g * kLanes / Pages::kPerWord, pair[0], pair[1], sums[r]);
    }
    total = total + sums[r];
  }
  uint32_t too_large = 0;
  if (__builtin_expect(!all_at_most(total, kMostOfSum), 0))
    for (int r = 0; r < Rows; ++r) too_large |= uint32_t(!all_at_most(sums[r], kMostOfSum)) << r;
  return too_large;
}

// Makes the largest logits the references of some rows, and weighs all of them by these.
template <class Pages, int Rows, bool IsWhole>
__attribute__((noinline)) void weigh_anew(uint32_t rows, const Logits<Rows, IsWhole>& logits, Weights<Pages, Rows>& weights,
                                          float* references, float* lane_sums) {
  const f32x16 before = load(references);
  f32x16 now = before, sums[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) now = lanes_of(rows & 1u << r, max(before, logits.largest(r)), now);
  store(weights.corrections, exp2(before - now));
  store_some(references, now, Rows);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) sums[r] = load(lane_sums + r * kLanes) * set1(weights.corrections[r]);
  weigh_by(references, logits, weights, sums);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) store(lane_sums + r * kLanes, sums[r]);
}

// Turns products into weights, and the references and sums of the rows into those with this run. The first key that a row sees gives it
// a reference, which stays until a sum gets too large, from a logit about 60 above it: to look for the largest of every run would take
// half as long as the weights themselves, and floats are as precise far from 1 as near it. A call, so that it is compiled once for tiles
// of one piece and of several.
template <class Pages, int Rows, bool IsWhole>
__attribute__((noinline)) std::enable_if_t<Pages::kDigits == 1> weigh(const Tile& tile, const Run& run, int64_t row, int num_groups,
                                                                      float (*products)[kRunKeys], Weights<Pages, Rows>& weights,
                                                                      float* references, float* lane_sums) {
  const Logits<Rows, IsWhole> logits{tile, run, row, num_groups, products};
  if (any_at_most(first_lanes(Rows, load(references), zero()), kNoLogit)) {
    for (int r = 0; r < Rows; ++r) {
      const int first = IsWhole ? 0 : tile.first_lane(row + r, run.start);
      if (references[r] == kNoLogit && (IsWhole || first < tile.end_lane(row + r, run.start)))
        references[r] = products[r][first] * tile.factor;
    }
  }
  f32x16 sums[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) sums[r] = load(lane_sums + r * kLanes);
  const uint32_t too_large = weigh_by(references, logits, weights, sums);
  if (__builtin_expect(too_large, 0)) return weigh_anew(too_large, logits, weights, references, lane_sums);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) store(lane_sums + r * kLanes, sums[r]);
  store(weights.corrections, set1(1.0f));
}

// The same for weights that are written with digits: relative to the largest logit of their run, as digits have no room for more than 1.
template <class Pages, int Rows, bool IsWhole>
__attribute__((noinline)) std::enable_if_t<(Pages::kDigits > 1)> weigh(const Tile& tile, const Run& run, int64_t row, int num_groups,
                                                                       float (*logits)[kRunKeys], Weights<Pages, Rows>& weights,
                                                                       float* references, float* lane_sums) {
  const Logits<Rows, IsWhole> own{tile, run, row, num_groups, logits};
  const f32x16 before = load(references);
  f32x16 now = before, of_run = before, shifts[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    const f32x16 most = own.largest(r);
    now = lanes_of(1u << r, max(before, most), now);
    of_run = lanes_of(1u << r, most, of_run);
    shifts[r] = set1(0.0f) - most;
  }
  store(weights.corrections, exp2(before - now));
  // what they are to the largest so far, which they may be far below
  store(weights.scales, exp2(of_run - now));
  store_some(references, now, Rows);
  ValueScales scales;
  if (IsWhole) scales = ValueScales::of(run, own.groups, [](int, f32x16 value) { return value; });
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    if (!IsWhole) scales = ValueScales::of(run, own.groups, [&](int g, f32x16 value) { return own.visible(r, g, value, 0); });
    f32x16 sum = zero();
    i32x16 steps[Run::kGroups] = {};
#pragma GCC unroll 4
    for (int g = 0; g < own.groups; ++g) {
      // rounding makes the largest of huge logits more than 0; NaN stays one
      const f32x16 weight = own.visible(r, g, exp2<Pages::kPerWord == 1>(min(zero(), own.relative(r, g, shifts[r]))), 0);
      sum = sum + weight;
      steps[g] = to_i32(weight * scales.per_unit[g]);
    }
    store_digits(steps, weights.words[0][r], weights.words[1][r]);
    const f32x16 scale = set1(weights.scales[r]);
    store(lane_sums + r * kLanes, fma(sum, scale, load(lane_sums + r * kLanes) * set1(weights.corrections[r])));
    weights.scales[r] *= scales.size;
  }
}

// Some rows of a tile over one run of keys: all of them if `IsOnly`. A tile of several such pieces has much to compute on every run, and
// fetches all of the next one meanwhile.
template <class Pages, int Rows, bool IsOnly>
void attend_run(const Tile& tile, const Run& run, const Run& next, int64_t row, const RowStates& states, float* lane_sums) {
  const int64_t start = run.start;
  const int first = tile.first_lane(row, start), end = tile.end_lane(row + Rows - 1, start);  // of any row
  if (first >= end) return;
  const bool is_whole = tile.end_lane(row, start) == kRunKeys && tile.first_lane(row + Rows - 1, start) == 0;
  const int groups = (end + kLanes - 1) / kLanes;
  const int64_t columns = padded(tile.head_dim_v);
  const int first_word = first / Pages::kPerWord, end_word = int(words(end, Pages::kPerWord));
  Ahead<Pages> ahead(run, next, Pages::kHeaderWords + tile.head_words, columns, first_word, end_word);
  constexpr bool kIsAhead = IsOnly && kMaxVectors == Run::kGroups;  // which makes its steps as `Ahead` means them
  alignas(64) float logits[Rows][kRunKeys];
  Weights<Pages, Rows> weights;
  for (int group = 0; group < groups; group += kMaxVectors)
    with_constant<kMaxVectors>(std::min(groups - group, kMaxVectors), [&](auto count) __attribute__((always_inline)) {
      multiply_keys<Pages, Rows, count, kIsAhead>(tile, run, next, ahead, row, group, logits);
    });
  if (tile.softcap != 0)
    for (int r = 0; r < Rows; ++r)
      for (int g = 0; g < groups; ++g) {
        float* at = logits[r] + g * kLanes;
        store(at, tanh(load(at) * set1(tile.softcap_scale)) * set1(tile.softcap));
      }
  float *references = states.reference + row, *sums = lane_sums + row * kLanes;
  is_whole ? weigh<Pages, Rows, true>(tile, run, row, groups, logits, weights, references, sums)
           : weigh<Pages, Rows, false>(tile, run, row, groups, logits, weights, references, sums);
  const bool is_last_alone = Pages::kPerWord == 2 && end % 2 != 0;  // bytes may have any neighbours: 0 times a byte is 0
  in_pieces<kMaxVectors>(columns / kLanes, [&](int64_t vector, auto count) __attribute__((always_inline)) {
    multiply_values<Pages, Rows, count, kIsAhead>(run, next, ahead, columns, vector * kLanes, first_word, end_word, is_last_alone,
                                                  weights, states.values + row * columns);
  });
}

// All rows of a tile over the runs of one segment; runs.take() gives one after another, and runs.next() looks ahead. `lane_sums` is
// scratch, [rows][16].
template <class Pages, typename Runs>
void attend_segment(const Tile& tile, int64_t segment, const RowStates& states, float* lane_sums, Runs& runs) {
  const int64_t columns = padded(tile.head_dim_v);
  std::fill_n(states.reference, tile.rows, kNoLogit);
  std::fill_n(lane_sums, tile.rows * kLanes, 0.0f);
  std::fill_n(states.values, tile.rows * columns, 0.0f);
  const int64_t end = std::min((segment + 1) * kSegmentKeys, tile.end());
  for (int64_t start = first_run(segment, tile.positions[0], tile.window); start < end; start += kRunKeys) {
    const Run run = runs.take();
    in_pieces<kMaxRows>(tile.rows, [&](int64_t row, auto count) {
      if (tile.rows == count) return attend_run<Pages, count, true>(tile, run, runs.next(), row, states, lane_sums);
      // one of several pieces has at least half of what fits
      if constexpr (count >= kMaxRows / 2) attend_run<Pages, count, false>(tile, run, runs.next(), row, states, lane_sums);
    });
  }
  for (int64_t r = 0; r < tile.rows; ++r) states.sum[r] = sum(load(lane_sums + r * kLanes));
}

// Adds the result of the next segment to that of those before it. Where a sum is 0 the values are too, and its factor doesn't matter.
HS_INLINE void merge_segment(const Tile& tile, const RowStates& total, const RowStates& next) {
  const int64_t columns = padded(tile.head_dim_v);
  alignas(64) float old_factors[kLanes], new_factors[kLanes];
  for (int64_t first = 0; first < tile.rows; first += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, tile.rows - first));
    const f32x16 before = load_some(total.reference + first, count), other = load_some(next.reference + first, count);
    const f32x16 reference = max(before, other);
    const f32x16 a = exp2(before - reference), b = exp2(other - reference);
    store(old_factors, a);
    store(new_factors, b);
    store_some(total.reference + first, reference, count);
    store_some(total.sum + first, fma(load_some(next.sum + first, count), b, load_some(total.sum + first, count) * a), count);
    for (int r = 0; r < count; ++r) {
      float* values = total.values + (first + r) * columns;
      const float* others = next.values + (first + r) * columns;
      for (int64_t c = 0; c < columns; c += kLanes)
        store(values + c, fma(load(others + c), set1(new_factors[r]), load(values + c) * set1(old_factors[r])));
    }
  }
}

}  // namespace hs
