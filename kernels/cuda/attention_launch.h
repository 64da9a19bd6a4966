// Attention on the GPU: the tables that describe a call to the kernels, and the launches. Plain types only; all
// pointers are device pointers, all strides count elements.
#ifndef STILLHOUSE_KERNELS_CUDA_ATTENTION_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_ATTENTION_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <iterator>

namespace stillhouse::cuda {

// Keys and values in consecutive slots, of all KV heads: a stored segment, or the rows of one sequence in this step.
struct AttentionRun {
  const void* k = nullptr;
  const void* v = nullptr;
  const float* beta = nullptr;  // or null
  int64_t k_head = 0, k_row = 0, v_head = 0, v_row = 0, beta_head = 0;
  int32_t slots = 0;
  bool memory = false;  // counted in stored_mass
  bool causal = false;  // the sequence's own rows: row i sees the slots up to i
  bool vector = false;  // rows of k and v may be read 16 bytes at a time
};

// Where the copy engine finds slots of a run: slot s of KV head h is the 128 columns from `head_columns`·h on, of row
// `row` + `head_rows`·h + s, of one of the call's maps (attention_maps.h).
struct AttentionPlace {
  int32_t map = -1;  // −1: in none
  int32_t row = 0, head_rows = 0, head_columns = 0;
};
struct AttentionPlaces {
  AttentionPlace k, v;
};
struct AttentionMaps;

// A tile of queries on a range of consecutive slots, for every KV head: what one block does, or the blocks of a
// cluster, each with its share of the slots. Queries are rows × the heads [head_begin, head_begin + head_count) of the
// KV head's group.
struct AttentionItem {
  int32_t run = 0, slot = 0;  // where the range begins; it goes on through the following runs
  int32_t slots = 0;
  int32_t rows = 0;          // place in the row table of the tile's first row; or ~row, and the rows are consecutive
  int32_t row_count = 0;     // 0: nothing to do
  int32_t causal_limit = 0;  // the tile's row i sees the first causal_limit + i slots of a causal run
  int32_t head_begin = 0, head_count = 0;
  int32_t partial = -1;  // partial row of the tile's first row; −1: the rows end here
  int32_t merge = -1;    // where they end here: the first row's merge, which adds the rest; −1: they see nothing else
};

// A row whose result is merged from partial rows, and from its own sequence's rows where those are few.
struct AttentionMerge {
  int32_t row = 0;
  int32_t own_begin = 0;                       // own rows [own_begin, row] are added; row + 1: none
  int32_t partial_begin = 0, partial_end = 0;  // in the table of partial rows: earlier launches'
};

// Tensors of a forward call. Rows are indexed by row of the step, heads by query head.
struct AttentionTensors {
  const void* q = nullptr;  // f32, or bf16 where q_bf16
  bool q_bf16 = false;
  bool q_vector = false;  // rows of q may be read 16 bytes at a time
  int64_t q_row = 0, q_head = 0;
  void* out = nullptr;  // f32, or bf16 where out_bf16
  bool out_bf16 = false;
  int64_t out_row = 0, out_head = 0;
  bool out_vector = false;  // rows of out may be written 16 bytes at a time
  float* lse = nullptr;     // or null
  int64_t lse_row = 0, lse_head = 0;
  float* mass = nullptr;           // [R, H] share of the softmax on memories; or null
  float* partial_o = nullptr;      // [partial rows, H, d], unnormalised
  float* partial_state = nullptr;  // [partial rows, H, 3]: m, ℓ on memories, ℓ on the rest
  int32_t heads = 0, kv_heads = 0, width = 0;
  float scale = 0.0f;
};

// Tables of at most this many bytes travel with the launch instead of by a copy of their own.
inline constexpr int kAttentionInlineBytes = 3584;
inline constexpr int kAttentionInlineWidth = 128;  // heads of at most this width

struct AttentionItems {
  const AttentionRun* runs = nullptr;
  const AttentionItem* items = nullptr;
  const int32_t* rows = nullptr;
  const AttentionPlaces* places = nullptr;  // of each run, for tall items; null where `maps` is
  const AttentionMaps* maps = nullptr;      // host memory
  int32_t count = 0;
  int32_t cluster = 1;  // blocks that share an item
  // Keys and values were there before the kernel in front was launched: they are read while that one still runs.
  bool settled = false;
  bool brief = false;  // many items of few slots, for the narrow kernel
  // Host memory of kAttentionInlineBytes that the pointers above are offsets into; null: they are device pointers.
  const char* inline_tables = nullptr;
};

// Queries of a tile of the narrow and of the wide kernel; slots of one step through the keys.
inline constexpr int kAttentionNarrow = 8;
inline constexpr int kAttentionWide = 64;
inline constexpr int kAttentionTall = 128, kAttentionTallWidth = 128;
inline constexpr int kAttentionStep = 64;
inline constexpr int kAttentionMaxWidth = 256;
inline constexpr int kAttentionClusters[] = {1, 2, 3, 4, 5, 6, 7, 8, 16};  // blocks that may share an item

// Merging of partial rows, and of few own rows; writes out, lse and mass.
struct AttentionMerging {
  const AttentionMerge* merges = nullptr;
  const int32_t* partials = nullptr;    // partial rows, listed by merge
  int32_t begin = 0, count = 0;         // merges that have a launch of their own
  int32_t most_partials = 0;            // of one row of these
  const char* inline_tables = nullptr;  // as in AttentionItems
  const void* k = nullptr;              // own rows: f32, or bf16 where own_bf16
  const void* v = nullptr;
  bool own_bf16 = false;
  bool own_vector = false;  // these may be read 16 bytes at a time
  int64_t k_row = 0, k_head = 0, v_row = 0, v_head = 0;
};

// The kernels below may start while the kernel before them ends, and wait for it before they read rows, and keys or
// values that are not settled.
// Items without rows are passed over. All partial rows that are merged are earlier launches'.

// Blocks of a kernel that run at once on a GPU in clusters of the sizes kAttentionClusters; 0: in none.
struct AttentionCapacity {
  int blocks[std::size(kAttentionClusters)] = {};
};

// f32 keys and values, fp32 arithmetic.
void LaunchAttentionF32(const AttentionTensors& tensors, const AttentionItems& items, const AttentionMerging& merging,
                        bool wide, cudaStream_t stream);
AttentionCapacity AttentionCapacityF32(int width, bool wide);
// bf16 keys and values, tensor-core products with fp32 sums.
void LaunchAttentionBf16Narrow(const AttentionTensors& tensors, const AttentionItems& items,
                               const AttentionMerging& merging, cudaStream_t stream);
void LaunchAttentionBf16Wide(const AttentionTensors& tensors, const AttentionItems& items,
                             const AttentionMerging& merging, cudaStream_t stream);
AttentionCapacity AttentionCapacityBf16Narrow(int width);
AttentionCapacity AttentionCapacityBf16Wide(int width);
// The same for many queries and heads kAttentionTallWidth wide, whose runs are all `vector`. `merges`: some items have
// merges.
void LaunchAttentionTall(const AttentionTensors& tensors, const AttentionItems& items, const AttentionMerging& merging,
                         bool merges, int multiprocessors, cudaStream_t stream);
AttentionCapacity AttentionCapacityTall();
// The merges [merging.begin, merging.begin + merging.count).
void LaunchAttentionMerge(const AttentionTensors& tensors, const AttentionMerging& merging, cudaStream_t stream);

// stored_mass[r] = mean over heads of mass[r, h].
void LaunchAttentionMass(const float* mass, float* stored_mass, int64_t rows, int heads, cudaStream_t stream);

// f32 rows [rows, heads, width] of any strides to contiguous bf16.
void LaunchAttentionToBf16(const float* from, int64_t row, int64_t head, int64_t rows, int heads, int width, void* to,
                           cudaStream_t stream);

// Backward, fp32. `dout`, `out` and `lse` are indexed as in the forward call.
struct AttentionGradTensors {
  const float* q = nullptr;
  int64_t q_row = 0, q_head = 0;
  const float* out = nullptr;
  int64_t out_row = 0, out_head = 0;
  const float* dout = nullptr;
  int64_t dout_row = 0, dout_head = 0;
  const float* lse = nullptr;
  int64_t lse_row = 0, lse_head = 0;
  bool vector = false;     // rows of q and dout may be read 16 bytes at a time
  float* delta = nullptr;  // [R, H] scratch: ⟨dout, out⟩
  float* dq = nullptr;     // or null
  int64_t dq_row = 0, dq_head = 0;
  int64_t rows = 0;
  int32_t heads = 0, kv_heads = 0, width = 0;
  float scale = 0.0f;
};

// Where the gradients of a run are added; null: not wanted.
struct AttentionRunGrad {
  float* dk = nullptr;
  float* dv = nullptr;
  float* dbeta = nullptr;
  int64_t dk_head = 0, dk_row = 0, dv_head = 0, dv_row = 0, dbeta_head = 0;
};

// A tile of slots of one run, and the rows that it is summed over, for every KV head.
struct AttentionSlotItem {
  int32_t run = 0, slot = 0;  // the tile's first slot
  int32_t rows = 0;           // as in AttentionItem
  int32_t row_count = 0;
  int32_t causal_limit = 0;
  int32_t partial = -1;  // block of partial sums; −1: added to the gradient at once
};

// Blocks of partial sums of one tile, added in order.
struct AttentionSlotSum {
  int32_t run = 0, slot = 0;
  int32_t partial_begin = 0, partial_count = 0;
};

// Queries, or slots, of a tile in the backward kernels; slots, or queries, of one of its steps.
int AttentionGradTile();
int AttentionGradStep(int width);
// Floats of one block of partial sums of one KV head.
int64_t AttentionGradBlock(int width);

void LaunchAttentionDelta(const AttentionGradTensors& tensors, cudaStream_t stream);
// dq of tiles of queries; each item names all that its rows see.
void LaunchAttentionGradQ(const AttentionGradTensors& tensors, const AttentionItems& items, cudaStream_t stream);
void LaunchAttentionGradKv(const AttentionGradTensors& tensors, const AttentionRun* runs, const AttentionRunGrad* grads,
                           const int32_t* rows, const AttentionSlotItem* items, int32_t count, float* partials,
                           cudaStream_t stream);
void LaunchAttentionGradSum(const AttentionGradTensors& tensors, const AttentionRun* runs,
                            const AttentionRunGrad* grads, const AttentionSlotSum* sums, int32_t count,
                            const float* partials, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_ATTENTION_LAUNCH_H_
