// From logits to tokens: masks, the most likely token, or one drawn after temperature, top_k, top_p and min_p.
//
// A row is worked on by one thread, always in the same order, so that its token depends on nothing but the row. Nothing is sorted.
// What top_k and top_p keep of a row is everything above one logit, its boundary; `find_boundary` closes in on it. The token is the
// winner of a race with exponential times: first of blocks of token ids, then of the tokens in the block that won (`gumbel_max` of
// hotshoe.api has the definition).
#include <cfloat>
#include <cmath>

#include "op.h"
#include "sampling_lanes.h"

namespace {

using namespace hs;

constexpr int64_t kBlock = 256;        // token ids that race as one first; their weights are summed in float32
constexpr int64_t kFlush = 2048;       // elements after which sums of lanes are carried over to float64
constexpr int kThresholds = 8;         // that one pass tries
constexpr float kSmallestDepth = -87;  // log weights below count as none: float32 ends there

int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Calls body(i, number of lanes) for every vector of n elements.
template <typename Body>
HS_INLINE void each_vector(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, int(n - i));
}

f32x16 lowest() { return set1(-INFINITY); }

// ---- scratch memory of one thread

struct Scratch {
  float* logits;          // [V] the row in float32, if it isn't
  float* weights;         // [V]
  float* kept_logits;     // [V] what top_k leaves
  int32_t* kept_ids;      // [V]
  float* member_logits;   // [V] what may still hold the boundary
  float* member_weights;  // [V]
};

constexpr int64_t kNumArrays = 6;
int64_t array_bytes(int64_t vocab_size) { return padded(vocab_size) * 4 + 64; }  // `compress` writes past the end
int64_t scratch_bytes(int64_t vocab_size) { return kNumArrays * array_bytes(vocab_size); }

Scratch scratch_at(char* start, int64_t vocab_size) {
  const int64_t size = array_bytes(vocab_size);
  const auto floats = [&](int64_t index) { return reinterpret_cast<float*>(start + index * size); };
  return {floats(0), floats(1), floats(2), reinterpret_cast<int32_t*>(start + 3 * size), floats(4), floats(5)};
}

// ---- masks

struct MaskArgs {
  void* logits;            // [num_rows, vocab_size], rows `stride` elements apart
  const uint32_t* masks;   // [num_rows, words]: bit i of a row is 0 where token i is forbidden
  int64_t num_rows, vocab_size, stride, dtype, words;
};

using f32_bits = uint32_t __attribute__((may_alias));

HS_INLINE void store_where(f32_bits* to, uint32_t lanes, uint32_t value) {
#if defined(HS_ISA_AVX512)
  _mm512_mask_storeu_epi32(to, __mmask16(lanes), _mm512_set1_epi32(int(value)));
  _mm512_mask_storeu_epi32(to + 16, __mmask16(lanes >> 16), _mm512_set1_epi32(int(value)));
#else
  for (int i = 0; i < 32; ++i) to[i] ^= (to[i] ^ value) & -(lanes >> i & 1);
#endif
}
HS_INLINE void store_where(bf16* to, uint32_t lanes, bf16 value) {
#if defined(HS_ISA_AVX512)
  _mm512_mask_storeu_epi16(to, __mmask32(lanes), _mm512_set1_epi16(short(value)));
#else
  for (int i = 0; i < 32; ++i) to[i] ^= (to[i] ^ value) & -(lanes >> i & 1);
#endif
}

template <typename Bits>
void mask_row(Bits* row, const uint32_t* mask, int64_t n, Bits lowest) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    if (const uint32_t forbidden = ~mask[i / 32]) store_where(row + i, forbidden, lowest);
  for (; i < n; ++i)
    if (!(mask[i / 32] >> (i % 32) & 1)) row[i] = lowest;
}

void mask_body(const MaskArgs& args, const Team& team) {
  const Range rows = share(args.num_rows, team);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const uint32_t* mask = args.masks + row * args.words;
    if (args.dtype == kBF16)
      mask_row<bf16>(static_cast<bf16*>(args.logits) + row * args.stride, mask, args.vocab_size, 0xff80);
    else
      mask_row<f32_bits>(static_cast<f32_bits*>(args.logits) + row * args.stride, mask, args.vocab_size, 0xff800000);
  }
}

