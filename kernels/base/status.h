// Status plumbing. A function that can fail because of input, disk, network or memory returns absl::Status or StatusOr.
#ifndef STILLHOUSE_KERNELS_BASE_STATUS_H_
#define STILLHOUSE_KERNELS_BASE_STATUS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define STILLHOUSE_CONCAT_INNER_(a, b) a##b
#define STILLHOUSE_CONCAT_(a, b) STILLHOUSE_CONCAT_INNER_(a, b)

// Returns early with the status of `expr` unless it is OK.
#define STILLHOUSE_RETURN_IF_ERROR(expr)                     \
  do {                                                       \
    absl::Status stillhouse_status_ = (expr);                \
    if (!stillhouse_status_.ok()) return stillhouse_status_; \
  } while (false)

// STILLHOUSE_ASSIGN_OR_RETURN(auto x, MakeX()): declares or assigns x, or returns early with the error.
#define STILLHOUSE_ASSIGN_OR_RETURN(lhs, expr) \
  STILLHOUSE_ASSIGN_OR_RETURN_IMPL_(STILLHOUSE_CONCAT_(stillhouse_or_, __LINE__), lhs, expr)
#define STILLHOUSE_ASSIGN_OR_RETURN_IMPL_(var, lhs, expr) \
  auto var = (expr);                                      \
  if (!var.ok()) return std::move(var).status();          \
  lhs = std::move(var).value()

#endif  // STILLHOUSE_KERNELS_BASE_STATUS_H_
