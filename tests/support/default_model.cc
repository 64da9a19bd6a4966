#include "tests/support/default_model.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace stillhouse::testing {

std::string SourcePath(const std::string& relative) { return std::string(STILLHOUSE_SOURCE_DIR) + "/" + relative; }

std::string DefaultModelPath() {
  const char* from_environment = std::getenv("STILLHOUSE_MODEL");
  const std::string path = from_environment != nullptr && *from_environment != '\0'
                               ? std::string(from_environment)
                               : SourcePath(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf");
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    ADD_FAILURE() << "the default model is not at " << path
                  << "; run tests/run.sh once, which downloads it, or set STILLHOUSE_MODEL";
  }
  return path;
}

std::string ReadFileOrFail(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) ADD_FAILURE() << "cannot read " << path;
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

}  // namespace stillhouse::testing
