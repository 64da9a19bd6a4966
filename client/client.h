#ifndef STILLHOUSE_CLIENT_CLIENT_H_
#define STILLHOUSE_CLIENT_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/source.h"
#include "stillhouse/v1/caches.pb.h"
#include "stillhouse/v1/corpora.pb.h"
#include "stillhouse/v1/inference.pb.h"
#include "stillhouse/v1/operations.pb.h"
#include "stillhouse/v1/server.pb.h"
#include "stillhouse/v1/tenants.pb.h"

// The C++ client of a Stillhouse server: one connection, blocking calls, streams through callbacks. Links the wire
// contract only. Errors are absl::Status with the server's sentence; client/error.h reads the reason and facts in them.
namespace stillhouse::client {

namespace v1 = ::stillhouse::v1;

struct ChannelOptions {
  // host:port, or unix:/path.
  std::string address = "127.0.0.1:7070";
  // Sent as `authorization: Bearer …`. Empty: no key. A key is never sent unencrypted to another host unless
  // `plaintext_key` says so.
  std::string key;
  bool plaintext_key = false;
  // TLS with the system's roots, or with those of `ca_file` (PEM). Both other files: mutual TLS.
  bool tls = false;
  std::string ca_file;
  std::string certificate_file;
  std::string private_key_file;
  // The name that the server's certificate must carry, where it is not the address's.
  std::string server_name;
  // `tenants/{t}` for short names. Empty: the server is asked, once, which tenant the key speaks for.
  std::string tenant;
  // Deadline of each call; streams and waits included only where their comment says so. Zero: none.
  absl::Duration timeout = absl::ZeroDuration();
  // Sends of one call before a transient failure is reported, 1 or more.
  int attempts = 4;
  // First pause between them; it doubles, with jitter, up to 8 s. A longer pause that the server asks for is kept up to
  // 30 s.
  absl::Duration backoff = absl::Milliseconds(250);
};

// Ends the calls that it was given to. Thread-safe; not for signal handlers. May outlive the client.
class Cancellation {
 public:
  Cancellation();
  void Cancel();
  bool cancelled() const;

 private:
  friend class CancelScope;
  struct State;
  std::shared_ptr<State> state_;
};

struct UploadOptions {
  std::string corpus_id;
  std::string display_name;
  std::string media_type = "text/plain";
  // Bytes per message, 1 to 1 MiB.
  int64_t chunk_bytes = 256 << 10;
  // Broken streams in a row that committed nothing before giving up.
  int attempts = 6;
};

struct WaitOptions {
  // Between progress reports.
  absl::Duration interval = absl::Milliseconds(500);
  absl::Duration timeout = absl::InfiniteDuration();
  // How long the server may be away (it resumes builds after a restart) before the wait fails.
  absl::Duration patience = absl::Minutes(2);
  // Ends the wait, not the operation; Wait then returns CANCELLED.
  Cancellation* cancellation = nullptr;
};

// A query's whole answer.
struct Answer {
  std::string text;
  v1::Accepted accepted;
  v1::Finish finish;
  // By this machine's clock, from the call to the first text or token, and to the end.
  absl::Duration first_token;
  absl::Duration total;
};

// Thread-safe: any number of calls at once.
class Client {
 public:
  // Reads the TLS files and prepares the channel; nothing is dialled before the first call.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const ChannelOptions& options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const ChannelOptions& options() const;

  // `tenants/{t}` that this client speaks for.
  absl::StatusOr<std::string> Tenant();

  // --- documents ---

  // Sends the document and returns the sealed corpus. Resumes after broken streams, also those of an earlier process;
  // sending what is already there changes nothing. `progress(committed_or_sent, size)` runs on the calling thread.
  absl::StatusOr<v1::Corpus> Upload(const UploadOptions& options, ByteSource& source,
                                    const std::function<void(int64_t, int64_t)>& progress = nullptr);
  absl::StatusOr<v1::Corpus> GetCorpus(const std::string& name);
  // All pages; at most `limit` of them (0: no limit).
  absl::StatusOr<std::vector<v1::Corpus>> ListCorpora(int64_t limit = 0);
  absl::Status DeleteCorpus(const std::string& name, bool force);

