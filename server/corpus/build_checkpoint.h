// Everything that a build has made so far, as bytes: what a restarted server goes on from.
#ifndef STILLHOUSE_SERVER_CORPUS_BUILD_CHECKPOINT_H_
#define STILLHOUSE_SERVER_CORPUS_BUILD_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/corpus/evaluator.h"
#include "server/corpus/self_study.h"
#include "server/corpus/start_memory.h"

namespace stillhouse {

// A memory on the host, between runs.
struct MemoryBytes {
  bool present = false;
  int64_t slots = 0, next_position = 0;
  std::string label;
  bool has_beta = false;
  std::vector<std::vector<float>> k, v, beta;   // per layer
  std::vector<std::vector<int32_t>> positions;  // per layer, or empty

  static MemoryBytes From(const Context& ctx, const StartMemory& memory);
  // DATA_LOSS if it is not of this model's shape.
  absl::StatusOr<StartMemory> ToMemory(const Context& ctx, const ModelConfig& config) const;
  void AppendTo(ByteWriter* out) const;
  absl::Status ReadFrom(ByteReader* in);
};

struct BuildCheckpoint {
  std::string corpus_sha256;  // of the bytes that it was made from
  double elapsed_seconds = 0.0;
  double prefill_seconds = 0.0;  // of the whole document
  int64_t generated_tokens = 0;  // by the evaluation; self-study counts its own
  SelfStudyState study;
  MemoryBytes start;
  std::string trainer;                 // empty: training has not begun
  MemoryBytes finished;                // trained, or matched: what will be stored
  QualityReport report;                // of `finished`
  std::vector<Conversation> uploaded;  // the caller's questions with their answers
  bool uploaded_ready = false;
  bool judged = false;
  int64_t create_unix_micros = 0;  // set together with `judged`: the file's bytes are decided

  std::string ToBytes() const;
  static absl::StatusOr<BuildCheckpoint> FromBytes(std::string_view bytes);
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_BUILD_CHECKPOINT_H_
