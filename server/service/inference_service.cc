#include "server/service/inference_service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/metrics/metrics.h"
#include "server/service/pinned_caches.h"
#include "server/service/prompt.h"
#include "server/service/query_call.h"
#include "server/service/scorer.h"
#include "server/service/validation.h"
#include "server/tenancy/quota.h"
#include "server/tenancy/reason.h"
#include "server/token/tokenizer.h"
#include "server/token/utf8.h"
#include "stillhouse/v1/inference.grpc.pb.h"

namespace stillhouse {
namespace {

constexpr int kMaxTokenise = 1 << 20;    // bytes; a token may be one
constexpr int kMaxDetokenise = 1 << 20;  // tokens

absl::Status Score(ServiceContext* service, const grpc::CallbackServerContext& context, const Caller& caller,
                   const v1::ScoreRequest& in, v1::ScoreResponse* out) {
  const absl::Time arrived = absl::Now();
  STILLHOUSE_ASSIGN_OR_RETURN(const std::string tenant, ResolveParent(caller, in.parent()));
  if (in.logprobs() < 0 || in.logprobs() > kMaxLogprobs) {
    return BadField("logprobs", StrCat("is ", in.logprobs(), "; it must be from 0 to ", kMaxLogprobs));
  }
  if (in.continuation().empty()) return BadField("continuation", "is empty; there is nothing to score");
  ScoreRequest request;
  request.top = in.logprobs();
  request.deadline = Deadline(context);
  request.cancelled = [&context] { return context.IsCancelled(); };
  STILLHOUSE_ASSIGN_OR_RETURN(request.continuation, EncodeText(*service, "the continuation", in.continuation()));
  if (request.continuation.empty()) return BadField("continuation", "has no tokens in the model's vocabulary");
  std::vector<ChatMessage> messages;
  if (in.has_messages()) {
    STILLHOUSE_ASSIGN_OR_RETURN(messages, ParseMessages(in.messages()));
  } else if (!in.has_prompt()) {
    return BadField("input", "is missing; send messages or a prompt");
  }
  STILLHOUSE_ASSIGN_OR_RETURN(const Quota::Lease lease, service->quota->AdmitStream(tenant));
  STILLHOUSE_ASSIGN_OR_RETURN(const LiveRequests::Lease live, service->live.Add(tenant, in.request_id()));
  STILLHOUSE_RETURN_IF_ERROR(service->quota->AdmitRequest(tenant));
  request.computed = [service, &tenant](int64_t tokens) { service->quota->ChargeTokens(tenant, tokens); };
  STILLHOUSE_ASSIGN_OR_RETURN(PinnedCaches pinned, PinCaches(*service, caller, in.caches()));
  STILLHOUSE_ASSIGN_OR_RETURN(request.prompt, EncodePrompt(*service, pinned, messages, in.prompt()));
  request.memories = std::move(pinned.memories);
  STILLHOUSE_ASSIGN_OR_RETURN(const ScoreResult result, service->doors.score(request));

  double total = 0.0;
  for (const ScoredToken& token : result.tokens) {
    v1::TokenInfo* info = out->add_tokens();
    info->set_id(token.id);
    info->set_logprob(token.logprob);
    total += token.logprob;
    for (const auto& [id, logprob] : token.top) {
      v1::TopLogprob* top = info->add_top();
      top->set_id(id);
      top->set_logprob(logprob);
      top->set_piece(std::string(service->tokenizer->TokenBytes(id)));
    }
  }
  out->set_total_logprob(total);
  for (v1::CacheUse& use : pinned.uses) *out->add_caches() = std::move(use);
  for (std::string& warning : pinned.warnings) out->add_warnings(std::move(warning));
  v1::Usage* usage = out->mutable_usage();
  usage->set_prompt_tokens(static_cast<int32_t>(request.prompt.size()));
  usage->set_cached_slots(pinned.slots);
  usage->set_completion_tokens(static_cast<int32_t>(request.continuation.size()));
  usage->set_kv_bytes(result.kv_bytes);
  v1::Timings* timings = out->mutable_timings();
  timings->set_load_seconds(absl::ToDoubleSeconds(pinned.load_time));
  timings->set_queue_seconds(absl::ToDoubleSeconds(result.queue_time));
  timings->set_prefill_seconds(absl::ToDoubleSeconds(result.run_time));
  timings->set_total_seconds(absl::ToDoubleSeconds(absl::Now() - arrived));
  service->metrics->Increment(Metric::kRequests, {"scored"});
  service->metrics->Increment(Metric::kTokens, {"scored"},
                              static_cast<double>(request.prompt.size() + request.continuation.size()));
  return absl::OkStatus();
}

absl::Status Tokenize(const ServiceContext& service, const v1::TokenizeRequest& in, v1::TokenizeResponse* out) {
  const Tokenizer& tokenizer = *service.tokenizer;
  // The answer is many times the text.
  if (in.ByteSizeLong() > kMaxTokenise) {
    return BadField("input", StrCat("has ", in.ByteSizeLong(), " bytes; at most ", kMaxTokenise));
  }
  std::vector<int32_t> ids;
  switch (in.input_case()) {
    case v1::TokenizeRequest::kText:
      ids = tokenizer.Encode(in.text());
      if (in.add_bos() && tokenizer.bos()) ids.insert(ids.begin(), *tokenizer.bos());
      break;
    case v1::TokenizeRequest::kMessages: {
      STILLHOUSE_ASSIGN_OR_RETURN(const std::vector<ChatMessage> messages, ParseMessages(in.messages()));
      STILLHOUSE_ASSIGN_OR_RETURN(ids, RenderPrompt(*service.chat, messages, /*after_memory=*/false));
      break;
    }
    case v1::TokenizeRequest::INPUT_NOT_SET:
      return BadField("input", "is missing; send text or messages");
  }
  for (int32_t id : ids) {
    out->add_ids(id);
    out->add_pieces(std::string(tokenizer.TokenBytes(id)));
  }
  return absl::OkStatus();
}

absl::Status Detokenize(const ServiceContext& service, const v1::DetokenizeRequest& in, v1::DetokenizeResponse* out) {
  const Tokenizer& tokenizer = *service.tokenizer;
  if (in.ids_size() > kMaxDetokenise) {
    return BadField("ids", StrCat("has ", in.ids_size(), " entries; at most ", kMaxDetokenise));
  }
  for (int32_t id : in.ids()) {
    if (id < 0 || id >= tokenizer.vocab_size()) {
      return BadField("ids", StrCat("holds ", id, "; ids are from 0 to ", tokenizer.vocab_size() - 1));
    }
  }
  out->set_text(ToValidUtf8(
      tokenizer.Decode(absl::MakeConstSpan(in.ids().data(), static_cast<size_t>(in.ids_size())), !in.keep_special())));
  return absl::OkStatus();
}

class InferenceService final : public v1::Inference::CallbackService {
 public:
  explicit InferenceService(ServiceContext* service) : service_(service) {}

