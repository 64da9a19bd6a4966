// One request on its way through the engine.
#ifndef STILLHOUSE_SERVER_ENGINE_SEQUENCE_H_
#define STILLHOUSE_SERVER_ENGINE_SEQUENCE_H_

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "server/engine/request.h"
#include "server/state/sequence_state.h"

namespace stillhouse {

// From Submit to OnFinish. Touched by the engine's thread only, once it left the inbox.
struct Sequence {
  uint64_t id = 0;
  GenerationRequest request;
  std::shared_ptr<GenerationSink> sink;
  int64_t pages = 0;  // committed for its whole life
  int64_t token_limit = 0;
  bool limited_by_context = false;

  std::unique_ptr<SequenceState> state;  // from its first step on
  size_t prompt_done = 0;
  int32_t last_token = -1;
  std::unordered_map<int32_t, int32_t> counts;  // generated tokens, where penalties want them
  GenerationUsage usage;
  double mass_sum = 0.0;
  int64_t mass_count = 0;
  absl::Time submitted, first_token, previous_token;
  absl::Time started = absl::InfiniteFuture();  // until it leaves the queue

  bool decoding() const { return prompt_done == request.prompt.size(); }
  bool penalised() const {
    const SampleRow& s = request.sampling;
    return s.repetition_penalty != 1.0f || s.frequency_penalty != 0.0f || s.presence_penalty != 0.0f;
  }
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_ENGINE_SEQUENCE_H_