// ---- the most likely token

struct Best {
  int64_t id;   // lowest of those with the largest logit; of a NaN if there is one
  float logit;  // NaN if there is one
};

template <typename T>
Best most_likely(const T* row, int64_t n) {
  constexpr int64_t kSpan = 1024;
  Best best{0, -INFINITY};
  for (int64_t start = 0; start < n; start += kSpan) {
    const int64_t size = n - start < kSpan ? n - start : kSpan;
    const T* span = row + start;
    f32x16 largest_of[4] = {lowest(), lowest(), lowest(), lowest()};
    Lanes is_number = at_least(zero(), zero());
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
      for (int j = 0; j < 4; ++j) {
        const f32x16 value = load(span + i + j * kLanes);
        is_number = is_number & at_least(value, lowest());
        largest_of[j] = max(largest_of[j], value);
      }
    }
    each_vector(size - i, [&](int64_t at, int lanes) {
      const f32x16 value = load_or(span + i + at, lanes, lowest());
      is_number = is_number & at_least(value, lowest());
      largest_of[0] = max(largest_of[0], value);
    });
    if (bits(is_number) != 0xffff) {
      for (int64_t k = 0; k < size; ++k)
        if (std::isnan(to_float(span[k]))) return {start + k, NAN};
    }
    const float top = largest(max(max(largest_of[0], largest_of[1]), max(largest_of[2], largest_of[3])));
    if (top > best.logit) {
      best = {start, top};  // the place within the span is looked up once it has won
    }
  }
  while (best.id < n && to_float(row[best.id]) != best.logit) ++best.id;
  return best;
}

struct MostLikelyArgs {
  const void* logits;  // [num_rows, vocab_size], rows `stride` elements apart
  int64_t* token_ids;  // [num_rows]
  float* values;       // [num_rows]
  int64_t num_rows, vocab_size, stride, dtype;
};

template <typename T>
void most_likely_of(const MostLikelyArgs& args, int64_t row) {
  const Best best = most_likely(static_cast<const T*>(args.logits) + row * args.stride, args.vocab_size);
  args.token_ids[row] = best.id;
  args.values[row] = best.logit;
}

void most_likely_body(const MostLikelyArgs& args, const Team& team) {
  const Range rows = share(args.num_rows, team);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    args.dtype == kBF16 ? most_likely_of<bf16>(args, row) : most_likely_of<float>(args, row);
}

// ---- weights

// Probabilities relative to the most probable token's, of 16 logits.
struct Softmax {
  f32x16 best, inverse_temperature;

  Softmax(float best_logit, float temperature) : best(set1(best_logit)), inverse_temperature(set1(std::fmin(1 / temperature, FLT_MAX))) {}

  HS_INLINE f32x16 operator()(f32x16 logits) const {
    // the best logit is taken off first: no temperature is too small
    const f32x16 depth = (logits - best) * inverse_temperature;
    return select(at_least(depth, set1(kSmallestDepth)), exp(depth), zero());
  }
};

struct Extent {
  float low, high;  // of the finite values
};

// Range of some values; also writes them out as float32 if `copy` isn't null.
template <typename T>
Extent extent_of(const T* values, int64_t n, float* copy) {
  f32x16 low = set1(INFINITY), high = lowest();
  each_vector(n, [&](int64_t i, int lanes) {
    const f32x16 value = load_or(values + i, lanes, lowest());
    high = max(high, value);
    low = min(low, select(at_least(value, set1(-FLT_MAX)), value, low));
    if (copy) store(copy + i, value);
  });
  return {-largest(zero() - low), largest(high)};
}

// ---- the boundary

struct Members {
  const float* logits;
  const float* weights;  // null: each counts as 1
  int64_t count;
};

// What stays of a row: logits above the boundary, and of those equal to it the first ones.
struct Boundary {
  float logit;
  int64_t num_equal;  // how many of them stay, if there are as many

  float beyond() const { return std::nextafter(logit, INFINITY); }
};

