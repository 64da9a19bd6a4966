// kill −9 in the middle of builds: a process of its own builds, and dies at any moment.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "tests/server/corpus/corpus_fixture.h"

namespace stillhouse {
namespace {

BuildSpec KilledSpec() {
  BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", "k");
  spec.training.steps = 40;
  spec.training.evaluate_every = 10;
  return spec;
}

// Opens the store and builds (or goes on with) the cache. Returns true when it is done.
bool BuildInThisProcess(const std::string& model, const std::string& folder) {
  Rig rig(model, folder);
  rig.Upload("book", StoryOf(100));
  BuildQueueOptions options;
  options.checkpoint_every = absl::Milliseconds(5);
  BuildQueue queue(rig.services(), options);
  const absl::StatusOr<BuildInfo> info = queue.Enqueue(KilledSpec(), "1");
  if (!info.ok()) return false;
  const absl::StatusOr<BuildInfo> done = queue.Wait("acme", info->row.operation_id, absl::Now() + absl::Seconds(300));
  return done.ok() && done->row.state == OperationState::kSucceeded;
}

std::vector<float> Built(const std::string& model, const std::string& folder) {
  Rig rig(model, folder);
  const absl::StatusOr<PinnedMemory> pin = rig.directory->Pin("acme", "book", "k");
  STILLHOUSE_CHECK(pin.ok()) << pin.status().ToString();
  std::vector<float> all;
  for (const LayerKv& kv : pin->memory->layers) {
    for (const Tensor* t : {&kv.k, &kv.v, &kv.beta}) {
      const std::vector<float> values = rig.ctx.ToFloats(*t);
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

TEST(BuildKill, KilledAgainAndAgainItEndsAsIfNothingHadHappened) {
  std::string pattern = ::testing::TempDir() + "killXXXXXX";
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  const std::string folder = pattern;
  const std::string model = stillhouse::testing::WriteTinyModel();
  // Children are made while this process has one thread.
  auto run = [&](const std::string& store, int64_t kill_after_ms) {
    const pid_t child = fork();
    if (child == 0) _exit(BuildInThisProcess(model, store) ? 0 : 1);
    int status = 0;
    for (int64_t ms = 0; kill_after_ms < 0 || ms < kill_after_ms; ++ms) {
      if (waitpid(child, &status, WNOHANG) == child) {
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the build crashed or gave up";
        return true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    // Not a crash, and not a build that gave up.
    EXPECT_TRUE(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  };
  ASSERT_TRUE(run(folder + "/whole", -1));
  int kills = 0;
  bool done = false;
  // Longer and longer lives, so that it comes through at last.
  for (int64_t life = 30; !done; life += life / 8 + 3) {
    done = run(folder + "/killed", life);
    kills += done ? 0 : 1;
    ASSERT_LT(kills, 80);
  }
  EXPECT_GE(kills, 2);
  const std::vector<float> killed = Built(model, folder + "/killed"), whole = Built(model, folder + "/whole");
  ASSERT_EQ(killed.size(), whole.size());
  // Generation repeats itself but for the last bits (batches of other sizes round otherwise).
  for (size_t i = 0; i < whole.size(); ++i) ASSERT_NEAR(killed[i], whole[i], 0.02) << i;
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace stillhouse
