#include <unistd.h>

#include <iostream>
#include <memory>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "client/cli/format.h"
#include "client/cli/interrupt.h"
#include "client/cli/query_flags.h"
#include "client/cli/session.h"
#include "client/error.h"
#include "client/names.h"

// `stillhouse ask`
namespace stillhouse::client {
namespace {

constexpr int64_t kMaxQuestions = 16 << 20;

struct AskFlags {
  QueryFlags query;
  std::vector<std::string> questions;
  std::string file;
  std::string system;
  std::string system_file;
  bool chat = false;
  bool raw = false;
  bool usage = false;
  bool events = false;
};

std::string UsageLine(const Answer& answer) {
  const v1::Usage& usage = answer.finish.usage();
  const v1::Timings& times = answer.finish.timings();
  std::string line = absl::StrCat("[", Count(usage.prompt_tokens()), " prompt + ", Count(usage.cached_slots()),
                                  " cached -> ", Count(usage.completion_tokens()), " tokens; first after ",
                                  Seconds(absl::ToDoubleSeconds(answer.first_token)), ", total ",
                                  Seconds(absl::ToDoubleSeconds(answer.total)));
  if (times.decode_seconds() > 0 && usage.completion_tokens() > 1) {
    absl::StrAppendFormat(&line, ", %.1f tokens/s", (usage.completion_tokens() - 1) / times.decode_seconds());
  }
  absl::StrAppend(&line, "; key/value memory ", Bytes(usage.kv_bytes()));
  if (answer.finish.reason() == v1::Finish::MAX_TOKENS) absl::StrAppend(&line, "; cut at --max-tokens");
  if (answer.finish.reason() == v1::Finish::CONTEXT_FULL) absl::StrAppend(&line, "; the context is full");
  return line + "]";
}

// One query, streamed to standard output; `question` labels the JSON.
absl::StatusOr<Answer> AskOnce(Session& session, Client& client, const AskFlags& flags, const v1::QueryRequest& request,
                               const std::string& question, Cancellation* cancellation) {
  Answer answer;
  bool first = true;
  const absl::Time start = absl::Now();
  auto finish = client.Query(
      request,
      [&](const v1::QueryEvent& event) {
        if (session.json && flags.events) session.PrintJson(ToJson(event));
        if (event.has_accepted()) {
          answer.accepted = event.accepted();
          if (!session.json) {
            for (const std::string& warning : event.accepted().warnings()) session.Note("note: " + warning);
          }
        }
        if (!event.has_token()) return;
        if (first) answer.first_token = absl::Now() - start;
        first = false;
        answer.text += event.token().text();
        if (!session.json) {
          session.Print(event.token().text());
          fflush(stdout);
        }
      },
      cancellation);
  answer.total = absl::Now() - start;
  if (first) answer.first_token = answer.total;
  if (!session.json && !answer.text.empty() && answer.text.back() != '\n') session.Print("\n");
  if (!finish.ok()) return finish.status();
  answer.finish = *std::move(finish);
  if (session.json && !flags.events) {
    session.PrintJson({{"question", question},
                       {"answer", answer.text},
                       {"first_token_seconds", absl::ToDoubleSeconds(answer.first_token)},
                       {"total_seconds", absl::ToDoubleSeconds(answer.total)},
                       {"accepted", ToJson(answer.accepted)},
                       {"finish", ToJson(answer.finish)}});
  } else if (flags.usage) {
    session.Note(UsageLine(answer));
  }
  return answer;
}

v1::QueryRequest NewRequest(const AskFlags& flags, const std::vector<std::string>& memories) {
  v1::QueryRequest request;
  for (const std::string& name : memories) request.add_caches(name);
  *request.mutable_sampling() = flags.query.Sampling();
  return request;
}

void AddTurn(v1::QueryRequest& request, std::string role, std::string content) {
  v1::Message& message = *request.mutable_messages()->add_messages();
  message.set_role(std::move(role));
  message.set_content(std::move(content));
}

absl::Status Chat(Session& session, Client& client, const AskFlags& flags, const std::vector<std::string>& memories) {
  const bool terminal = isatty(STDIN_FILENO) == 1 && !session.json;
  if (terminal) session.Note("Ask away. /new forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer.");
  v1::QueryRequest request;
  const auto reset = [&] {
    request = NewRequest(flags, memories);
    if (!flags.system.empty()) AddTurn(request, "system", flags.system);
  };
  reset();
  absl::Status last;
  std::string line;
  while (true) {
    if (terminal) fprintf(stderr, "> "), fflush(stderr);
    if (!std::getline(std::cin, line)) break;
    const std::string question(absl::StripAsciiWhitespace(line));
    if (question.empty()) continue;
    if (question == "/quit") break;
    if (question == "/new") {
      reset();
      continue;
    }
    AddTurn(request, "user", question);
    Cancellation cancellation;
    absl::StatusOr<Answer> answer;
    {
      const InterruptScope scope([&] { cancellation.Cancel(); });
      answer = AskOnce(session, client, flags, request, question, &cancellation);
    }
    last = answer.status();
    if (answer.ok()) {
      AddTurn(request, "assistant", answer->text);
      continue;
    }
    // The question that has no answer is no part of the conversation.
    request.mutable_messages()->mutable_messages()->RemoveLast();
    if (cancellation.cancelled()) {
      last = absl::OkStatus();
      if (terminal) session.Note("(stopped; the question is left out of the conversation)");
      continue;
    }
    if (!terminal || OriginOf(last) == Origin::kTransport) return last;
    session.Note("stillhouse: " + Describe(last));
  }
  if (terminal) session.Note("");
  return terminal ? absl::OkStatus() : last;
}

absl::Status Ask(Session& session, AskFlags& flags) {
  CLIENT_RETURN_IF_ERROR(flags.query.CheckMemories());
  if (!flags.system_file.empty()) {
    CLIENT_ASSIGN(flags.system, ReadText(flags.system_file, kMaxQuestions));
  }
  if (flags.raw && (flags.chat || !flags.system.empty())) {
    return absl::InvalidArgumentError("--raw continues a text as it stands; it goes with neither --chat nor --system.");
  }
  std::vector<std::string> questions = flags.questions;
  if (!flags.file.empty()) {
    CLIENT_ASSIGN(const std::string text, ReadText(flags.file, kMaxQuestions));
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      line = absl::StripAsciiWhitespace(line.substr(0, line.find('\t')));
      if (!line.empty() && line.front() != '#') questions.emplace_back(line);
    }
  }
  if (flags.chat != questions.empty()) {
    return absl::InvalidArgumentError(flags.chat
                                          ? "--chat reads its questions from standard input; leave them out."
                                          : "Ask something: stillhouse ask --cache CORPUS \"…\", or use --chat.");
  }
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const auto memories, flags.query.Memories(*client));
  if (flags.chat) return Chat(session, *client, flags, memories);
  for (size_t i = 0; i < questions.size(); ++i) {
    v1::QueryRequest request = NewRequest(flags, memories);
    if (flags.raw) {
      request.set_prompt(questions[i]);
    } else {
      if (!flags.system.empty()) AddTurn(request, "system", flags.system);
      AddTurn(request, "user", questions[i]);
    }
    if (questions.size() > 1 && !session.json) session.Print(absl::StrCat(i > 0 ? "\n" : "", "# ", questions[i], "\n"));
    CLIENT_RETURN_IF_ERROR(AskOnce(session, *client, flags, request, questions[i], nullptr).status());
  }
  return absl::OkStatus();
}

}  // namespace

