#include "server/service/query_call.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/metrics/metrics.h"
#include "server/service/pinned_caches.h"
#include "server/service/prompt.h"
#include "server/tenancy/reason.h"

namespace stillhouse {
namespace {

// How the metrics call the end of a query.
std::string_view EndLabel(const absl::Status& status, FinishReason reason, bool stopped) {
  if (status.ok()) {
    if (stopped) return "stop_string";
    switch (reason) {
      case FinishReason::kStopId:
        return "end_of_turn";
      case FinishReason::kMaxTokens:
        return "max_tokens";
      default:
        return "context_full";
    }
  }
  switch (status.code()) {
    case absl::StatusCode::kCancelled:
      return "cancelled";
    case absl::StatusCode::kDeadlineExceeded:
      return "deadline";
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kDataLoss:
      return "error";
    default:
      return "rejected";
  }
}

std::string_view RejectionLabel(const absl::Status& status, const std::string& reason) {
  if (reason == "PROMPT_TOO_LONG") return "too_long";
  if (reason == "REQUEST_IN_FLIGHT") return "duplicate";
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      return "queue_full";
    case absl::StatusCode::kResourceExhausted:
      return "no_memory";
    case absl::StatusCode::kNotFound:
      return "not_found";
    default:
      return "invalid";
  }
}

double Seconds(absl::Duration duration) { return absl::ToDoubleSeconds(duration); }

}  // namespace

grpc::ServerWriteReactor<v1::QueryEvent>* QueryCall::Start(ServiceContext* service,
                                                           grpc::CallbackServerContext* context,
                                                           const v1::QueryRequest* request) {
  auto call = std::make_shared<QueryCall>(service, context, request);
  {
    absl::MutexLock lock(&call->mutex_);
    call->self_ = call;
  }
  service->work.Post([call] { call->Prepare(); });
  return call.get();
}

QueryCall::QueryCall(ServiceContext* service, grpc::CallbackServerContext* context, const v1::QueryRequest* request)
    : service_(service), context_(context), request_(request), counter_(service, "Query"), arrived_(absl::Now()) {}

void QueryCall::OnDone() {
  std::shared_ptr<QueryCall> self;  // dropped after the lock
  absl::MutexLock lock(&mutex_);
  self = std::move(self_);
}

void QueryCall::Prepare() {
  const absl::Status status = Admit();
  if (status.ok()) return;
  grpc::Status end;
  {
    absl::MutexLock lock(&mutex_);
    // Refusals of keys, and those of a server that stops, were counted where they were made; those of a quota are by
    // the call's counter.
    const std::string reason = ReasonOf(status);
    const bool ended_by_caller = absl::IsCancelled(status) || absl::IsDeadlineExceeded(status);
    if (!absl::IsUnauthenticated(status) && reason != "DRAINING" && !IsQuotaReason(reason) && !ended_by_caller) {
      service_->metrics->Increment(Metric::kAdmissionRejections, {RejectionLabel(status, reason)});
    }
    closed_ = true;
    end = Close(status);
  }
  Finish(end);
}

absl::Status QueryCall::Admit() {
  STILLHOUSE_ASSIGN_OR_RETURN(const Caller caller, Authenticate(*service_, *context_));
  STILLHOUSE_RETURN_IF_ERROR(CheckTenantKey(caller));
  STILLHOUSE_ASSIGN_OR_RETURN(tenant_, ResolveParent(caller, request_->parent()));
  STILLHOUSE_ASSIGN_OR_RETURN(settings_, ParseSampling(request_->sampling(), service_->tokenizer->vocab_size()));
  std::vector<ChatMessage> messages;
  switch (request_->input_case()) {
    case v1::QueryRequest::kMessages: {
      STILLHOUSE_ASSIGN_OR_RETURN(messages, ParseMessages(request_->messages()));
      break;
    }
    case v1::QueryRequest::kPrompt:
      break;
    case v1::QueryRequest::INPUT_NOT_SET:
      return BadField("input", "is missing; send messages or a prompt");
  }
  StreamDecoder::Options decoding;
  decoding.stop = settings_.stop;
  STILLHOUSE_ASSIGN_OR_RETURN(StreamDecoder decoder, StreamDecoder::Create(service_->tokenizer, std::move(decoding)));
  STILLHOUSE_ASSIGN_OR_RETURN(Quota::Lease lease, service_->quota->AdmitStream(tenant_));
  STILLHOUSE_ASSIGN_OR_RETURN(LiveRequests::Lease live, service_->live.Add(tenant_, request_->request_id()));
  STILLHOUSE_RETURN_IF_ERROR(service_->quota->AdmitRequest(tenant_));

  STILLHOUSE_ASSIGN_OR_RETURN(PinnedCaches pinned, PinCaches(*service_, caller, request_->caches()));
  load_time_ = pinned.load_time;
  slots_ = pinned.slots;
  GenerationRequest generation;
  STILLHOUSE_ASSIGN_OR_RETURN(generation.prompt, EncodePrompt(*service_, pinned, messages, request_->prompt()));
  // The last token drawn needs no position.
  const int64_t room = RoomAfter(*service_, pinned) - static_cast<int64_t>(generation.prompt.size()) + 1;
  generation.id = live.id();
  generation.tenant = tenant_;
  generation.memories = std::move(pinned.memories);
  generation.sampling = settings_.row;
  generation.max_tokens = settings_.max_tokens;
  generation.stop_ids = service_->tokenizer->end_of_generation();
  generation.ignore_stop_ids = settings_.ignore_eos;
  generation.deadline = Deadline(*context_);
  if (!settings_.ignore_eos) stop_ids_ = generation.stop_ids;

  v1::Accepted accepted;
  accepted.set_request_id(live.id());
  accepted.set_model(service_->facts.model.name);
  for (v1::CacheUse& use : pinned.uses) *accepted.add_caches() = std::move(use);
  for (std::string& warning : pinned.warnings) accepted.add_warnings(std::move(warning));
  accepted.set_prompt_tokens(static_cast<int32_t>(generation.prompt.size()));
  accepted.set_seed(settings_.row.seed);
  accepted.set_max_tokens(static_cast<int32_t>(std::min(settings_.max_tokens, room)));
  {
    absl::MutexLock lock(&mutex_);
    if (cancelled_) return CancelledStatus(*context_);
    decoder_ = std::move(decoder);
    lease_ = std::move(lease);
    live_ = std::move(live);
    accepted_ = std::move(accepted);
  }
  return Submit(std::move(generation));
}

