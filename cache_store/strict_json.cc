#include "cache_store/strict_json.h"
#include "kernels/base/strings.h"

#include <string>
#include <utility>
#include <vector>

namespace stillhouse {
namespace {

using nlohmann::json;

// Builds the value itself, because nlohmann's own builder keeps the last of two equal keys without a word.
class Builder : public nlohmann::json_sax<json> {
 public:
  explicit Builder(const JsonLimits& limits) : limits_(limits) {}

  bool null() override { return Add(json(nullptr)); }
  bool boolean(bool value) override { return Add(json(value)); }
  bool number_integer(number_integer_t value) override { return Add(json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return Add(json(value)); }
  bool number_float(number_float_t value, const string_t&) override { return Add(json(value)); }
  bool string(string_t& value) override { return Add(json(std::move(value))); }
  bool binary(binary_t&) override { return Fail("binary value"); }
  bool start_object(size_t) override { return Open(json::object()); }
  bool start_array(size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& value) override {
    if (stack_.back()->contains(value)) return Fail("duplicate key");
    key_ = std::move(value);
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return Fail(StrCat("bad syntax or UTF-8 at byte ", position));
  }

  const std::string& error() const { return error_; }
  json Take() { return std::move(root_); }

 private:
  bool Fail(std::string error) {
    if (error_.empty()) error_ = std::move(error);
    return false;
  }
  json* Place(json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    return &(parent[std::move(key_)] = std::move(value));
  }
  bool Add(json value) {
    if (++values_ > limits_.values) return Fail("too many values");
    Place(std::move(value));
    return true;
  }
  bool Open(json value) {
    if (++values_ > limits_.values) return Fail("too many values");
    if (stack_.size() >= limits_.depth) return Fail("nested too deeply");
    // The pointer stays good: a container grows only while it is the innermost one.
    stack_.push_back(Place(std::move(value)));
    return true;
  }
  bool Close() {
    stack_.pop_back();
    return true;
  }

  const JsonLimits limits_;
  json root_;
  std::vector<json*> stack_;
  std::string key_;
  size_t values_ = 0;
  std::string error_;
};

}  // namespace

absl::StatusOr<nlohmann::json> ParseStrictJson(std::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.bytes) {
    return absl::InvalidArgumentError(StrCat("JSON of ", text.size(), " bytes; at most ", limits.bytes));
  }
  // The parser takes NUL for the end of its input, which would let anything follow it; it also skips a byte-order mark.
  if (text.find('\0') != text.npos) return absl::InvalidArgumentError("JSON with a NUL byte");
  if (text.substr(0, 3) == "\xEF\xBB\xBF") return absl::InvalidArgumentError("JSON with a byte-order mark");
  Builder builder(limits);
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &builder)) {
    return absl::InvalidArgumentError(StrCat("bad JSON: ", builder.error()));
  }
  return builder.Take();
}

}  // namespace stillhouse
