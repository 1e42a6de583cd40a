#include "lib/client/arena.h"

#include <algorithm>
#include <iterator>

namespace sluice::client {

ArenaAllocator::ArenaAllocator(uint64_t bytes) : size_(bytes / kGranule * kGranule), free_bytes_(size_) {
  if (size_ > 0) free_[0] = size_;
}

std::optional<uint64_t> ArenaAllocator::allocate(uint64_t bytes) {
  if (bytes > size_) return std::nullopt;  // also keeps the rounding below from overflowing
  const uint64_t wanted = std::max<uint64_t>((bytes + kGranule - 1) / kGranule, 1) * kGranule;
  const std::lock_guard lock(mutex_);
  const auto place =
      std::find_if(free_.begin(), free_.end(), [&](const auto& s) { return s.second >= wanted; });
  if (place == free_.end()) return std::nullopt;
  const auto [offset, length] = *place;
  used_[offset] = wanted;  // first: it may throw, and then nothing has changed
  if (length == wanted) {
    free_.erase(place);
  } else {
    auto node = free_.extract(place);  // moves the rest without an allocation
    node.key() = offset + wanted;
    node.mapped() = length - wanted;
    free_.insert(std::move(node));
  }
  free_bytes_ -= wanted;
  return offset;
}

bool ArenaAllocator::release(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto slot = used_.find(offset);
  if (slot == used_.end()) return false;
  auto node = used_.extract(slot);
  free_bytes_ += node.mapped();
  const auto place = free_.insert(std::move(node)).position;
  if (const auto next = std::next(place);
      next != free_.end() && place->first + place->second == next->first) {
    place->second += next->second;
    free_.erase(next);
  }
  if (place != free_.begin()) {
    if (const auto before = std::prev(place); before->first + before->second == place->first) {
      before->second += place->second;
      free_.erase(place);
    }
  }
  return true;
}

uint64_t ArenaAllocator::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return free_bytes_;
}

uint64_t ArenaAllocator::largest_free() const {
  const std::lock_guard lock(mutex_);
  uint64_t largest = 0;
  for (const auto& [offset, length] : free_) largest = std::max(largest, length);
  return largest;
}

}  // namespace sluice::client
