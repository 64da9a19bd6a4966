// One build, from the corpus's bytes to the published cache.
#ifndef STILLHOUSE_SERVER_CORPUS_BUILDER_H_
#define STILLHOUSE_SERVER_CORPUS_BUILDER_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/corpus/build_checkpoint.h"
#include "server/corpus/build_queue.h"

namespace stillhouse {

// What a builder asks of whoever runs it. All are called on the builder's thread.
struct BuilderHooks {
  // Not OK: stop now (CANCELLED, or UNAVAILABLE when the server ends).
  std::function<absl::Status()> check;
  std::function<void(const BuildProgress&)> report;
  std::function<absl::Status(std::string_view)> save;  // a checkpoint
  // Room for so many bytes more of the file, held with what this gives; empty: there is.
  std::function<absl::StatusOr<std::shared_ptr<void>>(uint64_t)> admit_bytes;
  absl::Duration save_every = absl::Seconds(20);
  BuildObserver* observer = nullptr;
};

// Stages: tokenise → self-study → compact → train → evaluate → store → publish. Each stage's results are in the
// checkpoint, so that a later run with the same operation goes on from there and ends with the same bytes. One thread;
// device work goes through the engine at background priority in tasks of under about a second.
class CacheBuilder {
 public:
  CacheBuilder(const BuildServices& services, const BuildSpec& spec, std::string operation_id, BuilderHooks hooks);
  ~CacheBuilder();
  CacheBuilder(const CacheBuilder&) = delete;
  CacheBuilder& operator=(const CacheBuilder&) = delete;

  // Before Run: goes on from a checkpoint. A checkpoint that cannot be used is forgotten with a line in the log.
  // `progress` is what was last reported: the fraction never falls, the start time stays.
  void Resume(std::string_view checkpoint, const BuildProgress& progress);

  // The stored cache, or why there is none: the hooks' check, NOT_FOUND (the corpus went away), ALREADY_EXISTS or
  // ABORTED (the cache's name was taken meanwhile), INVALID_ARGUMENT or FAILED_PRECONDITION (this document and this
  // recipe do not fit), RESOURCE_EXHAUSTED.
  absl::StatusOr<ArtifactRow> Run();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_BUILDER_H_
