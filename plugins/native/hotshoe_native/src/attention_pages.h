// Rows of q, k and v on their way into words, and where the words of a page lie.
#pragma once

#include "attention_tile.h"

#include <cstring>
#include <type_traits>

namespace hs {

constexpr int64_t kMaxHeadDim = 1024;

struct Rotation {
  const float* cos;
  const float* sin;
  int64_t half;  // 0: none
};

// Turns halves of a row by the angles of a position (arXiv:2104.09864).
template <typename T>
HS_INLINE void rotate(const T* row, const Rotation& rotation, T* out) {
  const int64_t half = rotation.half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const f32x16 first = load(row + i), second = load(row + half + i), c = load(rotation.cos + i), s = load(rotation.sin + i);
    store(out + i, first * c - second * s);
    store(out + half + i, second * c + first * s);
  }
  if (i == half) return;
  const int rest = int(half - i);
  const f32x16 first = load_some(row + i, rest), second = load_some(row + half + i, rest);
  const f32x16 c = load_some(rotation.cos + i, rest), s = load_some(rotation.sin + i, rest);
  store_some(out + i, first * c - second * s, rest);
  store_some(out + half + i, second * c + first * s, rest);
}

// A row rotated and rounded to its own type.
template <typename T>
HS_INLINE void rotate_whole(const T* row, int64_t count, const Rotation& rotation, T* out) {
  rotate(row, rotation, out);
  const int64_t num_rotated = 2 * rotation.half;
  std::memcpy(out + num_rotated, row + num_rotated, sizeof(T) * (count - num_rotated));
}

HS_INLINE void convert(float value, float& to) { to = value; }
HS_INLINE void convert(float value, bf16& to) { to = to_bf16(value); }
HS_INLINE void convert(bf16 value, float& to) { to = to_float(value); }
HS_INLINE void convert(bf16 value, bf16& to) { to = value; }

// A row of q or k as words, rotated and rounded to its own type first; a word without a partner has 0.
template <typename T, class Pages>
HS_INLINE void to_words(const T* row, int64_t head_dim, const Rotation& rotation, uint32_t* out) {
  using Element = typename Pages::Element;
  auto* elements = reinterpret_cast<Element*>(out);
  if constexpr (std::is_same_v<T, Element>) {
    rotate_whole(row, head_dim, rotation, elements);
  } else {
    T rotated[kMaxHeadDim];
    rotate_whole(row, head_dim, rotation, rotated);
    for (int64_t d = 0; d < head_dim; ++d) convert(rotated[d], elements[d]);
  }
  if (head_dim % Pages::kPerWord) elements[head_dim] = 0;
}

// The pages of one layer.
template <class Pages>
struct Cache {
  uint32_t* pages;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t key_words;  // a header, and those of head_dim
  int64_t columns;    // padded head_dim_v

  uint32_t* keys(int64_t block, int64_t head) const {
    const int64_t page_words = key_words * block_size + block_size / Pages::kPerWord * columns;
    return pages + (block * num_kv_heads + head) * page_words;
  }
  uint32_t* values(int64_t block, int64_t head) const { return keys(block, head) + key_words * block_size; }
};

// The words of a query.
template <typename T, class Pages>
HS_INLINE std::enable_if_t<Pages::kDigits == 1> write_query(const T* q, int64_t head_dim, const Rotation& rotation, uint32_t* out) {
  to_words<T, Pages>(q, head_dim, rotation, out);
}

template <typename T, class Pages>
void write_key(const Cache<Pages>& cache, int64_t slot, int64_t head, const T* k, int64_t head_dim, const Rotation& rotation) {
  uint32_t key[kMaxHeadDim];
  to_words<T, Pages>(k, head_dim, rotation, key);
  uint32_t* keys = cache.keys(slot / cache.block_size, head) + slot % cache.block_size;
  for (int64_t word = 0; word < cache.key_words; ++word) keys[word * cache.block_size] = key[word];
}

// The words that a token's values are in, maybe with those of a neighbour.
template <class Pages>
HS_INLINE uint32_t* value_words(const Cache<Pages>& cache, int64_t slot, int64_t head) {
  return cache.values(slot / cache.block_size, head) + slot % cache.block_size / Pages::kPerWord * cache.columns;
}

template <typename T, class Pages>
void write_value(const Cache<Pages>& cache, int64_t slot, int64_t head, const T* v, int64_t head_dim_v) {
  auto* values = reinterpret_cast<typename Pages::Element*>(value_words(cache, slot, head)) + slot % Pages::kPerWord;
  for (int64_t d = 0; d < head_dim_v; ++d) convert(v[d], values[d * Pages::kPerWord]);
}

