// The nodes of one job over a virtual network, in one thread and in virtual time: real lanes (transport/exchange), the
// loop of a daemon's engine around them, and trainers that call ops and wait for them.
//
// A node does at each of its moments what the engine does: hand in the packets that have arrived, submit what its
// trainers call, tick when a timer is due, send while its device has room, hand out events. Computation costs no
// virtual time; cables, delays, computations of trainers and pauses do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/prng.h"
#include "tests/simulation/checker.h"
#include "tests/simulation/gradients.h"
#include "tests/simulation/options.h"
#include "transport/exchange/lane.h"
#include "transport/port/sim/network.h"

namespace sluice::simulation {

// What happened in a run, for summaries.
struct RunFacts {
  uint64_t hash = 0;  // of every datagram sent and every event, in order
  Micros virtual_us = 0;
  uint64_t datagrams = 0, bytes = 0;
  uint64_t by_type[wire::kTypes] = {};
  uint64_t drops[static_cast<size_t>(wire::Drop::kCount)] = {};
  uint64_t results[32] = {};  // by Status
  uint64_t misrouted = 0, forged = 0, source_mismatch = 0, pauses = 0, late_submits = 0, not_sent = 0;
  uint64_t older_view = 0, long_pauses = 0, crashes = 0, aborts = 0, rejoins = 0;
  uint64_t blocks_repaired = 0;
  uint64_t results_waited_lag = 0;  // RESULTs that spent over 1 ms in lag_wait
  Micros lag_max = 0;
  port::sim::NetworkCounters network;
};

class Cluster {
 public:
  Cluster(const Options& options, const Gradients& gradients, std::vector<std::unique_ptr<Checker>> checkers);
  ~Cluster();
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  // Runs the program to its end, heals what is not healed, lets everything come to rest, and asks the checkers.
  RunFacts run();

  // Called with every datagram before it is sent; false: it is lost. For tests that lose chosen packets.
  using Filter = bool (*)(const wire::Header& header, uint32_t from, uint32_t to, void* context);
  void set_filter(Filter filter, void* context) {
    filter_ = filter;
    filter_context_ = context;
  }
  // Datagrams of an older view of the job, which come in between (Options::older_view).
  struct Old {
    uint32_t from = 0, to = 0;  // endpoints
    std::vector<std::byte> bytes;
  };
  void set_older_view(std::vector<Old> datagrams) { older_view_ = std::move(datagrams); }
  // A sample of what was sent.
  std::vector<Old> take_sample() { return std::move(old_); }
  // Prints every event (not every packet) as it happens.
  void set_verbose(bool verbose) { verbose_ = verbose; }
  // Prints every packet of this op, too; kAllOps: every packet.
  static constexpr uint32_t kNoOp = UINT32_MAX, kAllOps = UINT32_MAX - 1;
  void set_watched_op(uint32_t op) { watched_op_ = op; }

 private:
  struct Call {  // an op of one rank between submit and RESOLVED
    std::vector<std::byte> contribution, result;
    uint64_t contribution_hash = 0;
    Micros submitted = 0, paused_before = 0;
    uint32_t lanes_result = 0, lanes_resolved = 0;
    Completion completion;
  };
  struct Released {  // slots of an op after RESOLVED, kept for a while to see that nobody uses them
    uint32_t rank = 0, op = 0;
    std::vector<std::byte> contribution, result;
    uint64_t hash = 0;
  };
  struct Rank {
    uint32_t id = 0, node = 0, local = 0;
    uint32_t next_op = 0, without_result = 0, without_resolved = 0;
    Micros ready = 0;  // when the next op may be called
    // By tag of the gradients: lanes whose debts the rank has taken before `taken_before` (or, last, at the end).
    std::vector<uint64_t> taken;
    uint32_t taken_before = UINT32_MAX;
    bool retiring = false;  // waits for open fates, and for the others, before its next op
    std::map<uint32_t, Call> calls;
  };
  struct Unsent {     // taken from a lane, not yet by the device
    uint32_t to = 0;  // endpoint
    std::vector<std::byte> bytes;
  };
  struct Node {
    std::vector<std::unique_ptr<exchange::Lane>> lanes;
    std::vector<Rank*> ranks;
    std::vector<Unsent> unsent;
    size_t unsent_first = 0;
    bool more_to_send = false;
    bool crashed = false;
    bool touched = false;  // something arrived since it ran
    Micros wake = 0;
    Micros paused = 0;        // in all, until now
    Micros pause_seen = 0;    // end of the pause that was counted last
    uint32_t first_lane = 0;  // rotates
  };

  exchange::Settings settings_for(uint32_t node, uint32_t lane) const;
  void arrive(uint32_t from, uint32_t to, std::span<const std::byte> bytes);
  void deliver(uint32_t from_node, uint32_t node, uint32_t lane, std::span<const std::byte> bytes,
               Delivered::Kind kind = Delivered::Kind::kInTime);
  void everything_again();
  void release(uint32_t rank, uint32_t op, Call* call);
  void look_at_released(size_t keep);
  void replay_older_view();
  void misroute_and_forge(uint32_t from, uint32_t to, std::span<const std::byte> bytes);
  bool genuine(uint32_t from_node, uint32_t lane, std::span<const std::byte> bytes) const;
  void run_node(uint32_t node);
  void share_failure(Node* node);
  bool submit_ready(Rank* rank);
  bool take_debts(Rank* rank, uint32_t tag, bool last);
  bool retire_at_end(Rank* rank);
  void retire_single_ops(Rank* rank);
  bool flushed(Rank* rank, uint32_t op, uint32_t tag);
  void schedule_next_call(Rank* rank);
  bool send_all(uint32_t node);
  bool send_one(uint32_t node, uint32_t lane, const exchange::Outgoing& packet);
  bool flush_unsent(Node* node, uint32_t index);
  bool take_events(uint32_t node);
  void take_event(uint32_t node, uint32_t lane, const exchange::Event& event);
  void update_wake(uint32_t node);
  void heal();
  bool all_resolved() const;
  bool all_at_rest() const;
  std::string who_waits() const;
  void note(uint64_t a, uint64_t b);
  void print_packet(const char* what, uint32_t from, uint32_t to, const wire::Header& header,
                    size_t payload) const;

  const Options& options_;
  const Gradients& gradients_;
  std::vector<std::unique_ptr<Checker>> checkers_;
  port::sim::Network network_;
  Prng random_;  // of trainers; faults of the harness have their own
  Prng fault_random_;
  std::vector<Rank> ranks_;
  std::map<uint32_t, uint32_t> flushed_;  // by op: ranks that have taken what they owe
  std::vector<Node> nodes_;
  std::vector<std::vector<uint64_t>> sent_;  // hash by counter, per (node, lane)
  Filter filter_ = nullptr;
  void* filter_context_ = nullptr;
  bool verbose_ = false;
  uint32_t watched_op_ = kNoOp;
  bool healed_ = false;
  bool aborted_ = false;
  Micros last_progress_ = 0;
  uint32_t furthest_ = 0;  // ops called by the rank that is ahead
  std::vector<std::byte> scratch_;
  std::deque<Released> released_;
  std::vector<Old> old_;  // come again at the end
  std::vector<Old> older_view_;
  RunFacts facts_;
};

}  // namespace sluice::simulation
