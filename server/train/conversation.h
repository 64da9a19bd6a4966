// A question, the teacher's answer, and what the teacher thought of every token: what memories are trained and judged
// on.
#ifndef STILLHOUSE_SERVER_TRAIN_CONVERSATION_H_
#define STILLHOUSE_SERVER_TRAIN_CONVERSATION_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/train/byte_codec.h"

namespace stillhouse {

// The teacher's best candidates for consecutive tokens: [tokens, width] ids and natural-log probabilities, unused
// entries −1. Empty: none kept.
struct Candidates {
  int32_t width = 0;
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
};

struct Conversation {
  int32_t window = 0;           // the part of the document that the teacher saw
  std::vector<int32_t> prompt;  // the user's turn and the generation prompt; follows a memory
  std::vector<int32_t> answer;  // with the closing token, if the answer ended by itself
  Candidates answer_teacher;    // of answer[0], answer[1], …
  Candidates prompt_teacher;    // of prompt[1], prompt[2], …; kept only where questions are trained on

  // Rows that a forward pass needs: the last answer token predicts nothing.
  int64_t rows() const { return static_cast<int64_t>(prompt.size() + answer.size()) - 1; }
};

void AppendConversation(const Conversation& conversation, ByteWriter* out);
// DATA_LOSS for bytes that are no conversation.
absl::Status ReadConversation(ByteReader* in, Conversation* conversation);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TRAIN_CONVERSATION_H_