  // --- memories ---

  // A request id is made where the request has none, so that a retried call starts one build only.
  absl::StatusOr<v1::Operation> Build(v1::BuildCacheRequest request);
  absl::StatusOr<v1::Cache> GetCache(const std::string& name);
  // Of one corpus (its full name), or of all (empty).
  absl::StatusOr<std::vector<v1::Cache>> ListCaches(const std::string& corpus = "", int64_t limit = 0);
  absl::Status DeleteCache(const std::string& name);
  // Writes the artifact to `path` (whole or not at all), its hash checked. `progress(received, size)`.
  absl::StatusOr<v1::FileHeader> Export(const std::string& cache, const std::string& path,
                                        const std::function<void(int64_t, int64_t)>& progress = nullptr);
  // `corpus`: full name. The server verifies the file before anything is visible.
  absl::StatusOr<v1::Cache> Import(const std::string& corpus, const std::string& cache_id,
                                   const std::string& display_name, ByteSource& source,
                                   const std::function<void(int64_t, int64_t)>& progress = nullptr);

  // --- questions ---

  // Calls `on_event` on this thread for each event; returns the finish. ChannelOptions::timeout bounds it. A transient
  // refusal is retried as long as no event has come.
  absl::StatusOr<v1::Finish> Query(const v1::QueryRequest& request,
                                   const std::function<void(const v1::QueryEvent&)>& on_event,
                                   Cancellation* cancellation = nullptr);
  // Query, collected.
  absl::StatusOr<Answer> Ask(const v1::QueryRequest& request, Cancellation* cancellation = nullptr);
  absl::StatusOr<v1::ScoreResponse> Score(const v1::ScoreRequest& request);
  absl::StatusOr<v1::TokenizeResponse> Tokenize(const v1::TokenizeRequest& request);
  absl::StatusOr<v1::DetokenizeResponse> Detokenize(const v1::DetokenizeRequest& request);

  // --- operations ---

  absl::StatusOr<v1::Operation> GetOperation(const std::string& name);
  absl::StatusOr<std::vector<v1::Operation>> ListOperations(bool running_only, int64_t limit = 0);
  absl::StatusOr<v1::Operation> CancelOperation(const std::string& name);
  // Returns the done operation, or the error of the wait itself. Failure of the operation is in its `error`; see
  // Result.
  absl::StatusOr<v1::Operation> Wait(const std::string& name, const WaitOptions& options = {},
                                     const std::function<void(const v1::Operation&)>& progress = nullptr);
  // The finished cache's name, or the operation's error.
  static absl::StatusOr<std::string> Result(const v1::Operation& operation);

  // --- tenants (admin key) ---

  absl::StatusOr<v1::Tenant> CreateTenant(const std::string& id, const std::string& display_name);
  absl::StatusOr<v1::Tenant> GetTenant(const std::string& name);
  absl::StatusOr<std::vector<v1::Tenant>> ListTenants(int64_t limit = 0);
  absl::Status DeleteTenant(const std::string& name);
  absl::StatusOr<v1::Key> CreateKey(const std::string& tenant, const std::string& display_name);
  absl::StatusOr<std::vector<v1::Key>> ListKeys(const std::string& tenant);
  absl::Status DeleteKey(const std::string& name);

  // --- the server ---

  absl::StatusOr<v1::ServerInfo> Info();
  absl::StatusOr<v1::ListModelsResponse> Models();
  absl::StatusOr<v1::ListKernelsResponse> Kernels();
  // OK when the standard health service says SERVING; UNAVAILABLE when it says otherwise.
  absl::Status Health();

 private:
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// A random UUID (version 4).
std::string NewRequestId();

// True for loopback addresses and unix sockets.
bool IsLocalAddress(absl::string_view address);

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_CLIENT_H_