// sums[j] += what the members with a logit of at least thresholds[j] weigh.
template <bool kIsWeighted>
void weigh(const Members& members, const float* thresholds, double* sums) {
  f32x16 limit[kThresholds];
  for (int j = 0; j < kThresholds; ++j) limit[j] = set1(thresholds[j]);
  for (int64_t start = 0; start < members.count; start += kFlush) {
    const int64_t size = members.count - start < kFlush ? members.count - start : kFlush;
    f32x16 sum_of[kThresholds];
    for (int j = 0; j < kThresholds; ++j) sum_of[j] = zero();
    each_vector(size, [&](int64_t i, int lanes) {
      const f32x16 logits = load_or(members.logits + start + i, lanes, lowest());
      const f32x16 weights = kIsWeighted ? load_or(members.weights + start + i, lanes, zero()) : set1(1.0f);
      for (int j = 0; j < kThresholds; ++j) sum_of[j] = add_where(at_least(logits, limit[j]), sum_of[j], weights);
    });
    for (int j = 0; j < kThresholds; ++j) sums[j] += sum(sum_of[j]);
  }
}

// Moves the members with low <= logit < high to the start of the scratch arrays, in order; `from` may lie there already.
template <bool kIsWeighted>
Members narrowed(const Members& from, float low, float high, const Scratch& scratch) {
  int64_t count_kept = 0;
  each_vector(from.count, [&](int64_t i, int lanes) {
    const f32x16 logits = load_or(from.logits + i, lanes, lowest());
    const Lanes within = and_not(at_least(logits, set1(low)), at_least(logits, set1(high)));
    if (!any(within)) return;
    if (kIsWeighted) {
      const f32x16 weights = load_or(from.weights + i, lanes, zero());
      compress(scratch.member_weights + count_kept, within, weights);
    }
    compress(scratch.member_logits + count_kept, within, logits);
    count_kept += count(within);
  });
  return {scratch.member_logits, kIsWeighted ? scratch.member_weights : nullptr, count_kept};
}

// Where the members, taken from the largest logit down, first weigh `limit` together, or the last one if they don't.
//
// Each round weighs what lies above a few thresholds between the smallest and the largest logit, and goes on with those members
// between two of them, until all that are left are equal. Distributions of any width take two or three rounds over more than a few
// of the tokens. A round always splits the members: the first threshold is above the smallest logit.
template <bool kIsWeighted>
Boundary find_boundary(Members members, Extent extent, double limit, const Scratch& scratch) {
  double above = 0;  // weight of all that lies above the members
  while (extent.low < extent.high) {
    float thresholds[kThresholds];
    for (int j = 0; j < kThresholds; ++j) {
      const double share = double(j + 1) / kThresholds;
      thresholds[j] = float(extent.high * (1 - share) + extent.low * share);
    }
    double sums[kThresholds] = {};
    weigh<kIsWeighted>(members, thresholds, sums);
    int chosen = 0;
    while (chosen + 1 < kThresholds && above + sums[chosen] < limit) ++chosen;
    const float ceiling = chosen > 0 ? thresholds[chosen - 1] : INFINITY;
    if (chosen > 0) above += sums[chosen - 1];
    members = narrowed<kIsWeighted>(members, thresholds[chosen], ceiling, scratch);
    if (members.count == 0) return {ceiling, INT64_MAX};  // sums are rounded: the limit isn't quite reached
    extent = extent_of(members.logits, members.count, nullptr);
  }
  if (!kIsWeighted) return {extent.low, int64_t(limit - above)};
  int64_t place = 0;
  while (members.logits[place] != extent.low) ++place;
  return {extent.low, int64_t(std::ceil((limit - above) / members.weights[place]))};
}

// Which of a row's tokens its boundary keeps.
class Kept {
 public:
  Kept(const float* logits, int64_t n, const Boundary& boundary)
      : from_(set1(boundary.logit)), beyond_(set1(boundary.beyond())), last_(last_equal(logits, n, boundary.num_equal)) {}

  // Of the 16 logits at places i...
  HS_INLINE Lanes operator()(int64_t i, f32x16 logits) const {
    const int64_t before = last_ + 1 - i;
    if (before >= kLanes) return at_least(logits, from_);
    if (before <= 0) return at_least(logits, beyond_);
    return at_least(logits, first_lanes(int(before), from_, beyond_));
  }

