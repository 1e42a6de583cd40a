// The lane's inside. One class, cut by concern into files:
//   lane.cc         construction, submit and admission, packets in, done and base
//   facts.cc        events, counters, the outside of the class
//   timers.cc       repairs and reminders, deadlines
//   owner.cc        announcements, summing, closing, finishing blocks
//   contributor.cc  freezing and pushing, answers to requests for pushes
//   carry.cc        carry-over, queued slots, fates
//   correct.cc      blocks that come after an INCOMPLETE result
//   pulse.cc        pulses, policies, what is measured
//   receiver.cc     pulls, repair, results
//   output.cc       poll_send: order of what is sent, headers, sealing
//   peers.cc        PING, PONG, flow, loss of peers, aborts
//   dispute.cc      ranks that do not agree what an op is
#pragma once

#include <string>
#include <vector>

#include "transport/exchange/flow.h"
#include "transport/exchange/lane.h"
#include "transport/exchange/op.h"
#include "transport/exchange/policy.h"
#include "transport/exchange/pool.h"

namespace sluice::exchange {

inline constexpr uint32_t kPulseWindow = 2;  // of the daemons' own ops
inline constexpr uint32_t kBurst = 256;      // packets of one poll_send
inline constexpr uint32_t kRun =
    43;  // data packets in a row to one node: with a PING what one GSO call carries
inline constexpr uint32_t kTailBlocks = 3;  // protocol, section 4
inline constexpr Micros kAgain = 50;        // us after which ANNOUNCE and the last tail go out once more
inline constexpr Micros kPushBudgetUnknown = 50'000;  // P of repair timers while a class has none (section 4)
inline constexpr Micros kPhaseAge = 24LL * 3600 * 1'000'000;  // of a key (protocol, section 2)
inline constexpr Micros kRepairCap = 50'000;                  // longest repair interval
inline constexpr uint32_t kTagsPerRank = 256;            // tags whose carry-over a rank can have on a lane
inline constexpr Micros kLeastRepairCap = 1'000;         // an interval that no doubling needs to stay below
inline constexpr size_t kNameSize = 208;                 // of what name_node writes
inline constexpr Micros kSayWait = 1'000'000;            // an op that waited this long for a node names it
inline constexpr uint32_t kLongestQueued = kWindow / 4;  // ops, of base, that a slot is queued for at most
inline constexpr uint32_t kPendingOps = 256;             // submits of one rank that wait for admission

// A fixed ring; full: push says so.
template <typename T>
class Fifo {
 public:
  explicit Fifo(size_t capacity) : items_(capacity) {}
  bool empty() const { return count_ == 0; }
  bool full() const { return count_ == items_.size(); }
  size_t size() const { return count_; }
  T& front() { return items_[first_]; }
  T& at(size_t index) { return items_[(first_ + index) % items_.size()]; }
  const T& front() const { return items_[first_]; }
  bool push(const T& item) {
    if (full()) return false;
    items_[(first_ + count_++) % items_.size()] = item;
    return true;
  }
  void pop() {
    first_ = (first_ + 1) % items_.size();
    --count_;
  }
  void clear() { first_ = count_ = 0; }

