#include "kernels/ops/sample.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/sample_launch.h"
#include "kernels/cuda/select_room.h"

namespace stillhouse::cuda {
namespace {

bool Changes(const SampleRow& row) {
  const bool penalties =
      row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f;
  return !row.banned.empty() || (penalties && !row.history.empty());
}

// A row's settings but for its lists.
SampleSettings SettingsOf(const SampleRow& row) {
  SampleSettings s{};
  s.u = UniformDraw(row.seed, row.step);
  s.temperature = row.temperature;
  s.top_p = row.top_p;
  s.min_p = row.min_p;
  s.top_k = row.top_k;
  s.repetition_penalty = row.repetition_penalty;
  s.frequency_penalty = row.frequency_penalty;
  s.presence_penalty = row.presence_penalty;
  s.changed = -1;
  return s;
}

SampledToken TokenOf(const SampleResult& result) {
  SampledToken token;
  token.id = result.id;
  token.invalid = result.invalid != 0;
  token.logprob = result.logprob;
  return token;
}

}  // namespace

void PackDraws(const PackDrawsArgs& args) {
  STILLHOUSE_CHECK(CanDrawRows(*args.rows));
  args.out->resize(args.rows->size() * sizeof(SampleSettings));
  for (size_t r = 0; r < args.rows->size(); ++r) {
    const SampleSettings s = SettingsOf((*args.rows)[r]);
    std::memcpy(args.out->data() + r * sizeof(s), &s, sizeof(s));
  }
}

void Draw(Backend& backend, const DrawArgs& args) {
  const int64_t rows = args.logits.dim(0);
  STILLHOUSE_CHECK(args.vocabulary <= kMaxVocabulary && args.vocabulary <= args.logits.dim(1)) << args.vocabulary;
  STILLHOUSE_CHECK(args.settings.elements() >= rows * static_cast<int64_t>(sizeof(SampleSettings)));
  *args.out = Tensor::Empty(backend.pool(), DType::kU8, {rows * static_cast<int64_t>(sizeof(SampleResult))});
  SampleRows launch;
  launch.logits = args.logits.f32();
  launch.stride = args.logits.stride(0);
  launch.rows = rows;
  launch.n = args.vocabulary;
  launch.settings = args.settings.data<SampleSettings>();
  launch.results = args.out->data<SampleResult>();
  LaunchSample(launch, StreamOf(backend));
}

void UnpackDraws(const UnpackDrawsArgs& args) {
  for (size_t r = 0; r < args.out->size(); ++r) {
    SampleResult result;
    std::memcpy(&result, args.bytes + r * sizeof(result), sizeof(result));
    (*args.out)[r] = TokenOf(result);
  }
}

void Sample(Backend& backend, const SampleArgs& args) {
  const std::vector<SampleRow>& rows = *args.rows;
  const int64_t n = args.vocabulary, count = args.logits.dim(0);
  STILLHOUSE_CHECK(n <= kMaxVocabulary) << n;
  std::vector<SampleSettings> settings;
  std::vector<int32_t> lists;  // histories (pairs), then banned ids
  int32_t changed = 0, top = 0, pairs = 0, most = 0;
  for (const SampleRow& row : rows) {
    SampleSettings s = SettingsOf(row);
    s.changed = Changes(row) ? changed++ : -1;
    s.logprobs = static_cast<int32_t>(std::clamp<int64_t>(row.logprobs, 0, n));
    s.top = top;
    top += s.logprobs;
    most = std::max(most, s.logprobs);
    if (s.changed >= 0) {
      s.history = pairs;
      s.history_count = static_cast<int32_t>(row.history.size());
      pairs += s.history_count;
      for (const auto& [id, times] : row.history) lists.insert(lists.end(), {id, times});
    }
    settings.push_back(s);
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    settings[r].banned = static_cast<int32_t>(lists.size());
    settings[r].banned_count = static_cast<int32_t>(rows[r].banned.size());
    lists.insert(lists.end(), rows[r].banned.begin(), rows[r].banned.end());
  }

  // One upload: settings, then lists.
  std::vector<char> bytes(settings.size() * sizeof(SampleSettings) + lists.size() * sizeof(int32_t));
  std::memcpy(bytes.data(), settings.data(), settings.size() * sizeof(SampleSettings));
  if (!lists.empty()) {
    std::memcpy(bytes.data() + settings.size() * sizeof(SampleSettings), lists.data(), lists.size() * sizeof(int32_t));
  }
  const std::shared_ptr<Buffer> uploaded = UploadAsync(backend, bytes);
  // One download: results, then the best of rows.
  const int64_t results_bytes = count * static_cast<int64_t>(sizeof(SampleResult));
  const Tensor out =
      Tensor::Empty(backend.pool(), DType::kU8, {results_bytes + top * static_cast<int64_t>(sizeof(SampleTop))});
  SampleRows launch;
  launch.logits = args.logits.f32();
  launch.stride = args.logits.stride(0);
  launch.rows = count;
  launch.n = n;
  launch.settings = static_cast<const SampleSettings*>(uploaded->data());
  launch.history = reinterpret_cast<const int32_t*>(launch.settings + count);
  launch.banned = launch.history;
  Tensor scratch, list;
  if (changed > 0) {
    launch.changed_stride = (n + 31) / 32 * 32;
    scratch = Tensor::Empty(backend.pool(), DType::kF32, {changed, launch.changed_stride});
    launch.changed = scratch.f32();
  }
  launch.list_room = SelectListRoom(most);
  if (launch.list_room > 0) {
    list = Tensor::Empty(backend.pool(), DType::kI64, {count, launch.list_room});
    launch.list = list.data<uint64_t>();
  }
  launch.results = out.data<SampleResult>();
  launch.top = reinterpret_cast<SampleTop*>(out.data<char>() + results_bytes);
  LaunchSample(launch, StreamOf(backend));

  std::vector<char> host(static_cast<size_t>(out.bytes()));
  backend.Download(out, host.data());
  for (int64_t r = 0; r < count; ++r) {
    SampleResult result;
    std::memcpy(&result, host.data() + r * static_cast<int64_t>(sizeof(SampleResult)), sizeof(SampleResult));
    SampledToken& token = (*args.out)[static_cast<size_t>(r)];
    token = TokenOf(result);
    for (int32_t i = 0; i < result.top_count; ++i) {
      SampleTop best;
      std::memcpy(&best,
                  host.data() + results_bytes +
                      (settings[static_cast<size_t>(r)].top + i) * static_cast<int64_t>(sizeof(SampleTop)),
                  sizeof(SampleTop));
      token.top.emplace_back(best.id, best.logprob);
    }
  }
}

}  // namespace stillhouse::cuda
