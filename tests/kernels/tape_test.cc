#include "kernels/autograd/tape.h"

#include <gtest/gtest.h>

#include "kernels/ops/elementwise.h"
#include "kernels/ops/gather.h"
#include "kernels/ops/matmul.h"
#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

// A small network with a residual, used twice: x + W2·silu(gate)·up of W1·x.
Tensor Block(const Context& ctx, const Tensor& x, const Tensor& w1, const Tensor& w2) {
  const Tensor both = Linear(ctx, x, w1);
  const int64_t half = both.dim(1) / 2;
  return Add(ctx, x, Linear(ctx, SwiGlu(ctx, both.Slice(1, 0, half), both.Slice(1, half, 2 * half)), w2));
}

struct Net {
  Tensor x, w1, w2, seed;
};

Net MakeNet(const Context& ctx, uint32_t stream) {
  std::mt19937 rng = TestRng(stream);
  const int64_t rows = 5, width = 8, hidden = 12;
  return {ToTensor(ctx, RandomValues(rng, rows * width), {rows, width}),
          ToTensor(ctx, RandomValues(rng, 2 * hidden * width, 0.3), {2 * hidden, width}),
          ToTensor(ctx, RandomValues(rng, width * hidden, 0.3), {width, hidden}),
          ToTensor(ctx, RandomValues(rng, rows * width), {rows, width})};
}

TEST(Tape, ViewsShareTheGradientOfTheirStorage) {
  Tape tape(BackendForTests());
  const Context ctx = TestContext(&tape);
  std::mt19937 rng = TestRng(60);
  const Tensor x = ToTensor(ctx, RandomValues(rng, 24), {4, 6});
  tape.Watch(x);
  // Rows 0..2 as they are plus rows 1..3, reshaped: overlapping views.
  const Tensor out = Add(ctx, x.Slice(0, 0, 3), x.Slice(0, 1, 4));
  const Doubles w = RandomValues(rng, 18);
  tape.BackwardFrom({out}, {ToTensor(ctx, w, {3, 6})});
  Doubles want(24, 0.0);
  for (int64_t i = 0; i < 18; ++i) {
    want[i] += w[i];
    want[i + 6] += w[i];
  }
  EXPECT_LE(RelativeError(tape.Grad(x), want), 1e-7);
  // A view's gradient is a view of the gradient.
  EXPECT_EQ(tape.Grad(x.Slice(0, 2, 3)).f32(), tape.Grad(x).f32() + 12);
  EXPECT_EQ(tape.Grad(x.Reshape({24})).f32(), tape.Grad(x).f32());
}

TEST(Tape, CheckpointEqualsPlain) {
  Doubles grads[2][3], outs[2];
  for (bool checkpoint : {false, true}) {
    Tape tape(BackendForTests());
    const Context ctx = TestContext(&tape);
    const Net net = MakeNet(ctx, 61);
    for (const Tensor& t : {net.x, net.w1, net.w2}) tape.Watch(t);
    const CheckpointFn layer = [&net](const Context& inner, const std::vector<Tensor>& inputs) {
      return std::vector<Tensor>{Block(inner, inputs[0], net.w1, net.w2)};
    };
    Tensor h = net.x;
    for (int i = 0; i < 3; ++i) {
      h = checkpoint ? Checkpoint(ctx, layer, {h}, {net.w1, net.w2})[0] : layer(ctx, {h})[0];
    }
    outs[checkpoint] = ToDoubles(h);
    EXPECT_TRUE(!checkpoint || tape.size() == 3u);
    tape.BackwardFrom({h}, {net.seed});
    int i = 0;
    for (const Tensor& t : {net.x, net.w1, net.w2}) grads[checkpoint][i++] = ToDoubles(tape.Grad(t));
  }
  EXPECT_EQ(outs[0], outs[1]);
  for (int i = 0; i < 3; ++i) EXPECT_LE(RelativeError(grads[1][i], grads[0][i]), 1e-6) << i;
}

TEST(Tape, NestedCheckpointsWork) {
  Doubles grads[2];
  for (bool nested : {false, true}) {
    Tape tape(BackendForTests());
    const Context ctx = TestContext(&tape);
    const Net net = MakeNet(ctx, 62);
    tape.Watch(net.w1);
    const CheckpointFn layer = [&net](const Context& inner, const std::vector<Tensor>& inputs) {
      return std::vector<Tensor>{Block(inner, inputs[0], net.w1, net.w2)};
    };
    const CheckpointFn two = [&](const Context& inner, const std::vector<Tensor>& inputs) {
      return Checkpoint(inner, layer, Checkpoint(inner, layer, inputs, {net.w1}), {net.w1});
    };
    const Tensor out = nested ? Checkpoint(ctx, two, {net.x}, {net.w1})[0] : layer(ctx, layer(ctx, {net.x}))[0];
    tape.BackwardFrom({out}, {net.seed});
    grads[nested] = ToDoubles(tape.Grad(net.w1));
  }
  EXPECT_LE(RelativeError(grads[1], grads[0]), 1e-6);
}

