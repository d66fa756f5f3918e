// Rows of q, k and v on their way into words, and where the words of a page lie.
#pragma once

#include "attention_tile.h"

#include <cmath>

namespace hs {

constexpr int64_t kMaxHeadDim = 1024;

struct Rotation {
  const float* cos;
  const float* sin;
  int64_t half;  // 0: none
};

HS_INLINE float rounded(float value, float) { return value; }
HS_INLINE float rounded(float value, bf16) { return to_float(to_bf16(value)); }
HS_INLINE void convert(float value, float& to) { to = value; }
HS_INLINE void convert(float value, bf16& to) { to = to_bf16(value); }

// A row of q or k as words, rotated in halves (arXiv:2104.09864) and rounded to its own type first; a word without a partner has 0.
template <typename T, class Pages>
void to_words(const T* row, int64_t head_dim, const Rotation& rotation, uint32_t* out) {
  alignas(64) T rotated[kMaxHeadDim];
  const int64_t half = rotation.half;
  int64_t i = 0;
  const auto rotate = [&](int64_t at, int count) __attribute__((always_inline)) {
    const f32x16 first = load_some(row + at, count), second = load_some(row + half + at, count);
    const f32x16 c = load_some(rotation.cos + at, count), s = load_some(rotation.sin + at, count);
    store_some(rotated + at, first * c - second * s, count);
    store_some(rotated + half + at, second * c + first * s, count);
  };
  for (; i + kLanes <= half; i += kLanes) rotate(i, kLanes);
  if (i < half) rotate(i, int(half - i));
  std::copy(row + 2 * half, row + head_dim, rotated + 2 * half);
  auto* elements = reinterpret_cast<typename Pages::Element*>(out);
  for (int64_t d = 0; d < head_dim; ++d) {
    if constexpr (std::is_same_v<T, typename Pages::Element>) {
      elements[d] = rotated[d];
    } else {
      convert(to_float(rotated[d]), elements[d]);
    }
  }
  if (head_dim % Pages::kPerWord) elements[head_dim] = 0;
}

// The pages of one layer.
template <class Pages>
struct Cache {
  uint32_t* k;
  uint32_t* v;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t q_words;  // of head_dim
  int64_t columns;  // padded head_dim_v

  uint32_t* keys(int64_t block, int64_t head) const { return k + (block * num_kv_heads + head) * q_words * block_size; }
  uint32_t* values(int64_t block, int64_t head) const {
    return v + (block * num_kv_heads + head) * (block_size / Pages::kPerWord) * columns;
  }
};

template <typename T, class Pages>
void write_token(const Cache<Pages>& cache, int64_t slot, int64_t head, const T* k, int64_t head_dim, const T* v, int64_t head_dim_v,
                 const Rotation& rotation) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  uint32_t key[kMaxHeadDim];
  to_words<T, Pages>(k, head_dim, rotation, key);
  uint32_t* keys = cache.keys(block, head) + offset;
  for (int64_t word = 0; word < cache.q_words; ++word) keys[word * cache.block_size] = key[word];
  auto* values = reinterpret_cast<typename Pages::Element*>(cache.values(block, head) + offset / Pages::kPerWord * cache.columns) +
                 offset % Pages::kPerWord;
  for (int64_t d = 0; d < head_dim_v; ++d) convert(to_float(v[d]), values[d * Pages::kPerWord]);
}

// Finds runs of one request's keys for one KV head.
template <class Pages>
struct RunFinder {
  static constexpr int kWordsPerGroup = kLanes / Pages::kPerWord;
  const Cache<Pages>& cache;
  const int32_t* block_table;
  int64_t head;
  int64_t end;       // keys that exist
  uint32_t* copied;  // for a run out of blocks that aren't whole vectors: words(q and v) of kRunKeys

  Run operator()(int64_t start) const {
    Run run;
    run.start = start;
    const bool is_copied = cache.block_size % kLanes != 0;
    run.k_stride = is_copied ? kRunKeys : cache.block_size;
    for (int64_t g = 0; g < Run::kGroups; ++g) {
      const int64_t first = start + g * kLanes;
      if (first >= end) {  // none of its keys is seen
        run.k[g] = run.k[0];
        run.v[g] = run.v[0];
      } else if (is_copied) {
        uint32_t* k = copied + g * kLanes;
        uint32_t* v = copied + cache.q_words * kRunKeys + g * kWordsPerGroup * cache.columns;
        copy_group(first, k, v);
        run.k[g] = k;
        run.v[g] = v;
      } else {
        const int64_t block = block_table[first / cache.block_size], offset = first % cache.block_size;
        run.k[g] = cache.keys(block, head) + offset;
        run.v[g] = cache.values(block, head) + offset / Pages::kPerWord * cache.columns;
      }
    }
    return run;
  }

 private:
  void copy_group(int64_t first, uint32_t* k, uint32_t* v) const {
    const int64_t count = std::min<int64_t>(kLanes, words(end - first, Pages::kPerWord) * Pages::kPerWord);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = block_table[(first + i) / cache.block_size], offset = (first + i) % cache.block_size;
      const uint32_t* keys = cache.keys(block, head) + offset;
      for (int64_t word = 0; word < cache.q_words; ++word) k[word * kRunKeys + i] = keys[word * cache.block_size];
      if (i % Pages::kPerWord) continue;
      std::copy_n(cache.values(block, head) + offset / Pages::kPerWord * cache.columns, cache.columns,
                  v + i / Pages::kPerWord * cache.columns);
    }
  }
};

}  // namespace hs