 private:
  std::vector<T> items_;
  size_t first_ = 0, count_ = 0;
};

struct Peer {
  Flow flow;
  wire::ReplayWindow replay;
  uint32_t done = 0, base = 0;
  uint32_t pulse_done = 0;
  uint32_t policy = 0;  // number of its newest record, as heard
  uint32_t ranks = 0;
  Micros last_heard = 0;
  Micros next_ping = 0;
  Micros asked_policy = 0;
  Micros last_abort = 0;
  bool met = false;  // something of it has been heard
  bool suspect = false, lost = false;
  PeerState state;  // counters
};

// Something small to send, built when its turn comes.
struct Control {
  wire::Type type = wire::Type::kPing;
  uint16_t node = 0;
  bool push = false;        // REQUEST: of push blocks (the shard of `self` as owner), else of pull blocks
  bool everything = false;  // REQUEST: empty bitmap
  uint32_t block = 0;       // REQUEST_ROW, ROW: the first block
  uint32_t op_seq = 0;
  uint32_t echo = 0;  // PONG
  Micros when = 0;    // PONG: arrival of the PING
};

struct Pending {
  Submission submission;
  Micros submitted = 0;
  // The node that its admission has waited for longest so far.
  uint32_t waited_for = UINT32_MAX;
  Micros waited = 0;
};

// One block to send again.
struct Repair {
  uint32_t op_seq = 0;
  uint32_t stripe = 0;  // block of this lane
  uint16_t node = 0;
  bool push = false;
  Micros when = 0;  // the second copy of a tail: not before
};

class LaneImpl {
 public:
  LaneImpl(const Settings& settings, Micros now, std::byte* pool);

  // --- lane.cc ---
  Status submit(Micros now, const Submission& submission);
  wire::Drop on_packet(Micros now, std::span<const std::byte> datagram);
  bool drained() const;
  bool met() const { return strangers_ == 0; }
  bool idle() const;

  // --- timers.cc ---
  void tick(Micros now);
  Micros next_timer() const;

  // --- output.cc ---
  size_t poll_send(Micros now, std::span<Outgoing> out);

  // --- peers.cc ---
  void fail(Micros now, Status status, const char* text, bool tell, std::span<const uint32_t> named = {});

  Settings settings;
  uint32_t job_id, epoch;
  uint32_t n, self;
  Counters counters;
  std::vector<Peer> peers;
  Fifo<Event> events;
  Fifo<Trace> traces;
  bool failed = false;
  Status failure = Status::kOk;
  char failure_text[sizeof(Event::text)] = {};

  PeerState peer_state(uint32_t node) const;

 private:
  friend class Lane;
  // --- lane.cc ---
  static bool is_pulse(uint32_t seq) { return (seq & wire::kDaemonOps) != 0; }
  // Client ops are shared out among the lanes by blocks. A pulse is the lane's own: all blocks are here.
  Stripe stripe_of(uint32_t seq) const {
    return is_pulse(seq) ? Stripe{} : Stripe{settings.lanes, settings.lane};
  }
  Op& slot_of(uint32_t seq);
  Op* find(uint32_t seq);
  // Open ops from base on, then pulses; nullptr where none is open.
  Op* in_order(uint32_t i) {
    if (i < kWindow && base_ + i >= end_) return nullptr;
    return i < kWindow ? find(base_ + i) : find((pulse_base_ + i - kWindow) | wire::kDaemonOps);
  }
  wire::Drop window_check(uint32_t seq) const;
  bool first_in_window(const Op& op) const;
  Op* open(uint32_t seq, Micros now);
  bool describe(Op* op, OpClass op_class, ReduceKind kind, ElementType type, uint32_t fingerprint,
                uint32_t shard_blocks, uint32_t describer);
  void release(Op* op);
  wire::Drop describe_from(const wire::Header& header, Micros now, Op** out);
  bool within_lag(const Submission& submission);
  bool admit(Micros now, const Pending& pending);
  void pump_pending(Micros now);
  void heard(uint32_t node, uint32_t done, uint32_t base, Micros now);
  void through(Op* op, uint32_t node, Micros now);
  void settle(Micros now);
  bool verify(const wire::PacketView& packet, Micros now);
  Event make_event(const Op& op, uint32_t local_rank, uint8_t events, Status status, Micros now) const;
  void tell_wait(Op* op, Event* event);
  void push_event(const Event& event);
  uint32_t quorum_ranks_needed() const;

  // --- timers.cc ---
  Micros push_budget(const Op& op) const;
  Micros repair_delay(uint32_t node) const;
  Micros silence_delay(const Op& op, uint32_t node) const;
  Micros repair_cap(const Op& op) const;
  Micros remind_delay(const Op& op, uint8_t* step) const;
  Micros backoff(const Op& op, uint32_t node, uint8_t* step) const;
  void run_timers(Op* op, Micros now);

