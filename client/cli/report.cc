#include "client/cli/report.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "client/cli/format.h"
#include "client/cli/interrupt.h"
#include "client/names.h"

namespace stillhouse::client {
namespace {

double OrNan(bool has, double value) { return has ? value : std::numeric_limits<double>::quiet_NaN(); }

}  // namespace

const v1::QualityReport::Row* FindRow(const v1::QualityReport& report, absl::string_view memory) {
  for (const auto& row : report.rows()) {
    if (row.memory() == memory) return &row;
  }
  return nullptr;
}

std::string ReportText(const v1::QualityReport& report) {
  Table table({"MEMORY", "NLL>", "KL>", "KV BYTES>", "RECOVERED>"});
  for (const auto& row : report.rows()) {
    table.Row({row.memory(), Number(row.mean_nll(), 4), Number(OrNan(row.has_mean_kl(), row.mean_kl()), 4),
               Bytes(row.kv_bytes()), Number(OrNan(row.has_recovered(), row.recovered()), 3)});
  }
  std::string text = table.Text();
  absl::StrAppend(&text, "measured on ", report.questions(), " ",
                  report.question_source() == "uploaded" ? "given" : report.question_source(), " questions (",
                  Count(report.answer_tokens()), " answer tokens)\n");
  absl::StrAppend(&text, "built in ", Seconds(report.build_seconds()), ": ", Count(report.generated_tokens()),
                  " tokens generated, ", Count(report.training_tokens()), " trained on");
  if (report.last_step() > 0)
    absl::StrAppend(&text, ", step ", report.best_step(), " of ", report.last_step(), " kept");
  absl::StrAppend(&text, "\n");
  if (report.has_off_context_damage()) {
    absl::StrAppend(&text, "unrelated prompts: ", report.off_context_damage() >= 0 ? "+" : "",
                    Number(report.off_context_damage(), 4), " nats per token\n");
  }
  if (report.has_break_even_queries()) {
    absl::StrAppend(&text, "worth its building after ", Number(report.break_even_queries(), 0), " questions\n");
  }
  return text;
}

absl::StatusOr<v1::Cache> FollowBuild(Session& session, Client& client, const v1::Operation& operation,
                                      const std::string& label) {
  Cancellation cancellation;
  WaitOptions options;
  options.cancellation = &cancellation;
  absl::StatusOr<v1::Operation> done;
  {
    const InterruptScope scope([&] { cancellation.Cancel(); });
    Progress progress = session.NewProgress();
    done = client.Wait(operation.name(), options, [&](const v1::Operation& state) {
      const v1::OperationMetadata& metadata = state.metadata();
      std::optional<double> left;
      if (metadata.has_eta_seconds() && !state.done()) left = metadata.eta_seconds();
      progress.Show(label + StageWord(metadata.stage()), metadata.fraction(), left, metadata.detail());
    });
  }
  if (cancellation.cancelled()) {
    const std::string id = ShortName(operation.name());
    return absl::CancelledError(
        absl::StrCat("The build goes on without us. Come back to it: stillhouse operation wait ", id,
                     "   or end it: stillhouse operation cancel ", id));
  }
  if (!done.ok()) return done.status();
  CLIENT_ASSIGN(const std::string name, Client::Result(*done));
  return client.GetCache(name);
}

}  // namespace stillhouse::client