 private:
  // Place of the last logit equal to the boundary that stays.
  int64_t last_equal(const float* logits, int64_t n, int64_t left) const {
    for (int64_t i = 0; i < n && left > 0; i += kLanes) {
      const int lanes = int(n - i < kLanes ? n - i : kLanes);
      const f32x16 value = load_or(logits + i, lanes, lowest());
      uint32_t equal = bits(and_not(at_least(value, from_), at_least(value, beyond_)));
      const int found = __builtin_popcount(equal);
      if (found >= left) {
        for (; left > 1; --left) equal &= equal - 1;
        return i + __builtin_ctz(equal);
      }
      left -= found;
    }
    return left > 0 ? n - 1 : -1;
  }

  f32x16 from_, beyond_;
  int64_t last_;
};

// ---- the draw

// The finalizer of SplitMix64 (Steele et al. 2014).
uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

// Whoever weighs w arrives after a time that is exponential with rate w, and a function of the uniform and its number alone.
class Race {
 public:
  static constexpr uint64_t kFirstBlock = uint64_t(1) << 32;  // the number of the first block; those below are token ids

  explicit Race(double uniform) : key_(mixed(uint64_t(uniform * 9007199254740992.0) + kGolden)) {}

  // Whether this one is ahead of all before.
  HS_INLINE bool enter(uint64_t number, double weight) {
    if (!(weight > 0)) return false;
    const double share = (double(mixed(key_ + number * kGolden) >> 12) + 0.5) * 0x1p-52;
    if ((1 - share) * best_ >= weight) return false;  // -log(share) is even larger
    const double speed = weight / -std::log(share);
    if (!(speed > best_)) return false;
    best_ = speed;
    return true;
  }

 private:
  static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
  uint64_t key_;
  double best_ = 0;
};

struct Span {
  int64_t start, size;
};

// The place that wins among n; weights(i, lanes) are those of places i..., `ids` their ascending token ids, null if they are places.
template <typename Weights>
int64_t winner(int64_t n, const int32_t* ids, double uniform, Weights weights) {
  Race blocks(uniform);
  Span won{0, 0};
  for (int64_t start = 0; start < n;) {
    const int64_t block = (ids ? ids[start] : start) / kBlock;
    int64_t end = start + 1;
    if (ids)
      while (end < n && ids[end] / kBlock == block) ++end;
    else
      end = n - start < kBlock ? n : start + kBlock;
    f32x16 lanes_sum = zero();
    each_vector(end - start, [&](int64_t i, int lanes) { lanes_sum = lanes_sum + weights(start + i, lanes); });
    if (blocks.enter(Race::kFirstBlock + block, sum(lanes_sum))) won = {start, end - start};
    start = end;
  }
  alignas(64) float within[kBlock];
  each_vector(won.size, [&](int64_t i, int lanes) { store(within + i, weights(won.start + i, lanes)); });
  Race tokens(uniform);
  int64_t place = won.start;
  for (int64_t i = 0; i < won.size; ++i) {
    const int64_t id = ids ? ids[won.start + i] : won.start + i;
    if (tokens.enter(uint64_t(id), within[i])) place = won.start + i;
  }
  return place;
}

struct SampleArgs {
  const void* logits;        // [num_rows, vocab_size], rows `stride` elements apart; not modified
  const float* temperature;  // [num_rows]; 0 = greedy
  const int64_t* top_k;      // [num_rows]; 0 = all
  const float* top_p;        // [num_rows], in (0, 1]
  const float* min_p;        // [num_rows], in [0, 1]
  const double* uniforms;    // [num_rows], in [0, 1)
  int64_t* token_ids;        // [num_rows]
  char* scratch;             // hs_sample_scratch_bytes(vocab_size) per thread
  int64_t num_rows, vocab_size, stride, dtype;
};

// Keeps the `top_k` largest of n logits: theirs and their ids, in order of id; how many there are.
int64_t keep_top_k(const float* logits, int64_t n, Extent extent, int64_t top_k, const Scratch& scratch) {
  const Boundary boundary = find_boundary<false>({logits, nullptr, n}, extent, double(top_k), scratch);
  const Kept is_kept(logits, n, boundary);
  int64_t count_kept = 0;
  each_vector(n, [&](int64_t i, int lanes) {
    const f32x16 value = load_or(logits + i, lanes, lowest());
    const Lanes kept = is_kept(i, value);
    if (!any(kept)) return;
    compress(scratch.kept_logits + count_kept, kept, value);
    for (uint32_t left = bits(kept); left != 0; left &= left - 1) scratch.kept_ids[count_kept++] = int32_t(i + __builtin_ctz(left));
  });
  return count_kept;
}

