// make_tiny_model OUT.gguf: a small random model, for end-to-end tests in any language.

#include <CLI/CLI.hpp>
#include <iostream>

#include "tests/support/tiny_model.h"

int main(int argc, char** argv) {
  stillhouse::testing::TinyModelOptions options;
  std::string path;
  std::string type = "f32";
  CLI::App app("Writes a small random model as a GGUF file");
  app.add_option("OUT", path, "the file to write")->required();
  app.add_option("--seed", options.seed, "of the weights")->capture_default_str();
  app.add_option("--context", options.context, "positions")->capture_default_str();
  app.add_option("--layers", options.layers, "layers")->capture_default_str();
  app.add_option("--type", type, "of the matrices")
      ->check(CLI::IsMember({"f32", "f16", "q8_0", "q4_1"}))
      ->capture_default_str();
  app.add_option("--architecture", options.architecture, "llama, qwen2 or qwen3")
      ->check(CLI::IsMember({"llama", "qwen2", "qwen3"}))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  using stillhouse::GgufType;
  if (type == "f16") options.matrices = options.embedding = GgufType::kF16;
  if (type == "q8_0") options.matrices = options.embedding = GgufType::kQ8_0;
  if (type == "q4_1") {
    options.matrices = GgufType::kQ4_1;
    options.embedding = GgufType::kQ8_0;
  }
  const absl::Status status = stillhouse::testing::TinyModel(options).WriteFile(path);
  if (!status.ok()) {
    std::cerr << status.message() << "\n";
    return 1;
  }
  return 0;
}
