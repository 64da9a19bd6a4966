// Any bytes as a plan file: refused with a status, or a book that reads what it prints.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/base/logging.h"
#include "kernels/plan/plan_book.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto book = stillhouse::PlanBook::Parse(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!book.ok()) return 0;
  const auto again = stillhouse::PlanBook::Parse(book->Print());
  STILLHOUSE_CHECK(again.ok() && again->Print() == book->Print()) << book->Print();
  return 0;
}