// A place among n logits, drawn after top_p and min_p; `ids` are their token ids, null if they are places.
int64_t draw_among(
    const float* logits, const int32_t* ids, int64_t n, Extent extent, const SampleArgs& args, int64_t row, const Scratch& scratch) {
  const float temperature = args.temperature[row], top_p = args.top_p[row];
  const double uniform = args.uniforms[row];
  const Softmax softmax(extent.high, temperature);
  const f32x16 min_p = set1(args.min_p[row]);
  if (top_p >= 1) {
    return winner(n, ids, uniform, [&](int64_t i, int lanes) {
      const f32x16 weights = softmax(load_or(logits + i, lanes, lowest()));
      return select(at_least(weights, min_p), weights, zero());
    });
  }
  double total = 0;
  for (int64_t start = 0; start < n; start += kBlock) {
    f32x16 block_sum = zero();
    each_vector(n - start < kBlock ? n - start : kBlock, [&](int64_t i, int lanes) {
      const f32x16 weights = softmax(load_or(logits + start + i, lanes, lowest()));
      store(scratch.weights + start + i, weights);
      block_sum = block_sum + weights;
    });
    total += sum(block_sum);
  }
  // what n tokens of so little weight have together is less than top_p leaves out, so the boundary lies above
  const double least = std::log((1 - double(top_p)) * total / double(n) / 2) * temperature + extent.high;
  if (least > extent.low) extent.low = std::fmin(float(least), extent.high);
  const Boundary boundary = find_boundary<true>({logits, scratch.weights, n}, extent, top_p * total, scratch);
  const Kept is_kept(logits, n, boundary);
  return winner(n, ids, uniform, [&](int64_t i, int lanes) {
    const f32x16 weights = load_or(scratch.weights + i, lanes, zero());
    const Lanes kept = is_kept(i, load_or(logits + i, lanes, lowest())) & at_least(weights, min_p);
    return select(kept, weights, zero());
  });
}

template <typename T>
int64_t sample_row(const SampleArgs& args, int64_t row, const Scratch& scratch) {
  const int64_t n = args.vocab_size, top_k = args.top_k[row];
  const T* given = static_cast<const T*>(args.logits) + row * args.stride;
  if (args.temperature[row] == 0) return most_likely(given, n).id;
  float* copy = sizeof(T) == sizeof(float) ? nullptr : scratch.logits;
  const Extent extent = extent_of(given, n, copy);
  const float* logits = copy ? copy : reinterpret_cast<const float*>(given);
  if (top_k <= 0 || top_k >= n) return draw_among(logits, nullptr, n, extent, args, row, scratch);
  const int64_t kept = keep_top_k(logits, n, extent, top_k, scratch);
  const Extent extent_kept = extent_of(scratch.kept_logits, kept, nullptr);
  return scratch.kept_ids[draw_among(scratch.kept_logits, scratch.kept_ids, kept, extent_kept, args, row, scratch)];
}

void sample_body(const SampleArgs& args, const Team& team) {
  const Scratch scratch = scratch_at(args.scratch + team.thread * scratch_bytes(args.vocab_size), args.vocab_size);
  // every so manieth row, not a range: requests of a kind often stand side by side, and some kinds cost more
  for (int64_t row = team.thread; row < args.num_rows; row += team.num_threads)
    args.token_ids[row] = args.dtype == kBF16 ? sample_row<bf16>(args, row, scratch) : sample_row<float>(args, row, scratch);
}

}  // namespace

HS_EXPORT int64_t hs_sample_scratch_bytes(int64_t vocab_size) { return scratch_bytes(vocab_size); }
HS_DEFINE_OP(mask, MaskArgs, mask_body)
HS_DEFINE_OP(most_likely, MostLikelyArgs, most_likely_body)
HS_DEFINE_OP(sample, SampleArgs, sample_body)
