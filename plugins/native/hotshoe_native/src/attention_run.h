// Where a run of keys and values lies in the pages, and how memory is fetched before attention reads it.
#pragma once

#include "attention_formats.h"

#include <algorithm>

namespace hs {

// Where a run of keys lies: 16 tokens at a time.
struct Run {
  static constexpr int kGroups = kRunKeys / kLanes;
  const uint32_t* k[kGroups];  // [words of the header and head_dim][k_stride], the first 16 of each
  const uint32_t* v[kGroups];  // [words of 16][padded head_dim_v]
  int64_t k_stride;
  int64_t start;  // position of the first key
};

// Fetches memory about 7 KiB before it is read, four lines a step: the keys of a run, its values, and so on with the next run. Where
// rows are few, reading is all that takes time: fetched a whole run ahead, a third of a level 1 cache, lines would be pushed out again
// before their use, and the end of a request would leave most of the next one's first run out.
template <class Pages>
class Ahead {
 public:
  // Of the run, `key_words` words of keys are read and then words of values from `first` to `end`, each of `columns` words.
  Ahead(const Run& run, const Run& next, int64_t key_words, int64_t columns, int64_t first, int64_t end)
      : run_(&run), next_(&next), key_words_(key_words), columns_(columns), word_(first), end_word_(end) {
    if (kSteps < key_words) {
      to_keys(kSteps);
      return;
    }
    word_ += (kSteps - key_words) * kStepWords / columns;
    go_on();
  }

  HS_INLINE void step() {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) prefetch_once(lines_[i] + offset_);
    offset_ += stride_;
    if (__builtin_expect(offset_ == end_, 0)) go_on();
  }

 private:
  static constexpr int64_t kSteps = 28;
  static constexpr int64_t kWordsPerGroup = kLanes / Pages::kPerWord, kStepWords = 4 * kLanes;

  // To the next stretch of memory. Inlined, as a call would spill all sums of the loop that it is in.
  HS_INLINE void go_on() {
    if (word_ < end_word_) return to_values();
    run_ = next_;
    word_ = 0;
    end_word_ = kRunKeys / Pages::kPerWord;
    to_keys(0);
  }
  HS_INLINE void to_keys(int64_t word) {
    for (int g = 0; g < 4; ++g) lines_[g] = run_->k[g];
    stride_ = run_->k_stride;
    offset_ = word * stride_;
    end_ = key_words_ * stride_;
  }
  HS_INLINE void to_values() {
    const int64_t group = word_ / kWordsPerGroup, next_word = std::min(end_word_, (group + 1) * kWordsPerGroup);
    const uint32_t* line = run_->v[group] + word_ % kWordsPerGroup * columns_;
    for (int i = 0; i < 4; ++i) lines_[i] = line + i * kLanes;
    stride_ = kStepWords;
    offset_ = 0;
    end_ = words((next_word - word_) * columns_, kStepWords) * kStepWords;
    word_ = next_word;
  }

  const Run* run_;
  const Run* next_;
  int64_t key_words_, columns_;
  int64_t word_, end_word_;  // of the values that are to come
  const uint32_t* lines_[4];
  int64_t stride_, offset_, end_;  // in words, of a stretch
};

}  // namespace hs
