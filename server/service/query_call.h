// One Query: from the request to the last event.
#ifndef STILLHOUSE_SERVER_SERVICE_QUERY_CALL_H_
#define STILLHOUSE_SERVER_SERVICE_QUERY_CALL_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/engine/request.h"
#include "server/service/call.h"
#include "server/service/live_requests.h"
#include "server/service/validation.h"
#include "server/tenancy/quota.h"
#include "server/token/stream_decoder.h"
#include "stillhouse/v1/inference.pb.h"

namespace stillhouse {

// Threads meet here. The work pool prepares the request (keys, tokens, memories); the events pool writes; the engine
// delivers tokens, never waits, and leaves when the sequence ends; gRPC says when a write is done and when the client
// is gone. The engine and gRPC each hold a reference; the last one out deletes the call.
//
// Tokens that come while a write is in flight are merged into the next event, so that a slow client costs one event,
// not a queue; one that falls kMaxPendingBytes behind is ended with RESOURCE_EXHAUSTED. Whatever ends the call, the
// engine's sequence ends first: memories, pages and the request's id are free before the status is sent.
class QueryCall final : public grpc::ServerWriteReactor<v1::QueryEvent>,
                        public GenerationSink,
                        public std::enable_shared_from_this<QueryCall> {
 public:
  static grpc::ServerWriteReactor<v1::QueryEvent>* Start(ServiceContext* service, grpc::CallbackServerContext* context,
                                                         const v1::QueryRequest* request);

  QueryCall(ServiceContext* service, grpc::CallbackServerContext* context, const v1::QueryRequest* request);

  // On the engine's thread.
  bool OnToken(const SampledToken& token) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnFinish(FinishReason reason, const GenerationUsage& usage, const absl::Status& status) override
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr size_t kMaxPendingBytes = 4 << 20;

  // On gRPC's threads.
  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancel() override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDone() override;

  // On the work pool.
  void Prepare();
  absl::Status Admit();
  absl::Status Submit(GenerationRequest request);

  // On the events pool, and on gRPC's threads.
  void Pump() ABSL_LOCKS_EXCLUDED(mutex_);

  void SchedulePump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopEngine() ABSL_LOCKS_EXCLUDED(mutex_);
  void FillTokens(v1::Token* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FillFinish(v1::Finish* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts the end, gives back what the call holds, and says how it ends.
  grpc::Status Close(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ServiceContext* const service_;
  grpc::CallbackServerContext* const context_;
  const v1::QueryRequest* const request_;
  const CallCounter counter_;
  const absl::Time arrived_;

  // Set while preparing, before the engine knows of the call; read only afterwards.
  std::string tenant_;
  QuerySettings settings_;
  std::vector<int32_t> stop_ids_;
  absl::Duration load_time_;
  int64_t slots_ = 0;

  v1::QueryEvent event_;  // the write in flight, or the next one: touched by whoever holds writing_

  absl::Mutex mutex_;
  std::shared_ptr<QueryCall> self_ ABSL_GUARDED_BY(mutex_);  // gRPC's reference
  std::optional<StreamDecoder> decoder_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::Accepted> accepted_ ABSL_GUARDED_BY(mutex_);  // until it is written
  std::string text_ ABSL_GUARDED_BY(mutex_);                      // not written yet
  std::vector<SampledToken> tokens_ ABSL_GUARDED_BY(mutex_);      // not written yet
  size_t pending_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<GenerationHandle> handle_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Time> first_token_ ABSL_GUARDED_BY(mutex_);
  bool open_ ABSL_GUARDED_BY(mutex_) = false;       // submitted: events may be written
  bool pumping_ ABSL_GUARDED_BY(mutex_) = false;    // a Pump is posted
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;    // a write is in flight
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;  // the client is gone, or its deadline passed
  bool too_slow_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;   // the engine's OnFinish came
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;  // Finish was called, or is about to be
  FinishReason reason_ ABSL_GUARDED_BY(mutex_) = FinishReason::kError;
  GenerationUsage usage_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  LiveRequests::Lease live_ ABSL_GUARDED_BY(mutex_);
  Quota::Lease lease_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_QUERY_CALL_H_