// Sixteen values or fewer, rounded to bf16, as the upper halves of words.
template <typename T>
HS_INLINE i32x16 upper_halves(const T* from, int count) {
  f32x16 value = count == kLanes ? load(from) : load_some(from, count);
  if constexpr (std::is_same_v<T, float>) {
    bf16 rounded[kLanes];
    store(rounded, value);
    value = load(rounded);
  }
  return as_i32(value);
}

// Of all the tokens that share words, whose rows lie `stride` apart; `slot` is the first one's.
template <typename T, class Pages>
void write_whole_values(const Cache<Pages>& cache, int64_t slot, int64_t head, const T* v, int64_t stride, int64_t head_dim_v) {
  static_assert(Pages::kPerWord == 2);
  const T* next_v = v + stride;
  uint32_t* values = value_words(cache, slot, head);
  for (int64_t d = 0; d < head_dim_v; d += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, head_dim_v - d));
    store_i32(values + d, shift_right_logical(upper_halves(v + d, count), 16) | upper_halves(next_v + d, count));
  }
}

// One request's keys and values for one KV head, run by run.
template <class Pages>
class Runs {
 public:
  // Runs from `start` to `end`. `copied` takes those out of blocks that aren't whole vectors: words(q and v) of kRunKeys.
  Runs(const Cache<Pages>& cache, const int32_t* block_table, int64_t head, int64_t start, int64_t end, uint32_t* copied)
      : cache_(cache), block_table_(block_table), head_(head), start_(start), end_(end), copied_(copied) {
    if (!is_copied()) next_ = find(start);
  }

  // The first run of what is computed after these, to be fetched meanwhile.
  void followed_by(const Run& run) { after_ = run, is_followed_ = true; }

  Run take() {
    const int64_t start = start_;
    start_ += kRunKeys;
    if (is_copied()) return next_ = copy(start);
    const Run run = next_;
    if (start_ < end_) {
      next_ = find(start_);
    } else if (is_followed_) {
      next_ = after_;
    }
    return run;
  }
  // What comes after the run that was taken last; itself where it can't be told.
  const Run& next() const { return next_; }

 private:
  static constexpr int kWordsPerGroup = kLanes / Pages::kPerWord;

  bool is_copied() const { return cache_.block_size % kLanes != 0; }

  Run find(int64_t start) const {
    Run run;
    run.start = start;
    run.k_stride = cache_.block_size;
    int64_t index = start / cache_.block_size, offset = start % cache_.block_size;
    for (int64_t g = 0; g < Run::kGroups; ++g) {
      if (start + g * kLanes >= end_) {  // there's no key any more, so any address does
        run.k[g] = run.k[0];
        run.v[g] = run.v[0];
        continue;
      }
      run.k[g] = cache_.keys(block_table_[index], head_) + offset;
      run.v[g] = cache_.values(block_table_[index], head_) + offset / Pages::kPerWord * cache_.columns;
      offset += kLanes;
      if (offset == cache_.block_size) ++index, offset = 0;
    }
    return run;
  }

  Run copy(int64_t start) const {
    Run run;
    run.start = start;
    run.k_stride = kRunKeys;
    for (int64_t g = 0; g < Run::kGroups; ++g) {
      uint32_t* k = copied_ + g * kLanes;
      uint32_t* v = copied_ + cache_.key_words * kRunKeys + g * kWordsPerGroup * cache_.columns;
      copy_group(start + g * kLanes, k, v);
      run.k[g] = k;
      run.v[g] = v;
    }
    return run;
  }

  void copy_group(int64_t first, uint32_t* k, uint32_t* v) const {
    const int64_t count = std::min<int64_t>(kLanes, words(std::max<int64_t>(end_ - first, 0), Pages::kPerWord) * Pages::kPerWord);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = block_table_[(first + i) / cache_.block_size], offset = (first + i) % cache_.block_size;
      const uint32_t* keys = cache_.keys(block, head_) + offset;
      for (int64_t word = 0; word < cache_.key_words; ++word) k[word * kRunKeys + i] = keys[word * cache_.block_size];
      if (i % Pages::kPerWord) continue;
      std::copy_n(cache_.values(block, head_) + offset / Pages::kPerWord * cache_.columns, cache_.columns,
                  v + i / Pages::kPerWord * cache_.columns);
    }
  }

  const Cache<Pages>& cache_;
  const int32_t* block_table_;
  int64_t head_;
  int64_t start_, end_;
  uint32_t* copied_;
  Run next_{};
  Run after_{};
  bool is_followed_ = false;
};

}  // namespace hs
