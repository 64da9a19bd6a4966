#include "kernels/cuda/attention_maps.h"

#include <algorithm>
#include <limits>

#include "kernels/cuda/tensor_map.h"

namespace stillhouse::cuda {
namespace {

constexpr int64_t kElement = 2;  // bytes

// The views of a call, each a matrix of rows `row_bytes` apart.
class Views {
 public:
  // The view that has row `at` and the `rows` − 1 after it among its rows; −1: there is none.
  int32_t Find(int64_t at, int64_t rows, int64_t row_bytes) {
    for (View& view : views_) {
      const int64_t begin = std::min(view.begin, at), end = std::max(view.end, at + rows * row_bytes);
      if (view.row_bytes != row_bytes || (at - view.begin) % row_bytes != 0) continue;
      if ((end - begin) / row_bytes > std::numeric_limits<int32_t>::max()) continue;
      view.begin = begin;
      view.end = end;
      return static_cast<int32_t>(&view - views_.data());
    }
    if (views_.size() == kAttentionMapCount) return -1;
    views_.push_back({at, at + rows * row_bytes, row_bytes});
    return static_cast<int32_t>(views_.size()) - 1;
  }

  int32_t Row(int32_t view, int64_t at) const {
    return static_cast<int32_t>((at - views_[view].begin) / views_[view].row_bytes);
  }

  AttentionMaps Maps() const {
    AttentionMaps maps = {};
    for (size_t i = 0; i < views_.size(); ++i) {
      const View& v = views_[i];
      maps.map[i] = MatrixMap(reinterpret_cast<const void*>(v.begin), (v.end - v.begin) / v.row_bytes,
                              v.row_bytes / kElement, v.row_bytes, kAttentionMapRows);
    }
    return maps;
  }

 private:
  struct View {
    int64_t begin, end, row_bytes;
  };
  std::vector<View> views_;
};

AttentionPlace PlaceOf(const AttentionRun& run, const void* at, int64_t row, int64_t head, int kv_heads, Views* views) {
  AttentionPlace place;
  if (run.slots < kAttentionMapRows || !run.vector || row < kAttentionTallWidth || head < 0) return place;
  const int64_t rows = head / row, columns = head % row;
  if (columns * (kv_heads - 1) + kAttentionTallWidth > row)
    return place;  // a head would begin in one row and end in the next
  place.map = views->Find(reinterpret_cast<int64_t>(at), rows * (kv_heads - 1) + run.slots, row * kElement);
  place.head_rows = static_cast<int32_t>(rows);
  place.head_columns = static_cast<int32_t>(columns);
  return place;
}

}  // namespace

std::vector<AttentionPlaces> PlacesOf(const std::vector<AttentionRun>& runs, int kv_heads, AttentionMaps* maps) {
  Views views;
  std::vector<AttentionPlaces> places;
  places.reserve(runs.size());
  for (const AttentionRun& run : runs) {
    places.push_back({PlaceOf(run, run.k, run.k_row, run.k_head, kv_heads, &views),
                      PlaceOf(run, run.v, run.v_row, run.v_head, kv_heads, &views)});
  }
  // Views may have grown to the front.
  for (size_t i = 0; i < runs.size(); ++i) {
    AttentionPlaces& p = places[i];
    if (p.k.map >= 0) p.k.row = views.Row(p.k.map, reinterpret_cast<int64_t>(runs[i].k));
    if (p.v.map >= 0) p.v.row = views.Row(p.v.map, reinterpret_cast<int64_t>(runs[i].v));
  }
  *maps = views.Maps();
  return places;
}

}  // namespace stillhouse::cuda