void AddAskCommand(CLI::App& app, Session& session) {
  auto flags = std::make_shared<AskFlags>();
  CLI::App* command = app.add_subcommand("ask", "Ask questions and stream the answers");
  command->footer(
      "Examples:\n"
      "  stillhouse ask --cache handbook \"Who approves travel?\" \"And who pays?\"\n"
      "  stillhouse ask --cache handbook/quick --chat\n"
      "  stillhouse ask --cache handbook --cache terms --temperature 0.7 --seed 1 \"Compare them.\"\n"
      "  stillhouse ask --no-cache --raw --max-tokens 32 \"Once upon a time\"\n"
      "  stillhouse ask --cache handbook --file questions.txt --json\n"
      "\n"
      "With --json: one object per answer; with --events too: every event of the stream, one per line.");
  command->add_option("question", flags->questions, "Questions, each asked on its own");
  command->add_option("--file", flags->file, "File of questions, one per line; - is standard input");
  CLI::Option* system = command->add_option("--system", flags->system, "System message");
  command->add_option("--system-file", flags->system_file, "System message from a file, such as a whole document")
      ->excludes(system);
  flags->query.DeclareMemories(*command);
  command->add_flag("--chat", flags->chat, "A conversation, read line by line from standard input");
  command->add_flag("--raw", flags->raw, "Continue the text as it stands, without the chat template");
  command->add_flag("--usage", flags->usage, "Tokens, times and memory after each answer, on standard error");
  command->add_flag("--events", flags->events, "With --json: every event");
  flags->query.DeclareSampling(*command);
  command->callback([&session, flags] { session.action = [&session, flags] { return Ask(session, *flags); }; });
}

}  // namespace stillhouse::client
