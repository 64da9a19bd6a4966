// Attention matching: a training-free compaction of a document's keys and values (MATH of the method in
// attention_matching.cc), and the best start for training.
#ifndef STILLHOUSE_SERVER_COMPACT_ATTENTION_MATCHING_H_
#define STILLHOUSE_SERVER_COMPACT_ATTENTION_MATCHING_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/forward.h"

namespace stillhouse {

struct AttentionMatchingOptions {
  double ridge = 1e-3;  // of the value fit, as a share of the mean diagonal
  bool fit_beta = true;
  bool fit_values = true;
  bool measure = false;    // fill MatchErrors (costs some more products)
  int64_t tile_bytes = 0;  // of logits that are made at a time; 0: as the device likes it
};

// One view of the document (a whole document that fits the context is one part) with the queries that were asked of it.
struct MatchPart {
  Tensor k, v;        // [H_kv, T, d]: keys rotated, at positions such that all parts' queries share one position
  Tensor queries;     // [n, H, d] rotated, of this part only; n may be 0
  int64_t slots = 0;  // to choose from this part
  int64_t first_candidate = 0;  // tokens before it are never chosen (the header, in all parts but the first)
  bool keep_first = false;      // the first candidate is always chosen: the attention sink
};

// On the reference queries, means over KV heads. Output errors are ‖o' − o‖²/‖o‖² summed over queries; mass errors are
// the mean of (Σ w a − 1)².
struct MatchErrors {
  double selection = 0.0, biases = 0.0, values = 0.0;  // output error after each step
  double selection_mass = 0.0, biases_mass = 0.0;
};

struct LayerMatch {
  LayerKv kv;                   // slots in the order of parts, temporal within a part
  std::vector<int32_t> tokens;  // [H_kv, slots]: which token of its part a slot is
  MatchErrors errors;
};

// Compacts one layer. Heavy products run on the context's backend, where a tile of [tile, T] and, of the heads that are
// worked on together, [queries, slots] live at once; the systems of [slots, slots] are solved by the host's threads.
// INVALID_ARGUMENT if a part has fewer candidates than slots or there are no queries at all.
absl::StatusOr<LayerMatch> MatchLayer(const Context& ctx, const std::vector<MatchPart>& parts, float scale,
                                      const AttentionMatchingOptions& options);

// Collects rows of each layer's rotated queries during forward passes: give Observer(rows) to ForwardOptions.
class QueryCollector {
 public:
  explicit QueryCollector(int64_t layers) : layers_(static_cast<size_t>(layers)) {}

  // `rows` (ascending, of the next pass) are kept. The context must be the pass's.
  std::function<void(int64_t, const Tensor&)> Observer(const Context& ctx, std::vector<int32_t> rows);
  // All rows so far, [n, H, d]; undefined before the first.
  Tensor Layer(const Context& ctx, int64_t layer) const;
  int64_t count() const { return count_; }
  void Clear();

 private:
  std::vector<std::vector<Tensor>> layers_;
  int64_t count_ = 0;
};

// Splits `total` slots over parts by length, each at least one where that is possible, none above its capacity.
std::vector<int64_t> AllotSlots(int64_t total, const std::vector<int64_t>& lengths,
                                const std::vector<int64_t>& capacities);

// K of one layer moved to other positions: rotated back at `from` and forward at `to` (one per token, all heads).
Tensor RotateKeys(const Context& ctx, const RopeConfig& rope, const Tensor& k, const std::vector<int32_t>& from,
                  const std::vector<int32_t>& to);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_COMPACT_ATTENTION_MATCHING_H_
