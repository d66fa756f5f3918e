// Rows of q, k and v on their way into bytes. What becomes of a row depends on the row alone.
#pragma once

#include "attention_pages.h"

#include <cmath>
#include <limits>

namespace hs {

// The steps that a row is rounded to.
struct Steps {
  float size;      // NaN if not all of the row is finite, which integers can't tell
  float per_unit;  // what values are multiplied with; 0 if nothing is to come of them

  HS_INLINE i32x16 count(f32x16 values) const { return per_unit == 0 ? set1(0) : to_i32(values * set1(per_unit)); }
};

// Calls body(d, values) for the vectors of a row; lanes past its end are 0.
template <typename T, typename Body>
HS_INLINE void each_vector(const T* row, int64_t count, Body&& body) {
  int64_t d = 0;
  for (; d + kLanes <= count; d += kLanes) body(d, load(row + d));
  if (d < count) body(d, load_some(row + d, int(count - d)));
}

// The largest magnitude becomes `most` steps.
template <typename T>
HS_INLINE Steps steps_of(const T* row, int64_t count, float most) {
  i32x16 bits = set1(0);  // those of magnitudes have their order, with NaN above infinity
  each_vector(row, count, [&](int64_t, f32x16 values) { bits = max(bits, as_i32(abs(values))); });
  const int32_t largest_bits = largest(bits);
  float magnitude;
  std::memcpy(&magnitude, &largest_bits, 4);
  if (!std::isfinite(magnitude)) return {std::numeric_limits<float>::quiet_NaN(), 0};
  if (magnitude < kLeastTold) return {0, 0};
  return {magnitude / most, most / magnitude};
}

HS_INLINE uint32_t word_of(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return word;
}

// A query's header and its digits. Keys have 128 added, which the sums start with the opposite of: -128 times the sum of the query,
// divided by 128 because sums of upper digits are multiplied with it before lower ones are added.
template <typename T, class Pages>
HS_INLINE std::enable_if_t<Pages::kDigits == 2> write_query(const T* q, int64_t head_dim, const Rotation& rotation, uint32_t* out) {
  T rotated[kMaxHeadDim];
  rotate_whole(q, head_dim, rotation, rotated);
  const Steps steps = steps_of(rotated, head_dim, PagesI8::kMostOfQuery);
  alignas(64) uint8_t digits[2][kMaxHeadDim];
  i32x16 total = set1(0);
  each_vector(rotated, head_dim, [&](int64_t d, f32x16 values) {
    const i32x16 whole = steps.count(values);
    const i32x16 upper = shift_right(whole + set1(64), 7);
    store_bytes(digits[0] + d, upper);
    store_bytes(digits[1] + d, whole - shift_left(upper, 7));
    total = total + whole;
  });
  const int64_t head_words = words(head_dim, PagesI8::kPerWord);
  out[0] = uint32_t(-sum(total));
  out[1] = word_of(steps.size);
  for (int digit = 0; digit < 2; ++digit) std::memcpy(out + PagesI8::kHeaderWords + digit * head_words, digits[digit], 4 * head_words);
}

template <typename T>
void write_key(const Cache<PagesI8>& cache, int64_t slot, int64_t head, const T* k, int64_t head_dim, const Rotation& rotation) {
  T rotated[kMaxHeadDim];
  rotate_whole(k, head_dim, rotation, rotated);
  const Steps steps = steps_of(rotated, head_dim, PagesI8::kMostOfPage);
  alignas(64) uint8_t bytes[kMaxHeadDim];
  each_vector(rotated, head_dim, [&](int64_t d, f32x16 values) {
    store_bytes(bytes + d, steps.count(values) + set1(128));
  });
  uint32_t* keys = cache.keys(slot / cache.block_size, head) + slot % cache.block_size;
  keys[PagesI8::kKeyScale * cache.block_size] = word_of(steps.size);
  for (int64_t word = 0; word < cache.key_words - PagesI8::kHeaderWords; ++word)
    std::memcpy(keys + (PagesI8::kHeaderWords + word) * cache.block_size, bytes + 4 * word, 4);
}

// After the key: a value that isn't finite makes the key's scale NaN, since weights are integers and can't pass it on.
inline void write_value_scale(const Cache<PagesI8>& cache, int64_t slot, int64_t head, float scale) {
  uint32_t* keys = cache.keys(slot / cache.block_size, head) + slot % cache.block_size;
  keys[PagesI8::kValueScale * cache.block_size] = word_of(scale);
  if (std::isnan(scale)) keys[PagesI8::kKeyScale * cache.block_size] = word_of(scale);
}

template <typename T>
void write_value(const Cache<PagesI8>& cache, int64_t slot, int64_t head, const T* v, int64_t head_dim_v) {
  const Steps steps = steps_of(v, head_dim_v, PagesI8::kMostOfPage);
  write_value_scale(cache, slot, head, steps.size);
  auto* to = reinterpret_cast<uint8_t*>(value_words(cache, slot, head)) + slot % 4;
  each_vector(v, head_dim_v, [&](int64_t d, f32x16 values) {
    uint8_t bytes[kLanes];
    store_bytes(bytes, steps.count(values));
    const int count = int(std::min<int64_t>(kLanes, head_dim_v - d));
    for (int i = 0; i < count; ++i) to[4 * (d + i)] = bytes[i];
  });
}

template <typename T>
void write_whole_values(const Cache<PagesI8>& cache, int64_t slot, int64_t head, const T* v, int64_t stride, int64_t head_dim_v) {
  Steps steps[4];
  for (int i = 0; i < 4; ++i) {
    steps[i] = steps_of(v + i * stride, head_dim_v, PagesI8::kMostOfPage);
    write_value_scale(cache, slot + i, head, steps[i].size);
  }
  uint32_t* to = value_words(cache, slot, head);
  for (int64_t d = 0; d < head_dim_v; d += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, head_dim_v - d));
    i32x16 words = set1(0);
    for (int i = 0; i < 4; ++i) {
      const T* from = v + i * stride + d;
      const i32x16 bytes = steps[i].count(count == kLanes ? load(from) : load_some(from, count));
      words = words | shift_left(bytes & set1(255), 8 * i);
    }
    store_i32(to + d, words);
  }
}

}  // namespace hs
