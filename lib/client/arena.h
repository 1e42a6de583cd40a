// Cuts a job's arena into slots. First fit over the free stretches in address order, neighbours merged on free: a
// training job takes a few large buffers and keeps them, so fragments stay few and the search short. All in offsets;
// the arena's memory itself is never touched.
//
// Any thread.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace sluice::client {

class ArenaAllocator {
 public:
  // Slots begin on multiples of this: what the protocol asks for, one cache line.
  static constexpr uint64_t kGranule = 64;

  explicit ArenaAllocator(uint64_t bytes);

  // The offset of `bytes` (0 counts as 1) rounded up to granules; nullopt when no free stretch is long enough.
  std::optional<uint64_t> allocate(uint64_t bytes);
  // Gives back what allocate() returned. False when `offset` is no slot's beginning; nothing is changed then.
  bool release(uint64_t offset);

  uint64_t size() const { return size_; }
  uint64_t free_bytes() const;
  uint64_t largest_free() const;

 private:
  const uint64_t size_;
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes; never two adjacent
  std::map<uint64_t, uint64_t> used_;
  uint64_t free_bytes_;
};

}  // namespace sluice::client
