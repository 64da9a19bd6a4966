#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/format.h"
#include "client/cli/session.h"

// `stillhouse server …`
namespace stillhouse::client {
namespace {

absl::Status Info(Session& session) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const v1::ServerInfo info, client->Info());
  if (session.json) {
    session.PrintJson(ToJson(info));
    return absl::OkStatus();
  }
  std::vector<std::string> methods;
  for (const int method : info.methods()) methods.push_back(MethodWord(static_cast<v1::Method>(method)));
  const v1::Load& load = info.load();
  Table table({"VERSION", info.version()});
  table.Row({"up since", When(info.start_time())});
  table.Row({"device", absl::StrCat(info.device(), " (", info.backend(), ", ", info.threads(), " threads)")});
  table.Row({"model", info.model()});
  table.Row({"tenant", info.tenant()});
  table.Row({"methods", absl::StrJoin(methods, ", ")});
  table.Row({"context", Count(info.limits().context_tokens()) + " tokens"});
  table.Row({"largest document", Bytes(info.limits().max_corpus_bytes())});
  table.Row({"load", absl::StrCat(load.running(), " running, ", load.waiting(), " waiting")});
  table.Row({"key/value memory", Bytes(load.kv_bytes_used()) + " of " + Bytes(load.kv_bytes_total())});
  table.Row({"memories loaded", Count(load.resident_caches())});
  session.Print(table.Text());
  return absl::OkStatus();
}

absl::Status Models(Session& session) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const v1::ListModelsResponse response, client->Models());
  Table table({"MODEL", "KIND", "WEIGHTS>", "FORMAT", "LAYERS>", "HEADS>", "KV HEADS>", "CONTEXT>", "KV PER TOKEN>"});
  for (const v1::Model& model : response.models()) {
    if (session.json) session.PrintJson(ToJson(model));
    table.Row({model.name(), model.architecture(), Bytes(model.weight_bytes()), model.quantisation(),
               Count(model.layers()), Count(model.heads()), Count(model.kv_heads()), Count(model.context_tokens()),
               Bytes(model.kv_bytes_per_token())});
  }
  if (!session.json) session.Print(table.Text());
  return absl::OkStatus();
}

absl::Status Kernels(Session& session) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const v1::ListKernelsResponse response, client->Kernels());
  Table table({"OP", "BACKEND", "VARIANT", "PLAN"});
  for (const v1::Kernel& kernel : response.kernels()) {
    if (session.json) session.PrintJson(ToJson(kernel));
    table.Row({kernel.op(), kernel.backend(), kernel.variant(), kernel.plan()});
  }
  if (!session.json) session.Print(table.Text());
  return absl::OkStatus();
}

absl::Status Health(Session& session) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_RETURN_IF_ERROR(client->Health());
  if (session.json) {
    session.PrintJson({{"status", "SERVING"}});
  } else {
    session.Print("SERVING\n");
  }
  return absl::OkStatus();
}

}  // namespace

void AddServerCommands(CLI::App& app, Session& session) {
  CLI::App* group = app.add_subcommand("server", "The server: info, models, kernels, health");
  group->require_subcommand(1);
  group->fallthrough();
  const auto add = [&](const char* verb, const char* text, absl::Status (*run)(Session&)) {
    group->add_subcommand(verb, text)->callback([&session, run] {
      session.action = [&session, run] { return run(session); };
    });
  };
  add("info", "Version, device, limits and load", Info);
  add("models", "Models that it has loaded", Models);
  add("kernels", "Kernels in use and what chose them", Kernels);
  add("health", "Exit 0 when it is serving (for probes)", Health);
}

}  // namespace stillhouse::client
