#include <memory>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/format.h"
#include "client/cli/query_flags.h"
#include "client/cli/session.h"

// `stillhouse score`, `tokenize` and `detokenize`
namespace stillhouse::client {
namespace {

constexpr int64_t kMaxText = 64 << 20;

struct ScoreFlags {
  QueryFlags query;
  std::string prompt;
  std::string system;
  std::string continuation;
  bool raw = false;
  int32_t logprobs = 0;
};

absl::Status Score(Session& session, const ScoreFlags& flags) {
  CLIENT_RETURN_IF_ERROR(flags.query.CheckMemories());
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const auto memories, flags.query.Memories(*client));
  v1::ScoreRequest request;
  for (const std::string& name : memories) request.add_caches(name);
  if (flags.raw) {
    request.set_prompt(flags.prompt);
  } else {
    if (!flags.system.empty()) {
      v1::Message& system = *request.mutable_messages()->add_messages();
      system.set_role("system");
      system.set_content(flags.system);
    }
    v1::Message& user = *request.mutable_messages()->add_messages();
    user.set_role("user");
    user.set_content(flags.prompt);
  }
  request.set_continuation(flags.continuation);
  request.set_logprobs(flags.logprobs);
  CLIENT_ASSIGN(const v1::ScoreResponse response, client->Score(request));
  if (session.json) {
    session.PrintJson(ToJson(response));
    return absl::OkStatus();
  }
  for (const std::string& warning : response.warnings()) session.Note("note: " + warning);
  Table table({"TOKEN>", "LOGPROB>"});
  for (const v1::TokenInfo& token : response.tokens()) {
    table.Row({absl::StrCat(token.id()), token.has_logprob() ? Number(token.logprob(), 4) : "-"});
  }
  session.Print(table.Text());
  const int n = std::max(1, response.tokens_size());
  session.Print(absl::StrCat("total ", Number(response.total_logprob(), 4), " nats, ",
                             Number(-response.total_logprob() / n, 4), " nats per token\n"));
  return absl::OkStatus();
}

absl::Status Tokenize(Session& session, const std::string& text, const std::string& file, bool bos, bool chat) {
  if (text.empty() == file.empty()) return absl::InvalidArgumentError("Give the text, or --file FILE (- is a pipe).");
  std::string input = text;
  if (!file.empty()) {
    CLIENT_ASSIGN(input, ReadText(file, kMaxText));
  }
  v1::TokenizeRequest request;
  if (chat) {
    v1::Message& message = *request.mutable_messages()->add_messages();
    message.set_role("user");
    message.set_content(input);
  } else {
    request.set_text(input);
  }
  if (bos) request.set_add_bos(true);
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const v1::TokenizeResponse response, client->Tokenize(request));
  if (session.json) {
    session.PrintJson(ToJson(response));
    return absl::OkStatus();
  }
  Table table({"ID>", "BYTES"});
  for (int i = 0; i < response.ids_size(); ++i) {
    table.Row({absl::StrCat(response.ids(i)),
               i < response.pieces_size() ? "\"" + absl::Utf8SafeCEscape(response.pieces(i)) + "\"" : ""});
  }
  session.Print(table.Text());
  session.Note(absl::StrCat(Count(response.ids_size()), " tokens"));
  return absl::OkStatus();
}

absl::Status Detokenize(Session& session, const std::vector<int32_t>& ids, bool special) {
  v1::DetokenizeRequest request;
  for (const int32_t id : ids) request.add_ids(id);
  if (special) request.set_keep_special(true);
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const v1::DetokenizeResponse response, client->Detokenize(request));
  if (session.json) {
    session.PrintJson(ToJson(response));
  } else {
    session.Print(response.text() + "\n");
  }
  return absl::OkStatus();
}

}  // namespace

void AddScoreCommands(CLI::App& app, Session& session) {
  {
    auto flags = std::make_shared<ScoreFlags>();
    CLI::App* command = app.add_subcommand("score", "Log-probabilities of a given answer");
    command->footer(
        "Examples:\n"
        "  stillhouse score --cache handbook \"Who approves travel?\" \"The head of the department.\"\n"
        "  stillhouse score --no-cache --raw \"The capital of France is\" \" Paris\"");
    command->add_option("prompt", flags->prompt, "Question, or with --raw a text")->required();
    command->add_option("continuation", flags->continuation, "What comes after it")->required();
    flags->query.DeclareMemories(*command);
    command->add_option("--system", flags->system, "System message");
    command->add_flag("--raw", flags->raw, "The prompt as it stands, without the chat template");
    command->add_option("--logprobs", flags->logprobs, "Likeliest tokens per position too, 0 to 20 (with --json)");
    command->callback([&session, flags] { session.action = [&session, flags] { return Score(session, *flags); }; });
  }
  {
    auto text = std::make_shared<std::string>();
    auto file = std::make_shared<std::string>();
    auto bos = std::make_shared<bool>(false);
    auto chat = std::make_shared<bool>(false);
    CLI::App* command = app.add_subcommand("tokenize", "Token ids of a text");
    command->add_option("text", *text, "The text");
    command->add_option("--file", *file, "Read it from a file; - is standard input");
    command->add_flag("--bos", *bos, "Put the beginning-of-text token first");
    command->add_flag("--chat", *chat, "As a user's message under the chat template");
    command->callback([&session, text, file, bos, chat] {
      session.action = [&session, text, file, bos, chat] { return Tokenize(session, *text, *file, *bos, *chat); };
    });
  }
  {
    auto ids = std::make_shared<std::vector<int32_t>>();
    auto special = std::make_shared<bool>(false);
    CLI::App* command = app.add_subcommand("detokenize", "The text of token ids");
    command->add_option("ids", *ids, "Token ids")->required();
    command->add_flag("--keep-special", *special, "Write control tokens out");
    command->callback([&session, ids, special] {
      session.action = [&session, ids, special] { return Detokenize(session, *ids, *special); };
    });
  }
}

}  // namespace stillhouse::client
