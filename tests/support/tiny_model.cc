#include "tests/support/tiny_model.h"

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/base/logging.h"
#include "kernels/base/strings.h"
#include "server/token/byte_alphabet.h"

namespace stillhouse::testing {
namespace {

constexpr const char* kControlTokens[] = {
    "<|endoftext|>",  "<|im_start|>",   "<|im_end|>",       "<repo_name>",      "<reponame>",     "<file_sep>",
    "<filename>",     "<gh_stars>",     "<issue_start>",    "<issue_comment>",  "<issue_closed>", "<jupyter_start>",
    "<jupyter_text>", "<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>"};

// In the byte alphabet: "Ġ" is a space.
constexpr const char* kMerges[] = {
    "Ġ t",     "Ġ a",  "i n",        "h e",  "r e",  "o n",   "e r",     "Ġt he", "a t",   "Ġ s",  "Ġ o",    "e n",
    "Ġ c",     "e s",  "Ġ w",        "n d",  "i t",  "o r",   "i s",     "a l",   "Ġ p",   "in g", "Ġ f",    "a n",
    "e d",     "Ġ b",  "o u",        "a r",  "Ġ in", "Ġo f",  "Ġ m",     "Ġa nd", "i on",  "i c",  "Ġ d",    "Ġt o",
    "l e",     "r o",  "a s",        "en t", "Ġ is", "Ġ h",   "u s",     "us er", "s t",   "as s", "ass is", "t ant",
    "assis t", "an t", "assist ant", "s y",  "st e", "ste m", "sy stem", "y ou",  "Ġ you", "W h",  "Wh at",  "Ġ Ġ"};

constexpr const char* kTemplate =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful "
    "AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + "
    "'\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif "
    "%}";

// SplitMix64: the same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  double Uniform() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }
  // Nearly normal, of unit variance: a sum of twelve uniforms.
  float Normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += Uniform();
    return static_cast<float>(sum);
  }
  std::vector<float> Normals(uint64_t count, float mean, float deviation) {
    std::vector<float> values(count);
    for (float& v : values) v = mean + deviation * Normal();
    return values;
  }

 private:
  uint64_t state_;
};

}  // namespace

TokenizerData TinyTokenizerData() {
  TokenizerData data;
  for (const char* token : kControlTokens) {
    data.tokens.push_back(token);
    data.types.push_back(TokenType::kControl);
  }
  for (int byte = 0; byte < 256; ++byte) data.tokens.push_back(ByteToAlphabet(static_cast<uint8_t>(byte)));
  // Some merges are only steps of others; a merge stands after those that make its parts.
  const auto known = [&](const std::string& text) {
    for (const std::string& token : data.tokens) {
      if (token == text) return true;
    }
    return false;
  };
  std::vector<std::pair<std::string, std::string>> waiting;
  for (const std::string merge : kMerges)
    waiting.emplace_back(merge.substr(0, merge.find(' ')), merge.substr(merge.find(' ') + 1));
  for (size_t before = waiting.size() + 1; waiting.size() < before;) {
    before = waiting.size();
    std::vector<std::pair<std::string, std::string>> later;
    for (const auto& merge : waiting) {
      if (!known(merge.first) || !known(merge.second)) {
        later.push_back(merge);
        continue;
      }
      data.merges.push_back(merge);
      if (!known(merge.first + merge.second)) data.tokens.push_back(merge.first + merge.second);
    }
    waiting = std::move(later);
  }
  STILLHOUSE_CHECK(waiting.empty()) << waiting[0].first << " " << waiting[0].second;
  data.types.resize(data.tokens.size(), TokenType::kNormal);
  data.pre = PreTokenizer::kSmolLm;
  data.bos = 1;
  data.eos = 2;
  data.pad = 2;
  return data;
}

