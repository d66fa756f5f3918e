// One thread's part of paged attention over pages of one kind. Each kind has a source file of its own, as compiling one takes some seconds.
#pragma once

#include "attention_bytes.h"
#include "attention_pages.h"
#include "attention_tile.h"

#include <algorithm>

namespace hs {

constexpr int64_t kTokensAhead = 8;  // whose keys and values are fetched while others are written
constexpr float kLog2E = 1.44269504f;

inline int64_t tile_tokens(int64_t group_size) { return std::max<int64_t>(1, kTileRows / group_size); }
inline int64_t tile_rows(int64_t group_size) { return tile_tokens(group_size) * group_size; }

inline AttentionItem* items_of(AttentionPlan& plan) { return reinterpret_cast<AttentionItem*>(&plan + 1); }

inline int64_t first_position(const AttentionBatch& batch, const AttentionItem& item) {
  const int64_t num_queries = batch.query_start_loc[item.request + 1] - batch.query_start_loc[item.request];
  return batch.seq_lens[item.request] - num_queries + item.first_token;
}

// How the scratch memory is divided: partial results of all threads, then each thread's own.
struct Layout {
  int64_t rows, head_dim_v, head_words, key_words, q_words, columns;
  int64_t partial_floats, own_floats;

  template <class Pages>
  static Layout of(Pages, int64_t group_size, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v, int64_t max_partials) {
    Layout out;
    out.rows = tile_rows(group_size);
    out.head_dim_v = head_dim_v;
    out.head_words = words(head_dim, Pages::kPerWord);
    out.key_words = Pages::kHeaderWords + out.head_words;
    out.q_words = Pages::kHeaderWords + Pages::kDigits * out.head_words;
    out.columns = padded(head_dim_v);
    out.partial_floats = padded(max_partials * num_kv_heads * RowStates::floats(group_size, head_dim_v));
    const int64_t copied = kRunKeys * out.key_words + kRunKeys / Pages::kPerWord * out.columns;
    const int64_t own = 2 * RowStates::floats(out.rows, head_dim_v) + out.rows * (kLanes + out.q_words + 2) + copied;
    out.own_floats = padded(own) + kLanes;
    return out;
  }
};

// One thread's view of a call.
template <typename T, class Pages>
class Worker {
 public:
  Worker(const AttentionArgs& args, const Team& team)
      : args_(args),
        batch_(*args.batch),
        team_(team),
        plan_(*static_cast<AttentionPlan*>(args.batch->plan)),
        layout_(Layout::of(Pages{}, args.group_size, args.num_kv_heads, args.head_dim, args.head_dim_v, args.max_partials)),
        cache_{static_cast<uint32_t*>(args.pages), args.num_kv_heads, batch_.block_size, layout_.key_words, layout_.columns} {
    partials_ = static_cast<float*>(batch_.scratch);
    float* own = partials_ + layout_.partial_floats + team.thread * layout_.own_floats;
    const auto take = [&own](int64_t floats) {
      float* taken = own;
      own += floats;
      return taken;
    };
    const int64_t state_floats = RowStates::floats(layout_.rows, args.head_dim_v);
    total_ = take(state_floats);
    next_ = take(state_floats);
    lane_sums_ = take(layout_.rows * kLanes);
    positions_ = reinterpret_cast<int64_t*>(take(2 * layout_.rows));
    q_ = reinterpret_cast<uint32_t*>(take(layout_.rows * layout_.q_words));
    copied_ = reinterpret_cast<uint32_t*>(own);
  }

  void write_tokens() const {
    const Range tokens = share(batch_.num_tokens, team_);
    const int64_t* slots = batch_.slot_mapping;
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      const Rotation rotation = rotation_at(batch_.positions[token]);
      const T* k = static_cast<const T*>(args_.k) + token * args_.k_token_stride;
      if (token + kTokensAhead < tokens.end) prefetch_row(k + kTokensAhead * args_.k_token_stride, args_.num_kv_heads * args_.k_head_stride);
      for (int64_t head = 0; head < args_.num_kv_heads; ++head)
        write_key(cache_, slots[token], head, k + head * args_.k_head_stride, args_.head_dim, rotation);
    }
    for (int64_t token = tokens.begin; token < tokens.end;) {
      const T* v = static_cast<const T*>(args_.v) + token * args_.v_token_stride;
      if (token + kTokensAhead < tokens.end) prefetch_row(v + kTokensAhead * args_.v_token_stride, args_.num_kv_heads * args_.v_head_stride);
      const bool is_whole = fills_words(token, tokens.end);
      for (int64_t head = 0; head < args_.num_kv_heads; ++head, v += args_.v_head_stride) {
        if constexpr (Pages::kPerWord > 1) {
          if (is_whole) {
            write_whole_values(cache_, slots[token], head, v, args_.v_token_stride, args_.head_dim_v);
            continue;
          }
        }
        write_value(cache_, slots[token], head, v, args_.head_dim_v);
      }
      token += is_whole ? Pages::kPerWord : 1;
    }
  }

