#ifndef STILLHOUSE_SERVER_LOAD_TOKENIZER_FROM_GGUF_H_
#define STILLHOUSE_SERVER_LOAD_TOKENIZER_FROM_GGUF_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/load/gguf.h"
#include "server/token/tokenizer.h"

namespace stillhouse {

// The tokenizer in a file's `tokenizer.ggml.*` keys. Copies what it needs: the file may be closed. UNIMPLEMENTED for a
// kind of tokenizer that is not byte-level BPE or an unknown pre-tokenizer, INVALID_ARGUMENT for keys that contradict
// each other.
absl::StatusOr<std::unique_ptr<Tokenizer>> TokenizerFromGguf(const GgufFile& file);

// `tokenizer.chat_template`, for ChatTemplate::Create; empty if the file has none. INVALID_ARGUMENT if it is not a
// string or longer than 256 KiB.
absl::StatusOr<std::string> ChatTemplateFromGguf(const GgufFile& file);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_LOAD_TOKENIZER_FROM_GGUF_H_
