// Where tests find the default model.
#ifndef STILLHOUSE_TESTS_SUPPORT_DEFAULT_MODEL_H_
#define STILLHOUSE_TESTS_SUPPORT_DEFAULT_MODEL_H_

#include <string>

namespace stillhouse::testing {

// The path in $STILLHOUSE_MODEL, or .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf of the source tree. If there is no
// such file the calling test fails with a sentence that says how to get it, and the path is returned all the same.
std::string DefaultModelPath();

// A file of the source tree: SourcePath("tests/golden/tokens.json").
std::string SourcePath(const std::string& relative);

// The bytes of a file; fails the calling test if it cannot be read.
std::string ReadFileOrFail(const std::string& path);

}  // namespace stillhouse::testing

#endif  // STILLHOUSE_TESTS_SUPPORT_DEFAULT_MODEL_H_
