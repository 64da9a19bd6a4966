#include "kernels/ops/rope.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"

namespace stillhouse::cpu {

namespace {

// cos and sin of one position: `pairs` cosines, then `pairs` sines.
void FillRow(const RopeConfig& config, int64_t position, float* row) {
  const size_t pairs = config.inv_freq.size();
  for (size_t j = 0; j < pairs; ++j) {
    const double angle = static_cast<double>(position) * config.inv_freq[j];
    row[j] = static_cast<float>(std::cos(angle));
    row[pairs + j] = static_cast<float>(std::sin(angle));
  }
}

// Rows of one set of frequencies, made in chunks of positions when first asked for, and kept: every layer of every step
// turns by the same angles. Reading is lock-free.
class RopeTable {
 public:
  explicit RopeTable(const RopeConfig& config) : config_(config), chunks_(kChunks) {}
  ~RopeTable() {
    for (auto& chunk : chunks_) delete[] chunk.load();
  }

  bool Matches(const RopeConfig& config) const { return config.inv_freq == config_.inv_freq; }

  // Null for a position outside of the table's range.
  const float* Row(int64_t position) {
    const size_t row_floats = 2 * config_.inv_freq.size();
    if (position < 0 || position >= kChunks * kChunkRows) return nullptr;
    std::atomic<const float*>& slot = chunks_[static_cast<size_t>(position / kChunkRows)];
    const float* chunk = slot.load(std::memory_order_acquire);
    if (!chunk) {
      auto fresh = std::make_unique<float[]>(kChunkRows * row_floats);
      const int64_t first = position / kChunkRows * kChunkRows;
      for (int64_t i = 0; i < kChunkRows; ++i) FillRow(config_, first + i, fresh.get() + i * row_floats);
      // Two threads may make the same chunk: the first to publish wins, the contents are equal.
      if (slot.compare_exchange_strong(chunk, fresh.get(), std::memory_order_acq_rel)) chunk = fresh.release();
    }
    return chunk + position % kChunkRows * row_floats;
  }

 private:
  static constexpr int64_t kChunkRows = 64;
  static constexpr int64_t kChunks = 1024;  // 65536 positions: 16 MiB at most for 64-wide heads

  const RopeConfig config_;
  std::vector<std::atomic<const float*>> chunks_;
};

// The table of these frequencies. A process has one model, tests a few more: tables live for ever, and past the last
// one rows are computed where they are needed (null).
RopeTable* FindTable(const RopeConfig& config) {
  static constexpr size_t kTables = 8;
  static std::mutex mutex;
  static auto* tables = new std::vector<std::unique_ptr<RopeTable>>();
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& table : *tables) {
    if (table->Matches(config)) return table.get();
  }
  if (tables->size() == kTables) return nullptr;
  return tables->emplace_back(std::make_unique<RopeTable>(config)).get();
}

// By which angle and length pairs are turned: sin times `sign`, both times `scale`.
struct Turning {
  float sign;
  float scale;
};

// Turns one head: to (+)= rotation of `from`; `to` may be `from`.
template <bool kAdd>
void TurnHead(const float* from, const float* row, const RopeConfig& config, Turning turning, int64_t width,
              float* to) {
  const int64_t pairs = static_cast<int64_t>(config.inv_freq.size());
  const float* cosine = row;
  const float* sine = row + pairs;
  if (config.layout == RopeLayout::kHalf) {
    for (int64_t j = 0; j < pairs; ++j) {
      const float a = from[j], b = from[j + pairs], c = turning.scale * cosine[j],
                  s = turning.scale * turning.sign * sine[j];
      const float x = a * c - b * s, y = b * c + a * s;
      to[j] = kAdd ? to[j] + x : x;
      to[j + pairs] = kAdd ? to[j + pairs] + y : y;
    }
  } else {
    for (int64_t j = 0; j < pairs; ++j) {
      const float a = from[2 * j], b = from[2 * j + 1], c = turning.scale * cosine[j],
                  s = turning.scale * turning.sign * sine[j];
      const float x = a * c - b * s, y = b * c + a * s;
      to[2 * j] = kAdd ? to[2 * j] + x : x;
      to[2 * j + 1] = kAdd ? to[2 * j + 1] + y : y;
    }
  }
  for (int64_t i = 2 * pairs; i < width; ++i) to[i] = kAdd ? to[i] + from[i] : from[i];
}

template <bool kAdd>
void Turn(Backend& backend, const Tensor& from, const Tensor& positions, const RopeConfig& config, Turning turning,
          const Tensor& to) {
  const int64_t rows = from.dim(0), heads = from.dim(1), width = from.dim(2);
  const float* in = from.f32();
  float* out = to.f32();
  const int32_t* position = positions.i32();
  RopeTable* table = FindTable(config);
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(heads * width, 1));
  backend.threads().ParallelRanges(rows, grain, [&](int64_t begin, int64_t end, int) {
    std::vector<float> own;
    for (int64_t r = begin; r < end; ++r) {
      const float* row = table ? table->Row(position[r]) : nullptr;
      if (!row) {
        own.resize(2 * config.inv_freq.size());
        FillRow(config, position[r], own.data());
        row = own.data();
      }
      for (int64_t h = 0; h < heads; ++h) {
        TurnHead<kAdd>(in + r * from.stride(0) + h * from.stride(1), row, config, turning, width,
                       out + r * to.stride(0) + h * to.stride(1));
      }
    }
  });
}

// Turning back undoes the length too, so that the inverse is one under YaRN's scale as well.
float LengthScale(const RopeConfig& config, bool inverse) {
  return inverse ? 1.0f / config.attention_scale : config.attention_scale;
}

}  // namespace

void Rope(Backend& backend, const RopeArgs& args) {
  const Turning turning{args.inverse ? -1.0f : 1.0f, LengthScale(*args.config, args.inverse)};
  Turn<false>(backend, args.x, args.positions, *args.config, turning, args.out);
}

// The transpose of a rotation: the angle changes its sign, the length scale stays.
void RopeGrad(Backend& backend, const RopeGradArgs& args) {
  const Turning turning{args.inverse ? 1.0f : -1.0f, LengthScale(*args.config, args.inverse)};
  Turn<true>(backend, args.dout, args.positions, *args.config, turning, args.dx);
}

}  // namespace stillhouse::cpu