  // Whether words of values hold this token and those that follow it, and no other.
  bool fills_words(int64_t token, int64_t end) const {
    const int64_t* slots = batch_.slot_mapping + token;
    if (slots[0] % Pages::kPerWord != 0 || token + Pages::kPerWord > end) return false;
    for (int i = 1; i < Pages::kPerWord; ++i)
      if (slots[i] != slots[0] + i) return false;
    return true;
  }

  void attend() const {
    const int64_t count = plan_.num_items * args_.num_kv_heads;
    int64_t i = claim();
    while (i < count) {
      const int64_t next = claim();  // known early, so that its first keys can be fetched
      Runs<Pages> runs = runs_of(i);
      if (next < count) runs.followed_by(runs_of(next).next());
      attend_item(item_of(i), head_of(i), runs);
      i = next;
    }
  }

  void merge() const {
    const Range merges = share(plan_.num_merges * args_.num_kv_heads, team_);
    for (int64_t i = merges.begin; i < merges.end; ++i) {
      const AttentionItem& item = item_of(plan_.num_items * args_.num_kv_heads + i);
      const int64_t head = head_of(i);
      const Tile tile = tile_of(item);
      const RowStates total = partial(item, item.first_segment, head, tile.rows);
      for (int64_t segment = item.first_segment + 1; segment < item.end_segment; ++segment)
        merge_segment(tile, total, partial(item, segment, head, tile.rows));
      finish(item, head, tile, total);
    }
  }

 private:
  int64_t claim() const { return __atomic_fetch_add(&plan_.next_item, 1, __ATOMIC_RELAXED); }
  const AttentionItem& item_of(int64_t i) const { return items_of(plan_)[i / args_.num_kv_heads]; }
  int64_t head_of(int64_t i) const { return i % args_.num_kv_heads; }

  Runs<Pages> runs_of(int64_t i) const {
    const AttentionItem& item = item_of(i);
    const int64_t position = first_position(item);
    const int64_t start = first_run(item.first_segment, position, args_.window);
    const int64_t end = std::min(item.end_segment * kSegmentKeys, position + item.num_tokens);
    return {cache_, batch_.block_table + item.request * batch_.block_table_stride, head_of(i), start, end, copied_};
  }

  int64_t first_position(const AttentionItem& item) const { return hs::first_position(batch_, item); }

  Rotation rotation_at(int64_t position) const {
    const int64_t half = args_.rotary_half;
    if (half == 0) return {nullptr, nullptr, 0};
    return {args_.cos + position * half, args_.sin + position * half, half};
  }

  RowStates states(float* memory, int64_t rows) const { return RowStates::at(memory, rows); }

  RowStates partial(const AttentionItem& item, int64_t segment, int64_t head, int64_t rows) const {
    const int64_t token = item.partial + (segment - item.first_segment) * item.num_tokens;
    const int64_t per_token = RowStates::floats(args_.group_size, args_.head_dim_v);
    return states(partials_ + (token * args_.num_kv_heads + head * item.num_tokens) * per_token, rows);
  }

  // What can be told without the queries.
  Tile tile_of(const AttentionItem& item) const {
    const bool is_capped = args_.softcap != 0;
    Tile tile;
    tile.q = q_;
    tile.q_words = layout_.q_words;
    tile.head_words = layout_.head_words;
    tile.rows = item.num_tokens * args_.group_size;
    tile.positions = positions_;
    tile.window = args_.window;
    tile.head_dim_v = args_.head_dim_v;
    tile.factor = is_capped ? kLog2E : float(args_.scale) * kLog2E;
    tile.softcap = float(args_.softcap);
    tile.softcap_scale = is_capped ? float(args_.scale / args_.softcap) : 0;
    return tile;
  }