absl::Status QueryCall::Submit(GenerationRequest request) {
  absl::StatusOr<GenerationHandle> handle = service_->doors.submit(std::move(request), shared_from_this());
  if (!handle.ok()) {
    if (absl::IsOutOfRange(handle.status())) return WithReason(handle.status(), "PROMPT_TOO_LONG");
    if (absl::IsUnavailable(handle.status())) {
      return WithRetryAfter(WithReason(handle.status(), service_->draining.load() ? "DRAINING" : "QUEUE_FULL"),
                            absl::Seconds(1));
    }
    return handle.status();
  }
  bool cancelled;
  {
    absl::MutexLock lock(&mutex_);
    handle_ = *handle;
    open_ = true;
    cancelled = cancelled_;
    SchedulePump();
  }
  if (cancelled) service_->doors.cancel(*handle);
  return absl::OkStatus();
}

bool QueryCall::OnToken(const SampledToken& token) {
  absl::MutexLock lock(&mutex_);
  if (cancelled_ || too_slow_) return false;
  if (!first_token_) {
    first_token_ = absl::Now();
    service_->metrics->Observe(Metric::kTimeToFirstToken, Seconds(*first_token_ - arrived_));
  }
  // The end token is reported, and says nothing.
  const bool end = std::find(stop_ids_.begin(), stop_ids_.end(), token.id) != stop_ids_.end();
  const size_t before = text_.size();
  if (!end) text_ += decoder_->Push(token.id);
  tokens_.push_back(token);
  pending_bytes_ += text_.size() - before + sizeof(SampledToken) + token.top.size() * 16;
  if (pending_bytes_ > kMaxPendingBytes) {
    too_slow_ = true;
    return false;
  }
  SchedulePump();
  return !decoder_->stopped();
}

void QueryCall::OnFinish(FinishReason reason, const GenerationUsage& usage, const absl::Status& status) {
  // Not when the client has read its answer: whoever reads slowly owes as much.
  service_->quota->ChargeTokens(tenant_, usage.prompt_tokens + usage.completion_tokens);
  absl::MutexLock lock(&mutex_);
  ended_ = true;
  reason_ = reason;
  usage_ = usage;
  status_ = status;
  // The sequence is gone, so the id may live again; the last events may still be on their way.
  live_ = LiveRequests::Lease();
  if (status_.ok()) text_ += decoder_->Finish();
  SchedulePump();
}

void QueryCall::SchedulePump() {
  if (!open_ || pumping_ || writing_ || closed_) return;
  pumping_ = true;
  service_->events.Post([call = shared_from_this()] {
    {
      absl::MutexLock lock(&call->mutex_);
      call->pumping_ = false;
    }
    call->Pump();
  });
}

void QueryCall::Pump() {
  std::optional<grpc::Status> last;
  {
    absl::MutexLock lock(&mutex_);
    if (!open_ || writing_ || closed_) return;
    // Nothing is written for a client that is gone, and nothing ends before the engine let go.
    const bool silent = cancelled_ || too_slow_;
    if (!silent && accepted_) {
      event_.Clear();
      *event_.mutable_accepted() = *std::move(accepted_);
      accepted_.reset();
    } else if (!silent && (!tokens_.empty() || !text_.empty())) {
      event_.Clear();
      FillTokens(event_.mutable_token());
    } else if (ended_) {
      closed_ = true;
      absl::Status status = status_;
      if (too_slow_) {
        status =
            WithReason(absl::ResourceExhaustedError("the answer was not read fast enough; read the stream as it comes"),
                       "CLIENT_TOO_SLOW");
      } else if (cancelled_) {
        status = CancelledStatus(*context_);
      }
      event_.Clear();
      if (status.ok()) FillFinish(event_.mutable_finish());
      last = Close(status);
    } else {
      return;
    }
    writing_ = true;
  }
  if (!last) {
    StartWrite(&event_);
  } else if (last->ok()) {
    StartWriteAndFinish(&event_, grpc::WriteOptions(), *last);
  } else {
    Finish(*last);
  }
}

