// The ids of the requests in flight: two live ones may not share an id.
#ifndef STILLHOUSE_SERVER_SERVICE_LIVE_REQUESTS_H_
#define STILLHOUSE_SERVER_SERVICE_LIVE_REQUESTS_H_

#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace stillhouse {

// Ids are one tenant's own: equal ids of two tenants do not meet. Thread-safe; must outlive its leases.
class LiveRequests {
 public:
  // Holds an id until it is destroyed.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept
        : owner_(std::exchange(other.owner_, nullptr)), key_(std::move(other.key_)), id_(std::move(other.id_)) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(owner_, other.owner_);
      std::swap(key_, other.key_);
      std::swap(id_, other.id_);
      return *this;
    }
    ~Lease() {
      if (owner_ != nullptr) owner_->Remove(key_);
    }
    const std::string& id() const { return id_; }

   private:
    friend class LiveRequests;
    Lease(LiveRequests* owner, std::string key, std::string id)
        : owner_(owner), key_(std::move(key)), id_(std::move(id)) {}
    LiveRequests* owner_ = nullptr;
    std::string key_, id_;
  };

  // INVALID_ARGUMENT unless `id` is a UUID (empty: one is made); ALREADY_EXISTS while another live request has it.
  absl::StatusOr<Lease> Add(std::string_view tenant, std::string_view id) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Remove(const std::string& key) ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Mutex mutex_;
  absl::flat_hash_set<std::string> ids_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_LIVE_REQUESTS_H_