  // Rows of tokens lie too far apart for the processor to see where the next one is.
  static void prefetch_row(const T* row, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) prefetch(row + i);
  }

  // For the runs to come, queries and all.
  Tile load_tile(const AttentionItem& item, int64_t head) const {
    Tile tile = tile_of(item);
    const int64_t first_token = batch_.query_start_loc[item.request] + item.first_token, position = first_position(item);
    const T* q = static_cast<const T*>(args_.q) + first_token * args_.q_token_stride + head * args_.group_size * args_.q_head_stride;
    for (int64_t i = 0; i < item.num_tokens; ++i) prefetch_row(q + i * args_.q_token_stride, args_.group_size * args_.q_head_stride);
    uint32_t* to = q_;
    int64_t row = 0;
    for (int64_t token = 0; token < item.num_tokens; ++token) {
      const Rotation rotation = rotation_at(position + token);
      for (int64_t i = 0; i < args_.group_size; ++i, to += tile.q_words) {
        write_query<T, Pages>(q + token * args_.q_token_stride + i * args_.q_head_stride, args_.head_dim, rotation, to);
        positions_[row++] = position + token;
      }
    }
    return tile;
  }

  void attend_item(const AttentionItem& item, int64_t head, Runs<Pages>& runs) const {
    const Tile tile = load_tile(item, head);
    if (item.partial >= 0) {
      for (int64_t segment = item.first_segment; segment < item.end_segment; ++segment)
        attend_segment<Pages>(tile, segment, partial(item, segment, head, tile.rows), lane_sums_, runs);
      return;
    }
    const RowStates total = states(total_, tile.rows), next = states(next_, tile.rows);
    attend_segment<Pages>(tile, item.first_segment, total, lane_sums_, runs);
    for (int64_t segment = item.first_segment + 1; segment < item.end_segment; ++segment) {
      attend_segment<Pages>(tile, segment, next, lane_sums_, runs);
      merge_segment(tile, total, next);
    }
    finish(item, head, tile, total);
  }

  // Divides by the sums and writes the output of a tile.
  void finish(const AttentionItem& item, int64_t head, const Tile& tile, const RowStates& total) const {
    const int64_t first_token = batch_.query_start_loc[item.request] + item.first_token;
    const int64_t num_heads = args_.num_kv_heads * args_.group_size, dim = args_.head_dim_v;
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t query_head = head * args_.group_size + r % args_.group_size;
      const float scale = 1.0f / sum_with_sink(total, r, query_head);
      const float* values = total.values + r * layout_.columns;
      T* out = static_cast<T*>(args_.out) + ((first_token + r / args_.group_size) * num_heads + query_head) * dim;
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes) store(out + d, load(values + d) * set1(scale));
      if (d < dim) store_some(out + d, load(values + d) * set1(scale), int(dim - d));
    }
  }

  float sum_with_sink(const RowStates& total, int64_t row, int64_t query_head) const {
    const float sum = total.sum[row];
    if (args_.sinks == nullptr) return sum;
    // relative to the reference of the keys: what the sink exceeds it by may be anything that float32 holds
    const float above = std::min(args_.sinks[query_head] * kLog2E - total.reference[row], 120.0f);
    return sum + exp2_of(above);
  }

  const AttentionArgs& args_;
  const AttentionBatch& batch_;
  const Team& team_;
  AttentionPlan& plan_;
  Layout layout_;
  Cache<Pages> cache_;
  float* partials_;
  float* total_;
  float* next_;
  float* lane_sums_;
  int64_t* positions_;
  uint32_t* q_;
  uint32_t* copied_;
};

template <typename T, class Pages>
void attend_as(const AttentionArgs& args, const Team& team) {
  const Worker<T, Pages> worker(args, team);
  auto& plan = *static_cast<AttentionPlan*>(args.batch->plan);
  if (team.thread == 0) plan.next_item = 0;
  worker.write_tokens();
  team.barrier();
  worker.attend();
  if (plan.num_merges > 0) {
    team.barrier();
    worker.merge();
  }
}

// The op, on pages of one kind.
template <class Pages>
void attend_pages(const AttentionArgs& args, const Team& team) {
  args.dtype == kF32 ? attend_as<float, Pages>(args, team) : attend_as<bf16, Pages>(args, team);
}

extern template void attend_pages<PagesF32>(const AttentionArgs&, const Team&);
extern template void attend_pages<PagesBF16>(const AttentionArgs&, const Team&);
extern template void attend_pages<PagesI8>(const AttentionArgs&, const Team&);

}  // namespace hs