  // --- owner.cc ---
  wire::Drop on_announce(const wire::PacketView& packet, Micros now);
  wire::Drop on_push(const wire::PacketView& packet, Micros now);
  void announced(Op* op, uint32_t node, bool contributes, bool receives, uint16_t ranks, bool frozen,
                 Micros now);
  void count_for_quorum(Op* op, uint32_t node, uint16_t ranks, bool counts, Micros now);
  void wants_pull(Op* op, uint32_t node, Micros now);
  void came(Op* op, uint32_t node, Micros now);
  void look_for_exit(Op* op, Micros now);
  bool add_block(Op* op, uint32_t node, uint32_t stripe, uint32_t elements, uint16_t ranks,
                 const std::byte* data);
  void advance_ordered(Op* op, uint32_t stripe);
  void add_own(Op* op, Micros now);
  void node_complete(Op* op, uint32_t node, Micros now);
  void close(Op* op, Micros now);
  bool finish_some(Op* op, uint32_t blocks, Micros now);
  void finish_block(Op* op, uint32_t stripe, Micros now);
  void deliver_own(Op* op, Receiver* receiver, uint32_t stripe, Micros now);
  std::byte* block_data(const Op& op, uint32_t stripe);
  BlockMeta& block_meta(const Op& op, uint32_t stripe);
  uint64_t& sender_mask(const Op& op, uint32_t stripe, uint32_t node);
  bool has_block(const Op& op, uint32_t stripe, uint32_t node);

  // --- contributor.cc ---
  void first_admission(Op* op, Micros now);
  void announce_to(const Op& op, uint32_t node);
  void announce_all(Op* op);
  Micros patience(const Op& op) const;
  void freeze(Op* op, Micros now);
  const std::byte* own_block(const Op& op, uint32_t shard, uint32_t block, std::byte* staging);
  size_t parts_of(const Op& op, uint32_t bit, const Receiver** slot);
  std::byte* sum_block(const Op& op, uint32_t shard, uint32_t block, uint32_t bit);
  static float scale_of(const Op& op);
  static void saturate(ElementType type, std::byte* sums, uint32_t elements);
  void owner_closed(Op* op, uint32_t node, Micros now);
  void start_clock(Op* op, Micros now);
  uint32_t push_start(const Op& op, uint32_t owner) const;
  wire::Drop on_request(const wire::PacketView& packet, Micros now);
  wire::Drop on_request_row(const wire::PacketView& packet, Micros now);

  // --- carry.cc ---
  TagState* find_tag(uint32_t local_rank, uint32_t fingerprint);
  TagState* tag_of(const Submission& submission, uint32_t fingerprint);
  CarryPages pages_of(const Op& op);
  CarryPages pages_of(const TagState& tag);
  uint32_t carry_limit(const TagState& tag) const;
  void look_for_debts(Op* op, Micros now);
  bool fits(const TagState& tag, const Op& op) const;
  uint32_t carry_keeps(uint32_t of_four) const;
  void note_result(uint32_t local_rank, uint32_t op_seq, Status status);
  void offer_debts(Micros now);
  void set_late_wait(Op* op);
  bool too_long(const Op& op, const Receiver& receiver, TagState* tag);
  void take_debts(Op* op, uint32_t local_rank);
  void discard(Receiver* receiver);
  void set_fate(Op* op, uint32_t shard, uint32_t block, uint64_t bit, bool counted);
  void carry_block(Op* op, Receiver* receiver, uint32_t shard, uint32_t block, uint32_t bit);
  bool owe(TagState* tag, const CarryPages& pages, uint32_t bit, uint64_t step, ElementType sums,
           const std::byte* values, uint32_t elements);
  void keep_rounding(Op* op, uint32_t shard, uint32_t block, uint32_t bit);
  uint64_t collect(const Op& op, const Receiver& receiver, uint32_t shard, uint32_t block, uint32_t bit,
                   float scale, std::byte* sum);
  void settle_fates(Op* op, Micros now);
  void fold_old_slots(Micros now);
  void fold_slot(TagState* tag, QueuedSlot* slot, Micros now);
  void resolve_queued(uint32_t local_rank, const QueuedSlot& slot, Status status, Micros now);
  bool take_carry(Micros now, const Submission& what, std::byte* out);
  void drop_debts(TagState* tag, Micros now, Status status = Status::kOk);
  bool forget_rank(Micros now, uint32_t local_rank);
  void queue_slot(Op* op, uint32_t local_rank);

