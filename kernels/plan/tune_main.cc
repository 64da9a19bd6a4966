// stillhouse-tune: times the ways to run a product on this machine's GPU and writes the fastest to a plan file.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "kernels/base/strings.h"
#include "kernels/plan/tune.h"

namespace stillhouse {
namespace {

constexpr int64_t kMaxExtent = int64_t{1} << 20;

std::vector<RowBucket> AllRows() {
  std::vector<RowBucket> rows;
  for (int i = 0; i < kRowBuckets; ++i) rows.push_back(static_cast<RowBucket>(i));
  return rows;
}

// The products of a decode step: those of a layer as the fused ops end them and alone, and the output's.
struct Model {
  int64_t width, qkv, attended, ffn, vocabulary;
};
constexpr Model kModels[] = {
    {576, 960, 576, 1536, 49152},       // SmolLM2-135M
    {4096, 6144, 4096, 14336, 128256},  // Llama-3.1-8B
    {2560, 6144, 4096, 9728, 151936},   // Qwen3-4B
};

std::vector<TuneProduct> ModelProducts(const std::vector<RowBucket>& rows) {
  std::vector<RowBucket> few;
  std::copy_if(rows.begin(), rows.end(), std::back_inserter(few), [](RowBucket b) { return b < RowBucket::k513; });
  std::vector<TuneProduct> products;
  const auto add = [&](int64_t n, int64_t k, PlanEpilogue epilogue) {
    products.push_back({n, k, PlanDType::kBf16, PlanLayout::kBColumns, epilogue, few});
  };
  for (const Model& model : kModels) {
    for (const auto& [n, k, ending] : std::vector<std::tuple<int64_t, int64_t, PlanEpilogue>>{
             {model.qkv, model.width, PlanEpilogue::kTurn},
             {model.width, model.attended, PlanEpilogue::kScaledRows},
             {2 * model.ffn, model.width, PlanEpilogue::kGlu},
             {model.width, model.ffn, PlanEpilogue::kScaledRows}}) {
      add(n, k, ending);
      add(n, k, PlanEpilogue::kNone);
    }
    add(model.qkv, model.width, PlanEpilogue::kNormed);  // heads that are normalised, then turned
    add(model.vocabulary, model.width, PlanEpilogue::kNormed);
    add(model.vocabulary, model.width, PlanEpilogue::kNone);
  }
  return products;
}

// What the project's own models and benchmarks run: routers, coefficient maps of four streams, small squares, and the
// products of models that are served.
std::vector<TuneProduct> CommonProducts(const std::vector<RowBucket>& rows) {
  std::vector<TuneProduct> products;
  for (PlanLayout layout : {PlanLayout::kBRows, PlanLayout::kBColumns}) {
    for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{
             {16, 8192}, {16, 32768}, {64, 8192}, {64, 32768}, {256, 7168}, {24, 8192}, {24, 16384}, {128, 4096}}) {
      products.push_back({n, k, PlanDType::kBf16, layout, PlanEpilogue::kElement, rows});
    }
  }
  for (PlanLayout layout : {PlanLayout::kBRows, PlanLayout::kBColumns}) {
    products.push_back({256, 7168, PlanDType::kBf16, layout, PlanEpilogue::kRow, rows});
    products.push_back({24, 16384, PlanDType::kBf16, layout, PlanEpilogue::kRow, rows});
  }
  for (const TuneProduct& product : ModelProducts(rows)) products.push_back(product);
  return products;
}

// "N,K[,b-rows|b-columns[,epilogue]]"
absl::StatusOr<TuneProduct> ParseProduct(const std::string& text, const std::vector<RowBucket>& rows) {
  const std::vector<std::string> words = absl::StrSplit(text, ',');
  TuneProduct product;
  product.rows = rows;
  const bool good = words.size() >= 2 && words.size() <= 4 && absl::SimpleAtoi(words[0], &product.n) &&
                    absl::SimpleAtoi(words[1], &product.k) && product.n >= 1 && product.n <= kMaxExtent &&
                    product.k >= 1 && product.k <= kMaxExtent &&
                    (words.size() < 3 || ParsePlanLayout(words[2], &product.layout)) &&
                    (words.size() < 4 || ParsePlanEpilogue(words[3], &product.epilogue));
  if (!good || product.layout == PlanLayout::kOther) {
    return absl::InvalidArgumentError(
        StrCat("'", text, "' is no product: give N,K or N,K,b-columns or N,K,b-rows,row"));
  }
  if (product.epilogue == PlanEpilogue::kRow && product.n > 1024) {
    return absl::InvalidArgumentError(StrCat("'", text, "': epilogues over rows have at most 1024 columns"));
  }
  // Heads that are turned are taken to be 64 wide.
  const int64_t step = product.epilogue == PlanEpilogue::kTurn ? 64 : product.epilogue == PlanEpilogue::kGlu ? 8 : 1;
  if (IsLinear(product.epilogue) &&
      (product.layout != PlanLayout::kBColumns || product.n % step != 0 || product.n < 3 * step)) {
    return absl::InvalidArgumentError(StrCat("'", text, "': a weight lies b-columns, with N a multiple of ", step));
  }
  return product;
}

// In place only once it is complete.
absl::Status Write(const std::string& path, const std::string& text) {
  const std::string part = path + ".part";
  {
    std::ofstream out(part, std::ios::binary | std::ios::trunc);
    out << text;
    out.flush();
    if (!out) return absl::UnavailableError(StrCat("cannot write ", part));
  }
  std::error_code error;
  std::filesystem::rename(part, path, error);
  if (error) return absl::UnavailableError(StrCat("cannot put ", path, " in place: ", error.message()));
  return absl::OkStatus();
}

absl::Status Run(int device, const std::string& output, const std::vector<std::string>& products,
                 const std::vector<std::string>& buckets) {
  std::vector<RowBucket> rows;
  for (const std::string& text : buckets) {
    RowBucket bucket;
    if (!ParseRowBucket(text, &bucket)) {
      return absl::InvalidArgumentError(StrCat("'", text, "' are no rows: one of 1, 2-8, 9-32, 33-128, 129-512, 513+"));
    }
    rows.push_back(bucket);
  }
  if (rows.empty()) rows = AllRows();
  std::vector<TuneProduct> all;
  for (const std::string& text : products) {
    auto product = ParseProduct(text, rows);
    if (!product.ok()) return product.status();
    all.push_back(*product);
  }
  if (all.empty()) all = CommonProducts(rows);
  // What is in the file and is not tuned now stays; a file that cannot be read is not overwritten.
  PlanBook book;
  if (!output.empty() && std::filesystem::exists(output)) {
    auto before = PlanBook::Load(output);
    if (!before.ok()) return before.status();
    book = *std::move(before);
  }
  const auto tuned =
      TunePlans(device, all, [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); });
  if (!tuned.ok()) return tuned.status();
  book.AddAll(*tuned);
  if (!output.empty()) return Write(output, book.Print());
  std::fputs(book.Print().c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace
}  // namespace stillhouse

int main(int argc, char** argv) {
  CLI::App app("Finds the fastest way to run products over a long K on this machine's GPU, and writes plans for it");
  app.footer("stillhouse-server --plans FILE runs by them.");
  int device = 0;
  std::string output;
  std::vector<std::string> products, rows;
  app.add_option("--output", output, "plan file to write or add to; left out: the terminal");
  app.add_option("--device", device, "GPU")->check(CLI::Range(0, 255));
  app.add_option("--product", products,
                 "N,K[,b-rows|b-columns[,element|row|none|normed|scaled-rows|glu|turn]]; may be repeated. Left out: "
                 "common ones")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--rows", rows, "rows to tune for: 1, 2-8, 9-32, 33-128, 129-512, 513+; left out: all")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = stillhouse::Run(device, output, products, rows);
  if (status.ok()) return 0;
  std::fprintf(stderr, "stillhouse-tune: %s\n", std::string(status.message()).c_str());
  return 1;
}
