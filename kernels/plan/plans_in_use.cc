#include "kernels/plan/plans_in_use.h"

namespace stillhouse {
namespace {

PlanBook& Mutable() {
  static auto* const book = new PlanBook(PlanBook::Shipped());
  return *book;
}

}  // namespace

void UsePlans(const PlanBook& book) { Mutable().AddAll(book); }
const PlanBook& PlansInUse() { return Mutable(); }

}  // namespace stillhouse