void QueryCall::OnWriteDone(bool ok) {
  bool gone = false;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (closed_) return;
    if (!ok && !cancelled_) {
      cancelled_ = true;
      gone = true;
    }
  }
  if (gone) StopEngine();
  Pump();
}

void QueryCall::OnCancel() {
  {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
  }
  StopEngine();
}

void QueryCall::StopEngine() {
  std::optional<GenerationHandle> handle;
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_) handle = handle_;
  }
  // Without a handle the request was not submitted yet, and Submit looks at cancelled_ afterwards.
  if (handle) service_->doors.cancel(*handle);
}

void QueryCall::FillTokens(v1::Token* out) {
  out->set_text(std::exchange(text_, std::string()));
  for (const SampledToken& token : tokens_) {
    v1::TokenInfo* info = out->add_tokens();
    info->set_id(token.id);
    if (!settings_.report_logprobs) continue;
    info->set_logprob(token.logprob);
    for (size_t i = 0; i < token.top.size() && i < static_cast<size_t>(settings_.top_logprobs); ++i) {
      v1::TopLogprob* top = info->add_top();
      top->set_id(token.top[i].first);
      top->set_logprob(token.top[i].second);
      top->set_piece(std::string(service_->tokenizer->TokenBytes(token.top[i].first)));
    }
  }
  tokens_.clear();
  pending_bytes_ = 0;
}

void QueryCall::FillFinish(v1::Finish* out) {
  if (decoder_->stopped()) {
    out->set_reason(v1::Finish::STOP_STRING);
    out->set_stop(std::string(decoder_->stop_string()));
  } else if (reason_ == FinishReason::kStopId) {
    out->set_reason(v1::Finish::END_OF_TURN);
  } else if (reason_ == FinishReason::kMaxTokens) {
    out->set_reason(v1::Finish::MAX_TOKENS);
  } else {
    out->set_reason(v1::Finish::CONTEXT_FULL);
  }
  v1::Usage* usage = out->mutable_usage();
  usage->set_prompt_tokens(static_cast<int32_t>(usage_.prompt_tokens));
  usage->set_cached_slots(slots_);
  usage->set_completion_tokens(static_cast<int32_t>(usage_.completion_tokens));
  usage->set_kv_bytes(usage_.kv_bytes);
  v1::Timings* timings = out->mutable_timings();
  timings->set_load_seconds(Seconds(load_time_));
  timings->set_queue_seconds(Seconds(usage_.queue_time));
  timings->set_prefill_seconds(Seconds(usage_.prefill_time));
  timings->set_decode_seconds(Seconds(usage_.decode_time));
  if (first_token_) timings->set_first_token_seconds(Seconds(*first_token_ - arrived_));
  timings->set_total_seconds(Seconds(absl::Now() - arrived_));
}

grpc::Status QueryCall::Close(const absl::Status& status) {
  Metrics& metrics = *service_->metrics;
  metrics.Increment(Metric::kRequests, {EndLabel(status, reason_, decoder_ && decoder_->stopped())});
  if (ended_) {
    metrics.Observe(Metric::kRequestQueue, Seconds(usage_.queue_time));
    if (usage_.completion_tokens > 0) {
      metrics.Observe(Metric::kRequestPrefill, Seconds(usage_.prefill_time));
      metrics.Observe(Metric::kRequestDecode, Seconds(usage_.decode_time));
    }
    metrics.Observe(Metric::kE2eRequest, Seconds(absl::Now() - arrived_));
    if (usage_.stored_mass > 0.0) {
      metrics.Observe(Metric::kAttentionMass, usage_.stored_mass, {"memory"});
      metrics.Observe(Metric::kAttentionMass, 1.0 - usage_.stored_mass, {"own"});
    }
    const double prompt = static_cast<double>(usage_.prompt_tokens), cached = static_cast<double>(slots_),
                 completion = static_cast<double>(usage_.completion_tokens);
    metrics.Increment(Metric::kTokens, {"prompt"}, prompt);
    metrics.Increment(Metric::kTokens, {"cached"}, cached);
    metrics.Increment(Metric::kTokens, {"completion"}, completion);
    metrics.Increment(Metric::kTenantRequests, {tenant_});
    metrics.Increment(Metric::kTenantTokens, {tenant_, "prompt"}, prompt);
    metrics.Increment(Metric::kTenantTokens, {tenant_, "completion"}, completion);
  }
  // Before the status is sent: a client that saw the end may use the id again.
  live_ = LiveRequests::Lease();
  lease_ = Quota::Lease();
  return counter_.Finish(status);
}

}  // namespace stillhouse
