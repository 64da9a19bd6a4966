#include "kernels/cuda/cuda_kernels.h"

namespace stillhouse::cuda {

const KernelTable& Kernels() {
  static const KernelTable table = [] {
    KernelTable t;
    t.Embedding = Embedding;
    t.EmbeddingGrad = EmbeddingGrad;
    t.RmsNorm = RmsNorm;
    t.RmsNormGrad = RmsNormGrad;
    t.Linear = Linear;
    t.LinearGrad = LinearGrad;
    t.MatMul = MatMul;
    t.PrepareWeight = PrepareWeight;
    t.Rope = Rope;
    t.RopeGrad = RopeGrad;
    t.Attention = Attention;
    t.AttentionGrad = AttentionGrad;
    t.SwiGlu = SwiGlu;
    t.SwiGluGrad = SwiGluGrad;
    t.Add = Add;
    t.AddGrad = AddGrad;
    t.CopyRows = CopyRows;
    t.GatherRows = GatherRows;
    t.GatherRowsGrad = GatherRowsGrad;
    t.Softmax = Softmax;
    t.SoftmaxGrad = SoftmaxGrad;
    t.LogSoftmax = LogSoftmax;
    t.LogSoftmaxGrad = LogSoftmaxGrad;
    t.CrossEntropy = CrossEntropy;
    t.CrossEntropyGrad = CrossEntropyGrad;
    t.LinearCrossEntropy = LinearCrossEntropy;
    t.LinearDistill = LinearDistill;
    t.TopLogprobs = TopLogprobs;
    t.Dequantize = Dequantize;
    t.AdamW = AdamW;
    t.SumSquares = SumSquares;
    t.Sample = Sample;
    t.Scan = Scan;
    t.DecomposeK = DecomposeK;
    return t;
  }();
  return table;
}

}  // namespace stillhouse::cuda