GgufWriter TinyModel(const TinyModelOptions& o) {
  GgufWriter writer;
  const std::string arch = o.architecture;
  writer.AddString("general.architecture", arch);
  writer.AddString("general.name", "Tiny");
  writer.AddU32(arch + ".block_count", o.layers);
  writer.AddU32(arch + ".context_length", o.context);
  writer.AddU32(arch + ".embedding_length", o.hidden);
  writer.AddU32(arch + ".feed_forward_length", o.ffn);
  writer.AddU32(arch + ".attention.head_count", o.heads);
  writer.AddU32(arch + ".attention.head_count_kv", o.kv_heads);
  writer.AddU32(arch + ".attention.key_length", o.head_dim);
  writer.AddU32(arch + ".attention.value_length", o.head_dim);
  writer.AddF32(arch + ".attention.layer_norm_rms_epsilon", 1e-5f);
  writer.AddU32(arch + ".rope.dimension_count", o.head_dim);
  writer.AddF32(arch + ".rope.freq_base", o.rope_theta);

  const TokenizerData tokens = TinyTokenizerData();
  writer.AddString("tokenizer.ggml.model", "gpt2");
  writer.AddString("tokenizer.ggml.pre", PreTokenizerName(tokens.pre));
  writer.AddStrings("tokenizer.ggml.tokens", tokens.tokens);
  std::vector<int32_t> types;
  for (const TokenType type : tokens.types) types.push_back(static_cast<int32_t>(type));
  writer.AddI32s("tokenizer.ggml.token_type", types);
  std::vector<std::string> merges;
  for (const auto& [left, right] : tokens.merges) merges.push_back(left + " " + right);
  writer.AddStrings("tokenizer.ggml.merges", merges);
  writer.AddU32("tokenizer.ggml.bos_token_id", *tokens.bos);
  writer.AddU32("tokenizer.ggml.eos_token_id", *tokens.eos);
  writer.AddU32("tokenizer.ggml.padding_token_id", *tokens.pad);
  writer.AddBool("tokenizer.ggml.add_bos_token", tokens.add_bos);
  writer.AddString("tokenizer.chat_template", kTemplate);

  Random random(o.seed);
  const auto vector = [&](const std::string& name, uint64_t size, float mean, float deviation) {
    writer.AddTensor(name, {size}, GgufType::kF32, random.Normals(size, mean, deviation));
  };
  // Rows of `in` values, scaled so that outputs have about the variance of the inputs.
  const auto matrix = [&](const std::string& name, uint64_t in, uint64_t out) {
    writer.AddTensor(name, {in, out}, o.matrices, random.Normals(in * out, 0, 1 / std::sqrt(static_cast<float>(in))));
  };
  const uint64_t vocabulary = tokens.tokens.size();
  const uint64_t q = static_cast<uint64_t>(o.heads) * o.head_dim;
  const uint64_t kv = static_cast<uint64_t>(o.kv_heads) * o.head_dim;
  writer.AddTensor("token_embd.weight", {o.hidden, vocabulary}, o.embedding,
                   random.Normals(o.hidden * vocabulary, 0, 0.3f));
  if (o.rope_freqs) {
    std::vector<float> divisors(o.head_dim / 2);
    for (size_t i = 0; i < divisors.size(); ++i) divisors[i] = i < divisors.size() / 2 ? 1.0f : 8.0f;
    writer.AddTensor("rope_freqs.weight", {divisors.size()}, GgufType::kF32, divisors);
  }
  for (uint32_t layer = 0; layer < o.layers; ++layer) {
    const std::string prefix = StrCat("blk.", layer, ".");
    vector(prefix + "attn_norm.weight", o.hidden, 1, 0.1f);
    matrix(prefix + "attn_q.weight", o.hidden, q);
    matrix(prefix + "attn_k.weight", o.hidden, kv);
    matrix(prefix + "attn_v.weight", o.hidden, kv);
    if (arch == "qwen2") {
      vector(prefix + "attn_q.bias", q, 0, 0.1f);
      vector(prefix + "attn_k.bias", kv, 0, 0.1f);
      vector(prefix + "attn_v.bias", kv, 0, 0.1f);
    }
    if (arch == "qwen3") {
      vector(prefix + "attn_q_norm.weight", o.head_dim, 1, 0.1f);
      vector(prefix + "attn_k_norm.weight", o.head_dim, 1, 0.1f);
    }
    matrix(prefix + "attn_output.weight", q, o.hidden);
    vector(prefix + "ffn_norm.weight", o.hidden, 1, 0.1f);
    matrix(prefix + "ffn_gate.weight", o.hidden, o.ffn);
    matrix(prefix + "ffn_up.weight", o.hidden, o.ffn);
    matrix(prefix + "ffn_down.weight", o.ffn, o.hidden);
  }
  vector("output_norm.weight", o.hidden, 1, 0.1f);
  if (!o.tied) matrix("output.weight", o.hidden, vocabulary);
  return writer;
}

namespace {
// Files that WriteTinyModel made, removed when the process ends.
struct WrittenFiles {
  std::mutex mutex;
  std::vector<std::string> paths;
  ~WrittenFiles() {
    for (const std::string& path : paths) unlink(path.c_str());
  }
};
}  // namespace

std::string WriteTinyModel(const TinyModelOptions& options) {
  static WrittenFiles written;
  static std::atomic<int> count{0};
  const char* folder = std::getenv("TMPDIR");
  const std::string path = StrCat(folder != nullptr && *folder != '\0' ? folder : "/tmp", "/stillhouse_tiny_", getpid(),
                                  "_", count++, ".gguf");
  const absl::Status status = TinyModel(options).WriteFile(path);
  STILLHOUSE_CHECK(status.ok()) << status;
  const std::lock_guard lock(written.mutex);
  written.paths.push_back(path);
  return path;
}

}  // namespace stillhouse::testing