  grpc::ServerWriteReactor<v1::QueryEvent>* Query(grpc::CallbackServerContext* context,
                                                  const v1::QueryRequest* request) override {
    return QueryCall::Start(service_, context, request);
  }

  grpc::ServerUnaryReactor* Score(grpc::CallbackServerContext* context, const v1::ScoreRequest* request,
                                  v1::ScoreResponse* response) override {
    return RunTenantUnary(
        service_, context, "Score", request, response,
        [service = service_, context](const Caller& caller, const v1::ScoreRequest& in, v1::ScoreResponse* out) {
          return stillhouse::Score(service, *context, caller, in, out);
        });
  }

  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context, const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override {
    return RunTenantUnary(service_, context, "Tokenize", request, response,
                          [service = service_](const Caller&, const auto& in, v1::TokenizeResponse* out) {
                            return stillhouse::Tokenize(*service, in, out);
                          });
  }

  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context, const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override {
    return RunTenantUnary(service_, context, "Detokenize", request, response,
                          [service = service_](const Caller&, const auto& in, v1::DetokenizeResponse* out) {
                            return stillhouse::Detokenize(*service, in, out);
                          });
  }

 private:
  ServiceContext* service_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeInferenceService(ServiceContext* service) {
  return std::make_unique<InferenceService>(service);
}

}  // namespace stillhouse
