// What a checker of the simulator sees, and what one is. Each promise of the protocol (docs/protocol.md, section 1) is
// checked by an object of its own that knows nothing of the lanes: it sees what trainers see, and what is on the wire.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "tests/simulation/gradients.h"
#include "tests/simulation/options.h"
#include "transport/exchange/lane.h"
#include "transport/wire/packet.h"

namespace sluice::simulation {

class Violations {
 public:
  void add(const char* checker, std::string what) {
    ++count_;
    if (list_.size() < kKept) list_.push_back(std::string(checker) + ": " + std::move(what));
  }
  uint64_t count() const { return count_; }
  const std::vector<std::string>& list() const { return list_; }

 private:
  static constexpr size_t kKept = 20;
  uint64_t count_ = 0;
  std::vector<std::string> list_;
};

// RESULT or RESOLVED of one op of one rank, merged over the lanes.
struct Completion {
  uint32_t op = 0, rank = 0, node = 0;
  Status status = Status::kOk;           // of RESULT
  Status resolved_status = Status::kOk;  // of RESOLVED
  uint32_t blocks_expected = 0, blocks_received = 0, blocks_skipped = 0, blocks_uncounted = 0,
           blocks_filled = 0;
  Micros submitted = 0, now = 0;
  Micros lag = 0;     // waiting for admission, the longest of the lanes
  Micros waited = 0;  // for admission and quorum, the longest of the lanes
  bool negative_wait = false;
  Micros paused = 0;          // how long the node stood still since the submit
  uint32_t ranges_total = 0;  // missing ranges; those that were listed:
  std::vector<exchange::MissingRange> ranges;
  std::span<const std::byte> result;  // the slot
  bool contribution_intact = true;    // RESOLVED: nobody has written to the contribution
  std::string text;
};

struct Sent {
  Micros now = 0;
  uint32_t node = 0, to = 0, lane = 0;
  wire::Header header;
  std::span<const std::byte> payload;
  uint64_t hash = 0;  // of header, payload and tag
};

struct Delivered {
  Micros now = 0;
  uint32_t node = 0, lane = 0;
  uint32_t from = 0;     // node of the source address
  bool genuine = false;  // the very bytes that `from` has sent on this lane (to anybody)
  // kAgain: once more after everything has come to rest. kOlderView: of the job, but before this view of it.
  // kForged: made up by the harness. kMisrouted: it was for another node.
  enum class Kind : uint8_t { kInTime, kAgain, kOlderView, kForged, kMisrouted };
  Kind kind = Kind::kInTime;
  std::span<const std::byte> datagram;
  wire::Drop drop = wire::Drop::kNone;
};

// What one rank owed under a tag, on one lane, when it asked (take_carry).
struct Taken {
  Micros now = 0;
  uint32_t rank = 0, lane = 0;
  uint32_t tag = 0;                 // index among the tags of the gradients
  bool last = false;                // at the end of the program; else before an op that says so
  std::span<const std::byte> owed;  // accumulators of the whole tensor
};

// The end of a run: everything was resolved (or time is up), and the network has healed.
struct RunEnd {
  Micros now = 0;
  bool finished = false;                     // every op of every live rank was resolved in time
  std::string stuck;                         // else: who waits for what
  std::vector<uint32_t> live_nodes;          // not crashed
  std::vector<const exchange::Lane*> lanes;  // of live nodes
};

class Checker {
 public:
  explicit Checker(Violations* violations) : violations_(violations) {}
  virtual ~Checker() = default;
  Checker(const Checker&) = delete;
  Checker& operator=(const Checker&) = delete;

  virtual const char* name() const = 0;
  virtual void on_submit(Micros /*now*/, uint32_t /*rank*/, uint32_t /*op*/, Status /*answer*/) {}
  virtual void on_result(const Completion& /*completion*/) {}
  virtual void on_resolved(const Completion& /*completion*/) {}
  // The slots of an op go back to their trainer at RESOLVED. Much later the trainer looks at them again.
  virtual void on_released(uint32_t /*rank*/, uint32_t /*op*/, bool /*untouched*/) {}
  virtual void on_sent(const Sent& /*sent*/) {}
  virtual void on_delivered(const Delivered& /*delivered*/) {}
  virtual void on_taken(const Taken& /*taken*/) {}
  virtual void on_heal(Micros /*now*/, uint32_t /*last_op_submitted*/) {}
  virtual void at_end(const RunEnd& /*end*/) {}

 protected:
  void violation(std::string what) { violations_->add(name(), std::move(what)); }

 private:
  Violations* violations_;
};

// All of them, for these options. Gradients must outlive them.
std::vector<std::unique_ptr<Checker>> make_checkers(const Options& options, const Gradients& gradients,
                                                    Violations* violations);

}  // namespace sluice::simulation