// A function with two outputs of which one is used, an output that depends on no wanted input, and gradients that reach
// a view of an output.
TEST(Tape, CheckpointWithPartlyUsedOutputs) {
  Tape tape(BackendForTests());
  const Context ctx = TestContext(&tape);
  const Net net = MakeNet(ctx, 63);
  tape.Watch(net.x);
  const CheckpointFn fn = [&net](const Context& inner, const std::vector<Tensor>& inputs) {
    return std::vector<Tensor>{Add(inner, inputs[0], inputs[0]), Add(inner, net.seed, net.seed),
                               Block(inner, inputs[0], net.w1, net.w2)};
  };
  const std::vector<Tensor> outputs = Checkpoint(ctx, fn, {net.x});
  const Tensor part = outputs[0].Slice(0, 1, 3);
  const Tensor used = Add(ctx, part, part);
  tape.BackwardFrom({used}, {net.seed.Slice(0, 1, 3)});
  Doubles want(40, 0.0);
  const Doubles seed = ToDoubles(net.seed);
  for (int i = 8; i < 24; ++i) want[i] = 4.0 * seed[i];
  EXPECT_LE(RelativeError(tape.Grad(net.x), want), 1e-6);
}

TEST(Tape, UnwantedInputsCostNothing) {
  Tape tape(BackendForTests());
  const Context ctx = TestContext(&tape);
  const Net net = MakeNet(ctx, 64);
  // Nothing is watched: nothing is recorded.
  Block(ctx, net.x, net.w1, net.w2);
  EXPECT_EQ(tape.size(), 0u);
  // Only x: the weights have no gradient buffers.
  tape.Watch(net.x);
  const Tensor out = Block(ctx, net.x, net.w1, net.w2);
  EXPECT_EQ(tape.size(), 4u);
  tape.BackwardFrom({out}, {net.seed});
  EXPECT_TRUE(tape.HasGrad(net.x));
  EXPECT_FALSE(tape.HasGrad(net.w1));
  EXPECT_FALSE(tape.Grad(net.w1).defined());
  EXPECT_EQ(tape.size(), 0u);
}

TEST(Tape, BackwardSkipsBranchesWithoutGradient) {
  Tape tape(BackendForTests());
  const Context ctx = TestContext(&tape);
  const Net net = MakeNet(ctx, 65);
  tape.Watch(net.x);
  const Tensor used = Add(ctx, net.x, net.x);
  int ran = 0;
  const Tensor unused = ctx.EmptyF32({1});
  tape.Record("Probe", {unused}, [&](Tape&) { ++ran; });
  tape.BackwardFrom({used}, {net.seed});
  EXPECT_EQ(ran, 0);
}

TEST(Tape, PauseRecordsNothing) {
  Tape tape(BackendForTests());
  const Context ctx = TestContext(&tape);
  const Net net = MakeNet(ctx, 66);
  tape.Watch(net.x);
  {
    Tape::Pause pause(&tape);
    Tape::Pause again(&tape);
    EXPECT_FALSE(tape.Wants(net.x));
    Block(ctx, net.x, net.w1, net.w2);
  }
  EXPECT_EQ(tape.size(), 0u);
  EXPECT_TRUE(tape.Wants(net.x));
  Tape::Pause none(nullptr);
}

TEST(Tape, BackwardSeedsALossAndFreesWhatWasSaved) {
  Tape tape(BackendForTests());
  const Context ctx = TestContext(&tape);
  const Tensor x = ToTensor(ctx, {3.0}, {1, 1}), w = ToTensor(ctx, {2.0}, {1, 1});
  tape.Watch(w);
  {
    const Tensor out = Linear(ctx, x, w);
    tape.Backward(out, 0.5f);
  }
  EXPECT_EQ(ToDoubles(tape.Grad(w))[0], 1.5);
  // Leaf gradients outlive the pass, and a second one adds to them.
  tape.Backward(Linear(ctx, x, w), 1.0f);
  EXPECT_EQ(ToDoubles(tape.Grad(w))[0], 4.5);
}

TEST(Tape, MemoryOfIntermediatesReturnsDuringBackward) {
  BufferPool& pool = BackendForTests().pool();
  const Context plain = TestContext();
  const Net net = MakeNet(plain, 67);
  const size_t before = pool.lent_bytes();
  {
    Tape tape(BackendForTests());
    const Context ctx = TestContext(&tape);
    tape.Watch(net.x);
    {
      Tensor h = net.x;
      for (int i = 0; i < 6; ++i) h = Block(ctx, h, net.w1, net.w2);
      tape.BackwardFrom({h}, {net.seed});
    }
    // What is left is the gradient of the leaf.
    EXPECT_LE(pool.lent_bytes() - before, 4096u);
  }
  EXPECT_EQ(pool.lent_bytes(), before);
}

TEST(TapeDeathTest, ALossThatDependsOnNothingIsABug) {
  Tape tape(BackendForTests());
  const Tensor loss = ToTensor(TestContext(), {1.0}, {1});
  EXPECT_DEATH(tape.Backward(loss), "does not depend");
}

}  // namespace
}  // namespace stillhouse::testing
