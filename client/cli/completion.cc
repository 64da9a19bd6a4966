#include "client/cli/completion.h"

#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "client/cli/session.h"

// `stillhouse completion SHELL`
namespace stillhouse::client {
namespace {

struct Word {
  std::string text;
  std::string help;
};

// What may follow one command path ("", "cache", "cache build", …).
struct Level {
  std::string path;
  std::vector<Word> commands;
  std::vector<Word> flags;
};

void Collect(const CLI::App& app, const std::string& path, std::vector<Level>& levels) {
  Level level;
  level.path = path;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames())
      level.flags.push_back({"--" + name, option->get_description()});
  }
  const auto subcommands = app.get_subcommands([](const CLI::App*) { return true; });
  for (const CLI::App* sub : subcommands) level.commands.push_back({sub->get_name(), sub->get_description()});
  levels.push_back(level);
  for (const CLI::App* sub : subcommands) {
    Collect(*sub, path.empty() ? sub->get_name() : absl::StrCat(path, " ", sub->get_name()), levels);
  }
}

std::string Words(const std::vector<Word>& words) {
  return absl::StrJoin(words, " ", [](std::string* out, const Word& word) { out->append(word.text); });
}

std::string Quote(absl::string_view text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

// Walks the typed words down to the deepest known command path; the same lines serve bash and zsh.
std::string CaseTable(const std::vector<Level>& levels) {
  std::string text;
  for (const Level& level : levels) {
    absl::StrAppend(&text, "    ", Quote(level.path), ") commands=", Quote(Words(level.commands)),
                    "; flags=", Quote(Words(level.flags)), " ;;\n");
  }
  return text;
}

std::string Bash(const std::vector<Level>& levels) {
  return absl::StrCat(
      "# Bash completion for stillhouse. Load it: source <(stillhouse completion bash)\n"
      "_stillhouse_level() {\n"
      "  case \"$1\" in\n",
      CaseTable(levels),
      "    *) return 1 ;;\n"
      "  esac\n"
      "}\n"
      "_stillhouse() {\n"
      "  local current=\"${COMP_WORDS[COMP_CWORD]}\" path='' commands flags globals word i\n"
      "  _stillhouse_level '' && globals=\"$flags\"\n"
      "  for ((i = 1; i < COMP_CWORD; i++)); do\n"
      "    word=\"${COMP_WORDS[i]}\"\n"
      "    [[ \" $commands \" == *\" $word \"* ]] && path=\"${path:+$path }$word\" && _stillhouse_level \"$path\"\n"
      "  done\n"
      "  if [[ $current == -* ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$flags $globals\" -- \"$current\"))\n"
      "  elif [[ -n $commands ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$commands\" -- \"$current\"))\n"
      "  else\n"
      "    COMPREPLY=($(compgen -f -- \"$current\"))\n"
      "  fi\n"
      "}\n"
      "complete -o filenames -F _stillhouse stillhouse\n");
}

std::string Zsh(const std::vector<Level>& levels) {
  return absl::StrCat(
      "#compdef stillhouse\n"
      "# Zsh completion for stillhouse. Load it: source <(stillhouse completion zsh)\n"
      "_stillhouse_level() {\n"
      "  case \"$1\" in\n",
      CaseTable(levels),
      "    *) return 1 ;;\n"
      "  esac\n"
      "}\n"
      "_stillhouse() {\n"
      "  local path_='' commands flags globals word\n"
      "  _stillhouse_level '' && globals=\"$flags\"\n"
      "  for word in \"${(@)words[2,CURRENT-1]}\"; do\n"
      "    [[ \" $commands \" == *\" $word \"* ]] && path_=\"${path_:+$path_ }$word\" && _stillhouse_level \"$path_\"\n"
      "  done\n"
      "  if [[ $words[CURRENT] == -* ]]; then\n"
      "    compadd -- ${=flags} ${=globals}\n"
      "  elif [[ -n $commands ]]; then\n"
      "    compadd -- ${=commands}\n"
      "  else\n"
      "    _files\n"
      "  fi\n"
      "}\n"
      "(( $+functions[compdef] )) && compdef _stillhouse stillhouse\n");
}

std::string Fish(const std::vector<Level>& levels) {
  std::string text =
      "# Fish completion for stillhouse. Load it: stillhouse completion fish | source\n"
      "complete -c stillhouse -e\n";
  for (const Level& level : levels) {
    std::string condition;
    if (!level.path.empty()) {
      std::vector<std::string> seen;
      for (const auto& word : CLI::detail::split(level.path, ' ')) {
        seen.push_back(absl::StrCat("__fish_seen_subcommand_from ", word));
      }
      condition = absl::StrJoin(seen, "; and ");
    }
    for (const Word& word : level.commands) {
      std::string when = condition.empty() ? "__fish_use_subcommand" : condition;
      if (!condition.empty()) absl::StrAppend(&when, "; and not __fish_seen_subcommand_from ", Words(level.commands));
      absl::StrAppend(&text, "complete -c stillhouse -f -n ", Quote(when), " -a ", word.text, " -d ", Quote(word.help),
                      "\n");
    }
    for (const Word& word : level.flags) {
      absl::StrAppend(&text, "complete -c stillhouse", condition.empty() ? "" : absl::StrCat(" -n ", Quote(condition)),
                      " -l ", word.text.substr(2), " -d ", Quote(word.help), "\n");
    }
  }
  return text;
}

}  // namespace

absl::StatusOr<std::string> CompletionScript(const CLI::App& root, absl::string_view shell) {
  std::vector<Level> levels;
  Collect(root, "", levels);
  if (shell == "bash") return Bash(levels);
  if (shell == "zsh") return Zsh(levels);
  if (shell == "fish") return Fish(levels);
  return absl::InvalidArgumentError(absl::StrCat("\"", shell, "\" is no shell known here: bash, zsh or fish."));
}

void AddCompletionCommand(CLI::App& app, Session& session) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("completion", "Print a completion script for your shell");
  command->footer(
      "Examples:\n"
      "  source <(stillhouse completion bash)\n"
      "  stillhouse completion fish | source");
  command->add_option("shell", *shell, "bash, zsh or fish")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->callback([&app, &session, shell] {
    session.action = [&app, &session, shell]() -> absl::Status {
      CLIENT_ASSIGN(const std::string script, CompletionScript(app, *shell));
      session.Print(script);
      return absl::OkStatus();
    };
  });
}

}  // namespace stillhouse::client
