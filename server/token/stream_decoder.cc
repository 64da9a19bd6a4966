#include "server/token/stream_decoder.h"

#include <algorithm>
#include <utility>

#include "kernels/base/logging.h"
#include "kernels/base/strings.h"
#include "server/token/utf8.h"

namespace stillhouse {

absl::StatusOr<StreamDecoder> StreamDecoder::Create(const Tokenizer* tokenizer, Options options) {
  for (size_t i = 0; i < options.stop.size(); ++i) {
    if (options.stop[i].empty()) {
      return absl::InvalidArgumentError(StrCat("stop string ", i, " is empty; leave it out"));
    }
    if (!IsValidUtf8(options.stop[i])) {
      return absl::InvalidArgumentError(StrCat("stop string ", i, " is not valid UTF-8"));
    }
  }
  return StreamDecoder(tokenizer, std::move(options));
}

absl::StatusOr<StreamDecoder> StreamDecoder::Create(const Tokenizer* tokenizer) { return Create(tokenizer, Options()); }

StreamDecoder::StreamDecoder(const Tokenizer* tokenizer, Options options)
    : tokenizer_(tokenizer), options_(std::move(options)) {
  STILLHOUSE_CHECK(tokenizer_ != nullptr) << "a decoder needs a tokenizer";
}

std::string StreamDecoder::Push(int32_t id) {
  if (stopped_ || finished_) return {};
  if (options_.skip_control && tokenizer_->IsControl(id)) return {};
  bytes_ += tokenizer_->TokenBytes(id);
  std::string rest;
  AppendAsUtf8(bytes_, &text_, &rest);
  bytes_ = std::move(rest);
  return Release(/*at_end=*/false);
}

std::string StreamDecoder::Finish() {
  if (stopped_ || finished_) return {};
  finished_ = true;
  AppendAsUtf8(bytes_, &text_);
  bytes_.clear();
  return Release(/*at_end=*/true);
}

std::string StreamDecoder::Release(bool at_end) {
  // The stop string that ends first; nothing before text_ can belong to one.
  size_t first_end = std::string::npos;
  for (size_t i = 0; i < options_.stop.size(); ++i) {
    const size_t begin = text_.find(options_.stop[i]);
    if (begin == std::string::npos) continue;
    const size_t end = begin + options_.stop[i].size();
    const bool longer = end == first_end && options_.stop[i].size() > options_.stop[stop_index_].size();
    if (end < first_end || longer) {
      first_end = end;
      stop_index_ = i;
    }
  }
  if (first_end != std::string::npos) {
    stopped_ = true;
    text_.resize(first_end - options_.stop[stop_index_].size());
    bytes_.clear();
    return std::exchange(text_, {});
  }
  if (at_end) return std::exchange(text_, {});
  size_t held = 0;  // the longest end of the text that begins a stop string
  for (const std::string& stop : options_.stop) {
    for (size_t n = std::min(stop.size() - 1, text_.size()); n > held; --n) {
      if (text_.compare(text_.size() - n, n, stop, 0, n) == 0) held = n;
    }
  }
  std::string ready = text_.substr(0, text_.size() - held);
  text_.erase(0, ready.size());
  return ready;
}

}  // namespace stillhouse