  // --- correct.cc ---
  CarryPages pages_of(ElementType type);
  Geometry geometry_of(uint64_t count, ElementType type) const;
  void drop_holes(const Op& op, Receiver* receiver);
  void keep_hole(const Op& op, Receiver* receiver, uint32_t shard, uint32_t block, uint64_t bit,
                 uint8_t flags, const std::byte* data);
  void keep_correction(const Op& op, Receiver* receiver);
  void add_correction(const Op& op, Receiver* receiver);
  bool take_correction(Micros now, const Submission& what, std::byte* out);

  // --- receiver.cc ---
  wire::Drop on_pull(const wire::PacketView& packet, Micros now);
  wire::Drop on_row(const wire::PacketView& packet, Micros now);
  wire::Drop on_gone(const wire::PacketView& packet, Micros now);
  void take_block(Op* op, Receiver* receiver, uint32_t shard, uint32_t block, uint64_t bit, uint8_t flags,
                  const std::byte* data);
  void conclude(Op* op, uint32_t local_rank, Micros now);
  bool ended(const Op& op, const Receiver& receiver) const;
  void fill_holes(Op* op, Receiver* receiver);
  void receiver_bound(Op* op, uint32_t local_rank, Micros now);
  bool missing_from(const Op& op, uint32_t node) const;
  uint32_t open_fate(const Op& op, uint32_t node) const;
  bool wanted(const Op& op, uint64_t bit) const;

  // --- output.cc ---
  struct Out;
  wire::Header header(wire::Type type, const Op* op) const;
  void emit_control(Out* out, const Control& control, Micros now);
  size_t request_bitmap(Op* op, const Control& control, wire::Header* h, std::byte* bits, size_t capacity);
  void emit_push(Out* out, Op* op, uint32_t owner, uint32_t stripe, bool tail, Micros now);
  void emit_pull(Out* out, Op* op, uint32_t node, uint32_t stripe, Micros now);
  void emit_repairs(Out* out, Micros now);
  void count_out(uint32_t node, size_t bytes, bool data, Micros now);
  uint32_t packet_bytes(size_t payload) const {
    return static_cast<uint32_t>(wire::kHeaderBytes + payload +
                                 (settings.sealing == wire::Sealing::kNone ? 0 : wire::kTagBytes));
  }
  void emit_pushes(Out* out, Op* op, Micros now);
  void emit_pulls(Out* out, Op* op, Micros now);
  void emit_probe(Out* out, uint32_t node, Micros now);
  bool reachable(const Op& op, uint32_t node) const;
  void queue_control(const Control& control);
  void queue_request(Op* op, uint32_t node, bool push, bool everything);

  // --- pulse.cc ---
  void set_policy(Op* op);
  void set_bounds(Op* op, uint32_t size_class);
  const Policy& policy_for(uint32_t seq) const;
  Bounds bounds() const;
  bool adopt(const Policy& policy);
  bool begin_pulse(Micros now);
  void pulse_ended(Op* op, bool complete, Micros now);
  void settle_pulses();
  void ask_policy(uint32_t node, uint8_t number, Micros now);
  void measure(const Op& op, const Receiver& receiver, bool cut, Micros now);
  // --- dispute.cc ---
  void mismatch(Op* op, uint32_t node, Micros now);
  void mismatch_here(Op* op, const Submission& second, Micros now);
  void dispute(Op* op, std::span<const uint32_t> named, const char* text, Micros now);
  wire::Drop on_mismatch_abort(const wire::PacketView& packet, const wire::Abort& body, Micros now);
  void describe_op(char* text, size_t size, const Op& op) const;

