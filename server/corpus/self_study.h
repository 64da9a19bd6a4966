// Self-study: the model writes questions about chunks of a document, and answers them with the whole document in view
// (Cartridges; Eyuboglu et al. 2025).
#ifndef STILLHOUSE_SERVER_CORPUS_SELF_STUDY_H_
#define STILLHOUSE_SERVER_CORPUS_SELF_STUDY_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/corpus/build_spec.h"
#include "server/corpus/teacher.h"

namespace stillhouse {

// What self-study has made so far: a part of the build's checkpoint.
struct SelfStudyState {
  // A's messages by job, as they were generated; no value: not run yet. Kept until there are enough questions.
  std::vector<std::optional<std::string>> drafts;
  bool questions_done = false;
  std::vector<Conversation> generated;  // in the order of their jobs
  std::vector<Conversation> given;      // the caller's own questions
  bool answers_done = false;
  int64_t generated_tokens = 0;

  void AppendTo(ByteWriter* out) const;
  absl::Status ReadFrom(ByteReader* in);
};

// Runs what is left of it. `tick(fraction)` after every finished piece: progress, and the chance to save the state.
// Deterministic in `seed`, up to rounding differences between batches of different sizes.
absl::Status RunSelfStudy(const BuildRuntime& runtime, const SelfStudySpec& spec, bool teach_questions, uint64_t seed,
                          Teacher* teacher, const std::function<absl::Status(double)>& tick, SelfStudyState* state);

// A message of A as a question: cut at its end, trimmed, or no value if it is too short or long, or says nothing.
std::optional<std::string> CleanQuestion(std::string_view draft);
// Lower-case letters and digits alone: equal for questions that differ in nothing that matters.
std::string QuestionKey(std::string_view question);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_SELF_STUDY_H_
