#include "client/cli/build_flags.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/format.h"
#include "client/cli/session.h"
#include "client/source.h"

namespace stillhouse::client {
namespace {

constexpr int64_t kMaxQuestionsFile = 16 << 20;

std::string Upper(absl::string_view word) {
  std::string key = absl::AsciiStrToUpper(word);
  std::replace(key.begin(), key.end(), '-', '_');
  return key;
}

template <typename T, typename Message>
void Put(const std::optional<T>& value, Message* message, void (Message::*set)(T)) {
  if (value) (message->*set)(*value);
}

}  // namespace

void BuildFlags::Declare(CLI::App& command, bool evaluation_file) {
  command.add_option("--profile", profile_, "quick (minutes on a laptop), standard or thorough")->capture_default_str();
  command.add_option("--seed", seed_, "Same seed, document, model and recipe: same memory");

  const std::string study = "Self-study";
  command.add_option("--conversations", conversations_, "Conversations to generate about the document")->group(study);
  command.add_option("--max-question-tokens", max_question_tokens_, "Longest question")->group(study);
  command.add_option("--max-answer-tokens", max_answer_tokens_, "Longest answer")->group(study);
  command.add_option("--study-temperature", temperature_, "Temperature of the asker, 0 to 2")->group(study);
  command.add_option("--seed-kinds", seed_kinds_, "Of structuring, summarisation, question, use-case, creative")
      ->delimiter(',')
      ->group(study);
  command.add_option("--min-chunk-tokens", min_chunk_tokens_, "Shortest part of the document shown")->group(study);
  command.add_option("--max-chunk-tokens", max_chunk_tokens_, "Longest part of the document shown")->group(study);
  command.add_option("--top-logprobs", top_logprobs_, "Teacher log-probabilities kept, 1 to 20")->group(study);
  command.add_option("--study-questions", questions_file_, "File of questions to train on too, one per line")
      ->group(study);

  const std::string training = "Training";
  command.add_option("--start", start_, "attention-matching or prefix")
      ->check(CLI::IsMember({"attention-matching", "prefix"}))
      ->group(training);
  command.add_option("--learning-rate", learning_rate_, "(0, 1]")->group(training);
  command.add_option("--rows-per-step", rows_per_step_, "Packed rows per optimiser step")->group(training);
  command.add_option("--row-tokens", row_tokens_, "Longest row")->group(training);
  command.add_option("--steps", steps_, "Optimiser steps")->group(training);
  command.add_option("--max-training-tokens", max_training_tokens_, "Training reads no more than this")
      ->group(training);
  command.add_option("--frozen-slots", frozen_slots_, "First slots that never change")->group(training);
  command.add_flag("--train-beta", train_beta_, "Train the attention biases too")->group(training);
  command.add_option("--loss", loss_, "renormalised, raw, tail or ce")
      ->check(CLI::IsMember({"renormalised", "raw", "tail", "ce"}))
      ->group(training);
  command.add_flag("--train-on-question", train_on_question_, "Supervise the question's tokens too")->group(training);
  command.add_option("--clip-norm", clip_norm_, "Gradient norm at which it is clipped")->group(training);
  command.add_option("--validation-fraction", validation_fraction_, "Share of conversations held out")->group(training);
  command.add_option("--patience", patience_, "Evaluations without gain before training ends; 0 never")
      ->group(training);
  command.add_option("--evaluate-every", evaluate_every_, "Steps between evaluations")->group(training);
  command.add_option("--weight-decay", weight_decay_, "AdamW's")->group(training);

  const std::string matching = "Attention matching";
  command.add_option("--queries", queries_, "Reference query positions")->group(matching);
  command.add_option("--ridge", ridge_, "Ridge of the value fit")->group(matching);
  command.add_flag("--no-fit-beta", no_beta_, "Fit no attention biases")->group(matching);
  command.add_flag("--no-fit-values", no_values_, "Leave the values as they are")->group(matching);

  const std::string report = "Quality report";
  if (evaluation_file) {
    command
        .add_option("--eval-questions", evaluation_file_,
                    "File of questions to measure with, one per line (a tab, then a reference answer); never "
                    "trained on")
        ->group(report);
    command.add_flag("--no-report", no_report_, "Measure nothing")->group(report);
  }
  command.add_option("--eval-answer-tokens", evaluation_answer_tokens_, "Longest reference answer")->group(report);
}

absl::Status BuildFlags::Fill(v1::BuildCacheRequest& request) const {
  CLIENT_ASSIGN(const v1::Profile profile, ParseProfile(profile_));
  request.set_profile(profile);
  if (seed_) request.set_seed(*seed_);

  v1::SelfStudyOptions study;
  Put(conversations_, &study, &v1::SelfStudyOptions::set_conversations);
  Put(max_question_tokens_, &study, &v1::SelfStudyOptions::set_max_question_tokens);
  Put(max_answer_tokens_, &study, &v1::SelfStudyOptions::set_max_answer_tokens);
  Put(min_chunk_tokens_, &study, &v1::SelfStudyOptions::set_min_chunk_tokens);
  Put(max_chunk_tokens_, &study, &v1::SelfStudyOptions::set_max_chunk_tokens);
  Put(top_logprobs_, &study, &v1::SelfStudyOptions::set_top_logprobs);
  Put(temperature_, &study, &v1::SelfStudyOptions::set_temperature);
  for (const std::string& word : seed_kinds_) {
    v1::SeedKind kind;
    if (!v1::SeedKind_Parse(Upper(word), &kind) || kind == v1::SEED_KIND_UNSPECIFIED) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", word, "\" is no seed kind: structuring, summarisation, question, use-case or creative."));
    }
    study.add_seed_kinds(kind);
  }
  if (!questions_file_.empty()) {
    CLIENT_ASSIGN(const Questions questions, ReadQuestions(questions_file_));
    for (const std::string& question : questions.questions) study.add_questions(question);
  }
  if (study.ByteSizeLong() > 0) *request.mutable_self_study() = study;

  v1::TrainingOptions training;
  if (!start_.empty()) training.set_start(start_ == "prefix" ? v1::PREFIX_START : v1::ATTENTION_MATCHING_START);
  if (!loss_.empty()) {
    v1::LossMode mode = v1::LOSS_MODE_UNSPECIFIED;
    v1::LossMode_Parse(Upper(loss_), &mode);
    training.set_loss_mode(mode);
  }
  Put(learning_rate_, &training, &v1::TrainingOptions::set_learning_rate);
  Put(clip_norm_, &training, &v1::TrainingOptions::set_clip_norm);
  Put(validation_fraction_, &training, &v1::TrainingOptions::set_validation_fraction);
  Put(weight_decay_, &training, &v1::TrainingOptions::set_weight_decay);
  Put(rows_per_step_, &training, &v1::TrainingOptions::set_rows_per_step);
  Put(row_tokens_, &training, &v1::TrainingOptions::set_row_tokens);
  Put(steps_, &training, &v1::TrainingOptions::set_steps);
  Put(frozen_slots_, &training, &v1::TrainingOptions::set_frozen_slots);
  Put(patience_, &training, &v1::TrainingOptions::set_early_stop_patience);
  Put(evaluate_every_, &training, &v1::TrainingOptions::set_evaluate_every);
  Put(max_training_tokens_, &training, &v1::TrainingOptions::set_max_training_tokens);
  if (train_beta_) training.set_train_beta(true);
  if (train_on_question_) training.set_train_on_question(true);
  if (training.ByteSizeLong() > 0) *request.mutable_training() = training;

  v1::AttentionMatchingOptions matching;
  Put(queries_, &matching, &v1::AttentionMatchingOptions::set_queries);
  Put(ridge_, &matching, &v1::AttentionMatchingOptions::set_ridge);
  if (no_beta_) matching.set_fit_beta(false);
  if (no_values_) matching.set_fit_values(false);
  if (matching.ByteSizeLong() > 0) *request.mutable_attention_matching() = matching;

  v1::EvaluationOptions evaluation;
  Put(evaluation_answer_tokens_, &evaluation, &v1::EvaluationOptions::set_max_answer_tokens);
  if (no_report_) evaluation.set_skip(true);
  if (!evaluation_file_.empty()) {
    CLIENT_ASSIGN(const Questions questions, ReadQuestions(evaluation_file_));
    for (const std::string& question : questions.questions) evaluation.add_questions(question);
    for (const std::string& answer : questions.answers) evaluation.add_answers(answer);
  }
  if (evaluation.ByteSizeLong() > 0) *request.mutable_evaluation() = evaluation;
  return absl::OkStatus();
}

absl::StatusOr<Questions> ReadQuestions(const std::string& path) {
  CLIENT_ASSIGN(const std::string text, ReadText(path, kMaxQuestionsFile));
  auto questions = ParseQuestions(text);
  if (!questions.ok()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", questions.status().message()));
  return questions;
}

absl::StatusOr<Questions> ParseQuestions(absl::string_view text) {
  Questions result;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#') continue;
    const size_t tab = line.find('\t');
    result.questions.emplace_back(absl::StripAsciiWhitespace(line.substr(0, tab)));
    if (tab != absl::string_view::npos) result.answers.emplace_back(absl::StripAsciiWhitespace(line.substr(tab + 1)));
    if (!result.answers.empty() && result.answers.size() != result.questions.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "line ", number, ": some questions have a reference answer and some have none; give all or none."));
    }
  }
  if (result.questions.empty()) return absl::InvalidArgumentError("no questions in it.");
  return result;
}

}  // namespace stillhouse::client
