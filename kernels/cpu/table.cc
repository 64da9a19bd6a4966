#include "kernels/cpu/cpu_kernels.h"

namespace stillhouse::cpu {

const KernelTable& Kernels() {
  static const KernelTable table = [] {
    KernelTable t;
    t.Embedding = Embedding;
    t.EmbeddingGrad = EmbeddingGrad;
    t.Linear = Linear;
    t.LinearGrad = LinearGrad;
    t.MatMul = MatMul;
    t.PrepareWeight = PrepareWeight;
    t.SwiGlu = SwiGlu;
    t.SwiGluGrad = SwiGluGrad;
    t.Add = Add;
    t.AddGrad = AddGrad;
    t.CopyRows = CopyRows;
    t.GatherRows = GatherRows;
    t.GatherRowsGrad = GatherRowsGrad;
    t.Dequantize = Dequantize;
    t.AdamW = AdamW;
    t.SumSquares = SumSquares;
#ifdef STILLHOUSE_HAS_NORM
    t.RmsNorm = RmsNorm;
    t.RmsNormGrad = RmsNormGrad;
#endif
#ifdef STILLHOUSE_HAS_ROPE
    t.Rope = Rope;
    t.RopeGrad = RopeGrad;
#endif
#ifdef STILLHOUSE_HAS_ATTENTION
    t.Attention = Attention;
    t.AttentionGrad = AttentionGrad;
#endif
#ifdef STILLHOUSE_HAS_LOSS
    t.Softmax = Softmax;
    t.SoftmaxGrad = SoftmaxGrad;
    t.LogSoftmax = LogSoftmax;
    t.LogSoftmaxGrad = LogSoftmaxGrad;
    t.CrossEntropy = CrossEntropy;
    t.CrossEntropyGrad = CrossEntropyGrad;
    t.LinearCrossEntropy = LinearCrossEntropy;
    t.LinearDistill = LinearDistill;
    t.TopLogprobs = TopLogprobs;
#endif
#ifdef STILLHOUSE_HAS_SAMPLE
    t.Sample = Sample;
#endif
    return t;
  }();
  return table;
}

}  // namespace stillhouse::cpu
