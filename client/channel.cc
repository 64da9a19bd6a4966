#include "client/channel.h"

#include <arpa/inet.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "client/names.h"

namespace stillhouse::client {
namespace {

constexpr int64_t kMaxPem = 1 << 20;
constexpr int kMaxMessage = 64 << 20;

absl::Status CheckAddress(const std::string& address) {
  if (absl::StartsWith(address, "unix:")) return absl::OkStatus();
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", address, "\" is not an address: write host:port, such as 127.0.0.1:7070."));
  }
  int port = 0;
  for (const char c : address.substr(colon + 1)) {
    if (!absl::ascii_isdigit(c) || (port = port * 10 + (c - '0')) > 65535) {
      return absl::InvalidArgumentError(absl::StrCat("\"", address, "\" has no port from 1 to 65535."));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> Credentials(const ChannelOptions& options) {
  const bool mutual = !options.certificate_file.empty() || !options.private_key_file.empty();
  if (!options.tls && options.ca_file.empty() && !mutual) return grpc::InsecureChannelCredentials();
  if (mutual && (options.certificate_file.empty() || options.private_key_file.empty())) {
    return absl::InvalidArgumentError("Mutual TLS needs both the certificate and its private key.");
  }
  grpc::SslCredentialsOptions ssl;
  for (const auto& [path, pem] :
       {std::pair{&options.ca_file, &ssl.pem_root_certs}, std::pair{&options.certificate_file, &ssl.pem_cert_chain},
        std::pair{&options.private_key_file, &ssl.pem_private_key}}) {
    if (path->empty()) continue;
    auto text = ReadText(*path, kMaxPem);
    if (!text.ok()) return text.status();
    *pem = std::move(*text);
  }
  return grpc::SslCredentials(ssl);
}

}  // namespace

std::string NewRequestId() {
  std::random_device device;
  uint32_t words[4];
  for (uint32_t& word : words) word = device();
  words[1] = (words[1] & 0xffff0fffu) | 0x4000u;
  words[2] = (words[2] & 0x3fffffffu) | 0x80000000u;
  return absl::StrFormat("%08x-%04x-%04x-%04x-%04x%08x", words[0], words[1] >> 16, words[1] & 0xffff, words[2] >> 16,
                         words[2] & 0xffff, words[3]);
}

bool IsLocalAddress(absl::string_view address) {
  if (absl::StartsWith(address, "unix:")) return true;
  const std::string host(address.substr(0, address.rfind(':')));
  if (host == "localhost" || host == "[::1]") return true;
  in_addr v4{};
  // inet_pton takes four plain decimal numbers only, so "127.evil.example" is a host name.
  return inet_pton(AF_INET, host.c_str(), &v4) == 1 && (ntohl(v4.s_addr) >> 24) == 127;
}

Cancellation::Cancellation() : state_(std::make_shared<State>()) {}

void Cancellation::Cancel() {
  absl::MutexLock lock(&state_->mutex);
  state_->cancelled = true;
  for (auto& [id, context] : state_->calls) context->TryCancel();
}

bool Cancellation::cancelled() const {
  absl::MutexLock lock(&state_->mutex);
  return state_->cancelled;
}

CancelScope::CancelScope(Cancellation* cancellation, grpc::ClientContext& context)
    : state_(cancellation != nullptr ? cancellation->state_ : nullptr) {
  if (state_ == nullptr) return;
  absl::MutexLock lock(&state_->mutex);
  id_ = state_->next++;
  state_->calls[id_] = &context;
  if (state_->cancelled) context.TryCancel();
}

CancelScope::~CancelScope() {
  if (state_ == nullptr) return;
  absl::MutexLock lock(&state_->mutex);
  state_->calls.erase(id_);
}

void Client::Impl::Prepare(grpc::ClientContext& context, std::optional<absl::Duration> timeout) const {
  if (!options.key.empty()) context.AddMetadata("authorization", "Bearer " + options.key);
  const absl::Duration limit = timeout.value_or(options.timeout);
  if (limit > absl::ZeroDuration() && limit < absl::InfiniteDuration()) {
    context.set_deadline(absl::ToChronoTime(absl::Now() + limit));
  }
}

absl::Status Client::Impl::Translate(const grpc::Status& status) const {
  if (status.ok()) return absl::OkStatus();
  const bool connected = channel->GetState(false) == GRPC_CHANNEL_READY;
  return FromRpc(status.error_code(), status.error_message(), status.error_details(), connected);
}

bool Client::Impl::Retry(const absl::Status& status, int attempt) const {
  if (attempt >= options.attempts || !IsTransient(status)) return false;
  absl::Duration pause = options.backoff * (1 << std::min(attempt - 1, 10));
  pause = std::min(pause, absl::Seconds(8));
  thread_local std::minstd_rand random{std::random_device{}()};
  pause *= std::uniform_real_distribution<double>(0.75, 1.25)(random);
  if (const auto asked = RetryDelay(status)) {
    if (*asked > absl::Seconds(30)) return false;
    pause = std::max(pause, *asked);
  }
  absl::SleepFor(pause);
  return true;
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

const ChannelOptions& Client::options() const { return impl_->options; }

absl::StatusOr<std::unique_ptr<Client>> Client::Create(const ChannelOptions& options) {
  if (auto status = CheckAddress(options.address); !status.ok()) return status;
  if (options.attempts < 1) return absl::InvalidArgumentError("attempts must be 1 or more.");
  for (const char c : options.key) {
    if (!absl::ascii_isgraph(c)) {
      return absl::InvalidArgumentError("The key holds a blank or a control character; keys are printable ASCII.");
    }
  }
  auto credentials = Credentials(options);
  if (!credentials.ok()) return credentials.status();
  const bool encrypted = options.tls || !options.ca_file.empty() || !options.certificate_file.empty();
  if (!options.key.empty() && !encrypted && !options.plaintext_key && !IsLocalAddress(options.address)) {
    return absl::FailedPreconditionError(
        absl::StrCat("The key would travel unencrypted to ", options.address,
                     ". Use --tls, or say --plaintext-key where the network itself is trusted."));
  }
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  if (!options.tenant.empty()) {
    auto tenant = TenantName(options.tenant);
    if (!tenant.ok()) return tenant.status();
    absl::MutexLock lock(&impl->mutex);
    impl->tenant = *tenant;
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessage);
  arguments.SetUserAgentPrefix("stillhouse-client");
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 5000);
  // A long prefill is silent; pings tell it from a dead peer.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 60000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
  if (!options.server_name.empty()) arguments.SetSslTargetNameOverride(options.server_name);
  // Proxies of the environment are for the outside world.
  if (IsLocalAddress(options.address)) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  impl->channel = grpc::CreateCustomChannel(options.address, *credentials, arguments);
  impl->corpora = v1::Corpora::NewStub(impl->channel);
  impl->caches = v1::Caches::NewStub(impl->channel);
  impl->inference = v1::Inference::NewStub(impl->channel);
  impl->operations = v1::Operations::NewStub(impl->channel);
  impl->tenants = v1::Tenants::NewStub(impl->channel);
  impl->server = v1::Server::NewStub(impl->channel);
  return std::unique_ptr<Client>(new Client(std::move(impl)));
}

absl::Status Client::Health() {
  // grpc.health.v1.Health/Check by hand: the request is empty, the answer one enum field, so no generated code is
  // needed.
  grpc::GenericStub stub(impl_->channel);
  grpc::ClientContext context;
  impl_->Prepare(context, impl_->options.timeout > absl::ZeroDuration() ? impl_->options.timeout : absl::Seconds(5));
  grpc::Slice nothing;
  const grpc::ByteBuffer request(&nothing, 1);
  grpc::ByteBuffer response;
  grpc::Status status;
  absl::Notification done;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &response,
                 [&](grpc::Status result) {
                   status = std::move(result);
                   done.Notify();
                 });
  done.WaitForNotification();
  if (auto translated = impl_->Translate(status); !translated.ok()) return translated;
  grpc::Slice bytes;
  if (!response.DumpToSingleSlice(&bytes).ok()) return absl::InternalError("The health answer cannot be read.");
  // HealthCheckResponse { ServingStatus status = 1; }, SERVING = 1.
  const bool serving = bytes.size() == 2 && bytes.begin()[0] == 0x08 && bytes.begin()[1] == 0x01;
  if (serving) return absl::OkStatus();
  return FromOperation(static_cast<int>(absl::StatusCode::kUnavailable),
                       "The server is up but not serving: it is starting or draining.", "NOT_SERVING");
}

}  // namespace stillhouse::client
