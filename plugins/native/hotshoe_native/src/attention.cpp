// Paged attention: writes a step's keys and values into the pages, then attends causally, tile by tile.
#include "attention_worker.h"

namespace hs {
namespace {

struct Planner {
  const AttentionPlanArgs& args;
  AttentionPlan& plan;
  AttentionItem* items;

  int64_t first_position(const AttentionItem& item) const { return hs::first_position(*args.batch, item); }
  // Keys to read times tokens to compute; reading counts as much as two more tokens.
  int64_t cost(const AttentionItem& item) const {
    const int64_t end = std::min(first_position(item) + item.num_tokens, item.end_segment * kSegmentKeys);
    return (end - item.first_segment * kSegmentKeys) * (item.num_tokens + 2);
  }

  void add_tiles(int64_t request) {
    const AttentionBatch& batch = *args.batch;
    const int64_t num_queries = batch.query_start_loc[request + 1] - batch.query_start_loc[request];
    const int64_t step = tile_tokens(args.group_size);
    for (int64_t first = 0; first < num_queries; first += step) {
      AttentionItem item{request, first, std::min(step, num_queries - first), 0, 0, -1};
      const int64_t position = first_position(item);
      item.first_segment = args.window ? std::max<int64_t>(position - args.window + 1, 0) / kSegmentKeys : 0;
      item.end_segment = (position + item.num_tokens - 1) / kSegmentKeys + 1;
      items[plan.num_items++] = item;
    }
  }

  // Cut tiles that would keep one thread busy while others have nothing left. A tile's results are the same, cut or not.
  void cut_tiles(int64_t num_threads) {
    const int64_t num_tiles = plan.num_items;
    int64_t total = 0;
    for (int64_t i = 0; i < num_tiles; ++i) total += cost(items[i]);
    const int64_t most = total * args.num_kv_heads / (num_threads * args.items_per_thread) + 1;
    AttentionItem* merges = items + args.max_items;  // filled from behind
    for (int64_t i = 0; i < num_tiles; ++i) {
      AttentionItem tile = items[i];
      const int64_t num_segments = tile.end_segment - tile.first_segment;
      const int64_t num_parts = std::min(num_segments, (cost(tile) + most - 1) / most);
      const int64_t num_partials = tile.num_tokens * num_segments;
      if (num_parts == 1 || plan.num_partials + num_partials > args.max_partials ||
          plan.num_items + num_parts + plan.num_merges > args.max_items)
        continue;
      tile.partial = plan.num_partials;
      plan.num_partials += num_partials;
      *--merges = tile;
      ++plan.num_merges;
      for (int64_t part = 0; part < num_parts; ++part) {
        AttentionItem item = tile;
        item.first_segment = tile.first_segment + num_segments * part / num_parts;
        item.end_segment = tile.first_segment + num_segments * (part + 1) / num_parts;
        item.partial += tile.num_tokens * (item.first_segment - tile.first_segment);
        items[part == 0 ? i : plan.num_items++] = item;
      }
    }
    std::move(merges, items + args.max_items, items + plan.num_items);
  }

  void sort() {
    std::stable_sort(items, items + plan.num_items,
                     [this](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
  }
};

void make_plan(const AttentionPlanArgs& args, const Team& team) {
  if (team.thread != 0) return;
  auto& plan = *static_cast<AttentionPlan*>(args.batch->plan);
  plan = {};
  Planner planner{args, plan, items_of(plan)};
  for (int64_t request = 0; request < args.batch->num_reqs; ++request) planner.add_tiles(request);
  if (team.num_threads > 1) planner.cut_tiles(team.num_threads);
  planner.sort();
}

void attend(const AttentionArgs& args, const Team& team) {
  with_pages(args.kv_dtype, [&](auto pages) {
    attend_pages<decltype(pages)>(args, team);
  });
}

}  // namespace

HS_DEFINE_OP(attention_plan, AttentionPlanArgs, make_plan)
HS_DEFINE_OP(attention, AttentionArgs, attend)

}  // namespace hs

// Size of AttentionBatch::scratch, in bytes.
HS_EXPORT int64_t hs_attention_scratch_bytes(int64_t group_size, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v,
                                             int64_t kv_dtype, int64_t max_partials, int64_t num_threads) {
  return hs::with_pages(kv_dtype, [&](auto pages) {
    const auto layout = hs::Layout::of(pages, group_size, num_kv_heads, head_dim, head_dim_v, max_partials);
    return 4 * (layout.partial_floats + num_threads * layout.own_floats);
  });
}
