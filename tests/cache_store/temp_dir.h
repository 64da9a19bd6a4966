#ifndef STILLHOUSE_TESTS_CACHE_STORE_TEMP_DIR_H_
#define STILLHOUSE_TESTS_CACHE_STORE_TEMP_DIR_H_

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "kernels/base/logging.h"

namespace stillhouse {

// A folder of the test's own, gone with the object.
class TempDir {
 public:
  // kMemory: where the system has a file system in memory, for the many tests whose syncs prove nothing about a disk.
  enum Place { kDisk, kMemory };
  explicit TempDir(Place place = kDisk) {
    const bool memory = place == kMemory && std::filesystem::is_directory("/dev/shm");
    const std::filesystem::path parent = memory ? "/dev/shm" : std::filesystem::temp_directory_path();
    std::string name = (parent / "stillhouse-store-XXXXXX").string();
    STILLHOUSE_CHECK(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_TESTS_CACHE_STORE_TEMP_DIR_H_