  // --- peers.cc ---
  wire::Drop on_ping(const wire::PacketView& packet, Micros now);
  wire::Drop on_pong(const wire::PacketView& packet, Micros now);
  wire::Drop on_abort(const wire::PacketView& packet, Micros now);
  void run_peers(Micros now);
  void remind(uint32_t node, Micros now);
  void hear_policy(uint32_t node, const wire::Ping& body, std::span<const std::byte> record);
  void tell_all(Status reason, std::span<const uint32_t> named);
  void name_node(char* text, size_t size, uint32_t node) const;
  uint32_t slowest(Micros now) const;
  void note_lag(Micros now);

  // --- lane.cc ---
  Micros ping_interval(const Peer& peer) const;

  uint32_t local_ranks_;
  uint32_t strangers_;  // peers that have not been met
  wire::Sealer sealer_;
  wire::Opener opener_;
  uint64_t new_counter() { return last_counter_ = sealer_.next_counter(); }
  uint64_t last_counter_ = 0;
  Micros phase_began_ = 0;
  Pool pool_;
  uint32_t reserve_units_;
  uint32_t base_ = 0;
  uint32_t pulse_base_ = 0;
  uint32_t end_ = 0;                 // no op from here on is open
  std::vector<uint32_t> rank_done_;  // lowest op of each local rank without RESOLVED
  std::vector<uint32_t> next_submit_;
  std::vector<Fifo<Pending>> pending_;
  std::vector<Op> ops_;
  std::vector<TagState> tags_seen_;
  Fifo<Control> control_;
  Fifo<Repair> repairs_;
  Fifo<Repair> tails_;   // last blocks that go out once more, in order of time
  Micros last_run_ = 0;  // of run_peers
  Micros lag_ping_ = kNever;
  Micros lag_interval_ = 0;
  uint32_t lag_node_ = UINT32_MAX;  // whom submits wait for now, and since when
  Micros lag_since_ = 0;
  uint32_t rotate_ = 0;
  bool slots_wait_ = false;  // some slot is queued
  bool new_debts_ = false;   // something is owed that open ops have not been offered
  bool settle_ = false;      // an op ended: done and base may move (settled at the end of each call)
  bool unfinished_ = false;  // closed shards that still have blocks to finish
  // Pulses and policy records, newest last.
  Policy first_policy_;
  std::array<Policy, 8> policies_{};  // one in force, and those that begin up to 2W ops later
  std::array<Estimator, kSizeClasses> estimators_{};
  std::vector<int64_t> pulse_words_;  // two pulses: contribution and result of each
  uint32_t pulses_begun_ = 0;
  std::array<bool, kPulseWindow> pulse_skipped_{};  // begun without memory for it
  uint32_t highest_announced_ = 0;
  int64_t pulse_blocks_ = 0, pulse_lost_ = 0, pulse_calm_ = 0;
  // What ABORT says, and the mismatch that waits for the other side's words.
  Status abort_reason_ = Status::kAborted;
  uint32_t abort_op_ = 0;
  uint16_t abort_named_[8] = {};
  uint16_t abort_named_count_ = 0;
  bool abort_op_known_ = false;
  OpClass abort_class_ = OpClass::kExact;
  wire::Abort abort_body_;
  Micros mismatch_at_ = kNever;
  char mismatch_text_[sizeof(Event::text)] = {};
  // What poll_send hands out.
  std::vector<wire::Header> headers_;
  std::vector<std::byte> tags_;
  std::vector<std::byte> staging_;
  std::vector<std::byte>
      scratch_;                 // accumulators of three blocks: sum of a rank, a part of it, sum of the node
  std::vector<std::byte> own_;  // one block of the own shard
};

}  // namespace sluice::exchange
