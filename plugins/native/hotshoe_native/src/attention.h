// Paged attention: what its ops take, and how its pages look.
//
// A page holds block_size tokens of one KV head of one layer; the pages of a block's heads lie together. Its unit is a word of 32 bits: one
// float32, or two bf16 that one instruction multiplies together. Keys come first, as [words of head_dim][block_size], so that a vector
// holds a word of 16 tokens; then values as [words of block_size][head_dim_v, padded to whole vectors], so that a vector holds 16
// dimensions of a word of tokens. One piece of memory, as reading shorter ones costs a third of the bandwidth. A word may also be four
// bytes; then two more words of float32 stand before those of head_dim, the scales of the token's key and of its value.
#pragma once

#include <cstdint>

#include "op.h"

namespace hs {

// Rows of attention are computed over runs of so many keys that start at multiples of it, one run after another in float32, and runs
// are gathered into segments, whose results are merged in order. Both are places in the sequence, so a row's additions are the same
// whoever computes it, with whatever other rows.
constexpr int64_t kRunKeys = 64;
constexpr int64_t kSegmentKeys = 512;
constexpr int64_t kTileRows = 96;  // of a tile, if one token's heads aren't more

// What the layers of a step have in common.
struct AttentionBatch {
  const int32_t* query_start_loc;  // [num_reqs + 1]: rows of q and out; not every token has to be a query
  const int32_t* seq_lens;         // [num_reqs]
  const int32_t* block_table;      // [num_reqs, at least ceil(seq_len / block_size)]
  const int64_t* slot_mapping;     // [num_tokens]
  const int64_t* positions;        // [num_tokens]
  void* plan;                      // AttentionPlan
  void* scratch;                   // attention_scratch_bytes, 64-byte aligned, shared by all layers
  int64_t block_table_stride;
  int64_t num_reqs;
  int64_t num_tokens;
  int64_t block_size;  // whole words
};

// A tile of a request's query tokens against a range of segments. Each counts once per KV head.
struct AttentionItem {
  int64_t request;
  int64_t first_token;  // within the request's query tokens
  int64_t num_tokens;
  int64_t first_segment, end_segment;
  int64_t partial;  // where the results of its segments go, in tokens; -1: its segments are all there are
};

// Filled by the op `attention_plan`, once a step.
struct AttentionPlan {
  int64_t num_items;
  int64_t num_merges;    // tiles of several items; they stand behind the items, with all segments and the first partial
  int64_t num_partials;  // tokens whose segments have results of their own, counted once a segment
  int64_t next_item;     // counts while an op runs
};

struct AttentionPlanArgs {
  const AttentionBatch* batch;
  int64_t group_size;  // query heads per KV head
  int64_t num_kv_heads;
  int64_t window;  // 0: none
  int64_t max_items;
  int64_t max_partials;
  int64_t items_per_thread;  // to aim at, if there are enough segments
};

struct AttentionArgs {
  const AttentionBatch* batch;
  const void* q;  // [num_queries, num_kv_heads * group_size, head_dim]
  const void* k;  // [num_tokens, num_kv_heads, head_dim]
  const void* v;  // [num_tokens, num_kv_heads, head_dim_v]
  void* out;      // [num_queries, num_kv_heads * group_size, head_dim_v], contiguous
  void* pages;    // [num_blocks, num_kv_heads, page]
  const float* cos;  // [max_positions, rotary_half]
  const float* sin;
  const float* sinks;  // [num_kv_heads * group_size], or null
  int64_t q_token_stride, q_head_stride;
  int64_t k_token_stride, k_head_stride;
  int64_t v_token_stride, v_head_stride;
  int64_t group_size;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t head_dim_v;
  int64_t window;       // 0: none
  int64_t rotary_half;  // 0: q and k are not rotated
  int64_t dtype;        // of q, k, v and out
  int64_t kv_dtype;     // of the pages
  int64_t max_partials;
  double scale;    // positive
  double softcap;  // 0: none
};

}  // namespace hs
