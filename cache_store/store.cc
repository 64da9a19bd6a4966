#include "cache_store/store.h"

#include "kernels/base/status.h"

namespace stillhouse {

absl::StatusOr<ArtifactRow> Store::PutArtifact(const ArtifactSpec& spec, std::string_view bytes) {
  STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<BlobWriter> blob, NewBlob());
  STILLHOUSE_RETURN_IF_ERROR(blob->Append(bytes));
  return PutArtifact(spec, blob.get());
}

bool IsResourceId(std::string_view id) {
  if (id.empty() || id.size() > 63 || id.back() == '-') return false;
  if (id[0] < 'a' || id[0] > 'z') return false;
  for (char c : id) {
    if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-')) return false;
  }
  return true;
}

}  // namespace stillhouse
