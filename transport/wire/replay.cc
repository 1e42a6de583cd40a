#include <algorithm>

#include "transport/wire/seal.h"

namespace sluice::wire {

// RFC 6479: a ring of words, one more than the width needs, so that advancing clears whole words and never
// shifts.
namespace {
constexpr uint64_t kWordBits = 64;
constexpr uint64_t kWords = (ReplayWindow::kWidth + kWordBits) / kWordBits;
static_assert(kWords == 128, "a power of two: the compiler makes the index a mask");
}  // namespace

bool ReplayWindow::would_accept(uint64_t counter) const {
  if (counter == 0) return false;  // counters start at 1
  if (counter > newest_) return true;
  if (newest_ - counter >= kWidth) return false;
  return ((bits_[counter / kWordBits % kWords] >> (counter % kWordBits)) & 1) == 0;
}

bool ReplayWindow::accept(uint64_t counter) {
  if (!would_accept(counter)) return false;
  if (counter > newest_) {
    const uint64_t from = newest_ / kWordBits;
    const uint64_t steps = std::min(counter / kWordBits - from, kWords);
    for (uint64_t i = 1; i <= steps; ++i) bits_[(from + i) % kWords] = 0;
    newest_ = counter;
  }
  bits_[counter / kWordBits % kWords] |= uint64_t{1} << (counter % kWordBits);
  return true;
}

}  // namespace sluice::wire
