// One direction of a faulty queue: the decision what happens to each datagram, and the memory of those that wait.
// Internal to the port. One thread, except the counters.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/mapping.h"
#include "base/prng.h"
#include "base/result.h"
#include "transport/port/faulty/faulty_port.h"
#include "transport/port/link_faults.h"

namespace sluice::port {

// Written by the owner of the queue, read by any thread.
struct LiveFaults {
  std::array<std::atomic<uint64_t>, kFaults> fired{};
};

// The luck of one peer in one direction.
struct Way {
  explicit Way(uint64_t seed) : random(seed) {}
  Prng random;
  LinkFaults faults;
  bool cut = false;
  bool bad = false;  // Gilbert-Elliott state
};

// A datagram in pieces that lie wherever they lie, and what must be known to deliver a copy of it later.
struct Passing {
  std::array<std::span<const std::byte>, 3> pieces;
  size_t length = 0;
  uint32_t link = 0;
  Endpoint source;  // on the way in
  bool congestion_experienced = false;
};

// A copy that waits.
struct Held {
  Micros due = 0;
  uint64_t order = 0;  // of being held: equal times keep it
  uint32_t slot = 0;
  uint32_t length = 0;
  uint32_t link = 0;
  bool congestion_experienced = false;
  Endpoint source;
};

class Pipe {
 public:
  static constexpr uint32_t kNoLink = UINT32_MAX;
  static constexpr uint32_t kStrangers = UINT32_MAX - 1;  // all sources that were never made known

  // `replays`: old datagrams are kept as well.
  Result<void> allocate(size_t slots, uint32_t slot_bytes, bool replays);
  void count_in(LiveFaults* counters) { counters_ = counters; }
  void count(Fault fault);

  // Draws what happens to a datagram. True: it passes as it is. False: it is lost, or a copy was held; either way the
  // original is done with. Held copies made by this call: held() before and after.
  bool judge(Way* way, const Passing& datagram, Micros now);

  size_t held() const { return heap_.size(); }
  Micros next_due() const { return heap_.empty() ? kNever : heap_.front().due; }
  Held pop();                       // the one that is due first; its slot stays taken
  void put_back(const Held& held);  // after pop: it could not leave

  std::byte* data(uint32_t slot) const { return memory_.data() + size_t{slot} * slot_bytes_; }
  void free_slot(uint32_t slot) { free_slots_.push_back(slot); }
  size_t slots() const { return slots_; }
  // No old datagrams of this link any more.
  void forget(uint32_t link);

 private:
  struct Old {
    uint32_t length = 0;
    uint32_t link = kNoLink;
    bool congestion_experienced = false;
    Endpoint source;
  };
  bool depart(Way* way, const Passing& datagram, Micros now, bool copy);
  void replay(Way* way, const Passing& datagram, Micros now);
  void record(Way* way, const Passing& datagram);

  Mapping memory_;  // slots, then old datagrams
  size_t slots_ = 0;
  uint32_t slot_bytes_ = 0;
  std::vector<uint32_t> free_slots_;
  std::vector<Held> heap_;  // due first in front
  uint64_t order_ = 0;
  std::vector<Old> old_;
  size_t olds_ = 0;  // in use
  LiveFaults* counters_ = nullptr;
};

}  // namespace sluice::port
