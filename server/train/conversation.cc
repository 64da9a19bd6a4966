#include "server/train/conversation.h"

#include "kernels/base/status.h"

namespace stillhouse {
namespace {

void AppendCandidates(const Candidates& candidates, ByteWriter* out) {
  out->Int(candidates.width);
  out->Array(candidates.ids);
  out->Array(candidates.logprobs);
}

absl::Status ReadCandidates(ByteReader* in, size_t tokens, Candidates* candidates) {
  int64_t width = 0;
  STILLHOUSE_RETURN_IF_ERROR(in->Int(&width));
  STILLHOUSE_RETURN_IF_ERROR(in->Array(&candidates->ids));
  STILLHOUSE_RETURN_IF_ERROR(in->Array(&candidates->logprobs));
  if (width < 0 || width > 1024 || candidates->ids.size() != candidates->logprobs.size() ||
      (width > 0 && candidates->ids.size() != static_cast<size_t>(width) * tokens) ||
      (width == 0 && !candidates->ids.empty())) {
    return absl::DataLossError("a conversation's candidates do not fit its tokens");
  }
  candidates->width = static_cast<int32_t>(width);
  return absl::OkStatus();
}

}  // namespace

void AppendConversation(const Conversation& conversation, ByteWriter* out) {
  out->Int(conversation.window);
  out->Array(conversation.prompt);
  out->Array(conversation.answer);
  AppendCandidates(conversation.answer_teacher, out);
  AppendCandidates(conversation.prompt_teacher, out);
}

absl::Status ReadConversation(ByteReader* in, Conversation* conversation) {
  int64_t window = 0;
  STILLHOUSE_RETURN_IF_ERROR(in->Int(&window));
  conversation->window = static_cast<int32_t>(window);
  STILLHOUSE_RETURN_IF_ERROR(in->Array(&conversation->prompt));
  STILLHOUSE_RETURN_IF_ERROR(in->Array(&conversation->answer));
  if (conversation->prompt.empty() || conversation->answer.empty()) {
    return absl::DataLossError("a conversation without a question or an answer");
  }
  STILLHOUSE_RETURN_IF_ERROR(ReadCandidates(in, conversation->answer.size(), &conversation->answer_teacher));
  return ReadCandidates(in, conversation->prompt.size() - 1, &conversation->prompt_teacher);
}

}  // namespace stillhouse
