// Tensors as the runs of attention's kernels, and the upload of a call's tables.
#ifndef STILLHOUSE_KERNELS_CUDA_ATTENTION_TABLES_H_
#define STILLHOUSE_KERNELS_CUDA_ATTENTION_TABLES_H_

#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/ops/attention.h"

namespace stillhouse::cuda {

// True where rows of a tensor (its last dimension) may be read 16 bytes at a time: start, width, and the strides of the
// named dimensions.
inline bool IsVector(const Tensor& t, std::initializer_list<int> dims) {
  const int64_t size = BlockBytes(t.dtype());
  if (reinterpret_cast<uintptr_t>(t.raw()) % 16 != 0 || t.dim(-1) * size % 16 != 0) return false;
  for (int d : dims) {
    if (t.dim(d) > 1 && t.stride(d) * size % 16 != 0) return false;
  }
  return true;
}

inline AttentionRun SegmentRun(const KvSegment& s) {
  AttentionRun run;
  run.slots = static_cast<int32_t>(s.k.dim(1));
  if (run.slots == 0) return run;
  run.k = s.k.raw();
  run.v = s.v.raw();
  run.k_head = s.k.stride(0);
  run.k_row = s.k.stride(1);
  run.v_head = s.v.stride(0);
  run.v_row = s.v.stride(1);
  if (s.beta) {
    run.beta = s.beta.f32();
    run.beta_head = s.beta.stride(0);
  }
  run.memory = s.memory;
  run.vector = IsVector(s.k, {0, 1}) && IsVector(s.v, {0, 1});
  return run;
}

// All rows of a step, [R, H_kv, d].
inline AttentionRun OwnRun(const Tensor& k, const Tensor& v) {
  AttentionRun run;
  run.slots = static_cast<int32_t>(k.dim(0));
  if (run.slots == 0) return run;
  run.k = k.raw();
  run.v = v.raw();
  run.k_row = k.stride(0);
  run.k_head = k.stride(1);
  run.v_row = v.stride(0);
  run.v_head = v.stride(1);
  run.causal = true;
  run.vector = IsVector(k, {0, 1}) && IsVector(v, {0, 1});
  return run;
}

// Queries and results, [R, H, d] each.
inline void SetRows(const Tensor& q, const Tensor& out, AttentionTensors* tensors) {
  tensors->q = q.raw();
  tensors->q_bf16 = q.dtype() == DType::kBF16;
  tensors->q_vector = IsVector(q, {0, 1});
  tensors->q_row = q.stride(0);
  tensors->q_head = q.stride(1);
  tensors->out = out.raw();
  tensors->out_bf16 = out.dtype() == DType::kBF16;
  tensors->out_vector = IsVector(out, {0, 1});
  tensors->out_row = out.stride(0);
  tensors->out_head = out.stride(1);
}

// The step's own keys and values, [R, H_kv, d], for rows that see few of them.
inline void SetOwnRows(const Tensor& k, const Tensor& v, AttentionMerging* merging) {
  merging->k = k.raw();
  merging->v = v.raw();
  merging->own_bf16 = k.dtype() == DType::kBF16;
  merging->own_vector = IsVector(k, {0, 1}) && IsVector(v, {0, 1});
  merging->k_row = k.stride(0);
  merging->k_head = k.stride(1);
  merging->v_row = v.stride(0);
  merging->v_head = v.stride(1);
}

// Several tables in one copy to the device.
class TableUpload {
 public:
  // The table's place.
  template <typename T>
  size_t Add(const std::vector<T>& table) {
    const size_t at = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(at + table.size() * sizeof(T));
    if (!table.empty()) std::memcpy(bytes_.data() + at, table.data(), table.size() * sizeof(T));
    return at;
  }

  // After the last Add. `may_inline`: small tables may travel with the launches instead; At then gives offsets.
  void Upload(Backend& backend, bool may_inline = false) {
    inline_ = may_inline && bytes_.size() <= kAttentionInlineBytes;
    if (inline_) {
      bytes_.resize(kAttentionInlineBytes);
    } else if (!bytes_.empty()) {
      buffer_ = UploadAsync(backend, bytes_.data(), bytes_.size());
    }
  }

  template <typename T>
  const T* At(size_t place) const {
    if (inline_) return reinterpret_cast<const T*>(place);
    return buffer_ ? reinterpret_cast<const T*>(static_cast<const char*>(buffer_->data()) + place) : nullptr;
  }

  const char* inline_tables() const { return inline_ ? bytes_.data() : nullptr; }

 private:
  std::vector<char> bytes_;
  bool inline_ = false;
  std::shared_ptr<Buffer> buffer_;
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_ATTENTION_TABLES_H_
