#include "client/source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace stillhouse::client {
namespace {

using ::testing::HasSubstr;

class SourceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/source_test_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Write(const std::string& name, const std::string& bytes) {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  size_t Files() const {
    return std::distance(std::filesystem::directory_iterator(folder_), std::filesystem::directory_iterator());
  }
  std::string folder_;
};

TEST_F(SourceTest, ReadsAtAnyOffset) {
  const auto source = OpenFile(Write("a", "hello world"));
  ASSERT_TRUE(source.ok());
  EXPECT_EQ((*source)->size(), 11);
  std::string out;
  ASSERT_TRUE((*source)->Read(6, 100, out).ok());
  EXPECT_EQ(out, "world");
  ASSERT_TRUE((*source)->Read(11, 5, out).ok());
  EXPECT_EQ(out, "");
  ASSERT_TRUE((*source)->Read(99, 5, out).ok());
  EXPECT_EQ(out, "");
}

TEST_F(SourceTest, NoticesAShrunkFile) {
  const std::string path = Write("a", "hello world");
  const auto source = OpenFile(path);
  ASSERT_TRUE(source.ok());
  std::filesystem::resize_file(path, 3);
  std::string out;
  EXPECT_TRUE(absl::IsAborted((*source)->Read(0, 11, out)));
}

TEST_F(SourceTest, SaysWhatCannotBeOpened) {
  EXPECT_THAT(std::string(OpenFile(folder_ + "/none").status().message()), HasSubstr("none: No such file"));
  EXPECT_THAT(std::string(OpenFile(folder_).status().message()), HasSubstr("not a regular file"));
}

TEST_F(SourceTest, KnownHashes) {
  // FIPS 180-4 examples.
  EXPECT_EQ(*Sha256Of(*FromBytes("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(*Sha256Of(*FromBytes("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(*Sha256Of(*FromBytes(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  // More than one block.
  const std::string big((2 << 20) + 5, 'z');
  EXPECT_EQ(*Sha256Of(*FromBytes(big)), *Sha256Of(**OpenFile(Write("big", big))));
}

TEST_F(SourceTest, PartialFilesAppearWholeOrNotAtAll) {
  const std::string path = folder_ + "/out";
  {
    auto file = PartialFile::Create(path);
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE((*file)->Append("half").ok());
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_EQ(Files(), 0u);
  auto file = PartialFile::Create(path);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Append("whole").ok());
  ASSERT_TRUE((*file)->Commit().ok());
  EXPECT_EQ(*ReadText(path, 100), "whole");
  EXPECT_EQ(Files(), 1u);
}

TEST_F(SourceTest, PartialFilesHaveThePermissionsOfAnyNewFile) {
  const mode_t before = umask(027);
  auto file = PartialFile::Create(folder_ + "/out");
  umask(before);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Commit().ok());
  using std::filesystem::perms;
  EXPECT_EQ(std::filesystem::status(folder_ + "/out").permissions(),
            perms::owner_read | perms::owner_write | perms::group_read);
}

TEST_F(SourceTest, ReadTextHasALimit) {
  const std::string path = Write("a", "12345");
  EXPECT_EQ(*ReadText(path, 5), "12345");
  EXPECT_TRUE(absl::IsOutOfRange(ReadText(path, 4).status()));
}

}  // namespace
}  // namespace stillhouse::client
