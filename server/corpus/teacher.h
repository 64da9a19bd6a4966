// The whole document, as the model sees it: one prefilled memory per window.
#ifndef STILLHOUSE_SERVER_CORPUS_TEACHER_H_
#define STILLHOUSE_SERVER_CORPUS_TEACHER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/corpus/build_runtime.h"
#include "server/corpus/document.h"
#include "server/train/conversation.h"

namespace stillhouse {

// Owned by one build, used by its thread. Windows are prefilled when first asked for, and kept.
//
// All windows end at one position: a shorter window's keys are rotated forward, so that a question stands at the same
// distance from the end of whichever window it is about, and positions stay inside the context however long the corpus.
class Teacher {
 public:
  // INVALID_ARGUMENT if the context has no room; RESOURCE_EXHAUSTED if the corpus is too long to be held while it is
  // built.
  static absl::StatusOr<std::unique_ptr<Teacher>> Create(const BuildRuntime* runtime, const Document* document,
                                                         int64_t reserve);

  const std::vector<TokenRange>& windows() const { return windows_; }
  int64_t window_count() const { return static_cast<int64_t>(windows_.size()); }
  // Of a conversation's first token, behind any window.
  int64_t next_position() const { return next_position_; }
  // Tokens of a window in its frame.
  int64_t framed_tokens(int64_t window) const {
    return windows_[static_cast<size_t>(window)].size() + document_->frame();
  }
  const Document& document() const { return *document_; }

  absl::StatusOr<std::shared_ptr<const Memory>> Window(int64_t window);
  // Seconds of device time behind the windows so far.
  double prefill_seconds() const { return prefill_seconds_; }

  // Conversations (prompt only) that ask `questions`, each behind the window that makes it most likely.
  absl::StatusOr<std::vector<Conversation>> PlaceQuestions(const std::vector<std::string>& questions);

  // Greedy answers behind each conversation's own window, with the teacher's `candidates` best of every token (0:
  // none). Conversations that have an answer are left alone; `done` (may be null) is called after each. An answer that
  // is only the end of a turn stays empty. Adds to `generated`.
  absl::Status Answer(int64_t max_tokens, int64_t candidates, const std::function<void()>& done, int64_t* generated,
                      std::vector<Conversation>* conversations);

 private:
  Teacher(const BuildRuntime* runtime, const Document* document) : runtime_(runtime), document_(document) {}

  const BuildRuntime* runtime_;
  const Document* document_;
  std::vector<TokenRange> windows_;
  std::vector<std::shared_ptr<const Memory>> memories_;
  int64_t next_position_ = 0;
  double prefill_seconds_ = 0.0;
};

// The user's turn and the generation prompt.
absl::StatusOr<std::vector<int32_t>> QuestionPrompt(const ChatTemplate& chat, std::string_view question);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_TEACHER_H_
