// The exchange protocol of one job on one lane of one node (docs/protocol.md), as a pure state machine: packets,
// submits and the time come in as arguments; packets and events come out. It makes no system call, starts no thread,
// reads no clock, and allocates nothing after construction. Everything here belongs to one thread.
//
//   on_packet ─┐                       ┌─> poll_send: packets, sealed, ready for a port
//   submit   ──┼─> owner, contributor, ┼─> poll_event: RESULT and RESOLVED of the local ranks' ops
//   tick     ──┘   receiver (per op)   └─> next_timer: when tick is due
//
// Three roles per op (protocol, section 15): the *owner* of one shard sums what nodes push, closes once, and serves
// pulls; the *contributor* pushes this node's blocks to their owners; a *receiver* per local rank collects the reduced
// blocks. A lane serves its stripe of blocks as if it were alone (section 13).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "transport/wire/packet.h"
#include "transport/wire/seal.h"

namespace sluice::exchange {

inline constexpr size_t kLeastBurst = 2;  // packets that poll_send must be able to hand out
inline constexpr uint32_t kWindow = 64;   // W: ops that may be open (protocol, section 4)

// What becomes of blocks of a `consistent` op that come after its result was told as INCOMPLETE (protocol, section 6).
enum class OnIncomplete : uint8_t {
  kResync,   // dropped: the client copies the ranges from a rank that was OK
  kCorrect,  // added to the result of a later op of the tag, on this rank only, which is then CORRECTED
};

// What is fixed for a job in a view. Equal on all nodes except `self`, `lane` and the pool.
struct Settings {
  std::string job;
  wire::JobKey key{};
  wire::Sealing sealing = wire::Sealing::kAuth;
  uint64_t generation = 0;
  std::vector<wire::ViewMember> members;  // one per node, in view order
  std::vector<uint32_t> node_of_rank;     // node of each rank of the job
  std::vector<std::string> node_names;    // for people: name and address of each node; empty: not known here
  uint32_t self = 0;                      // this node
  uint32_t lane = 0, lanes = 1;
  uint32_t payload = 1408;  // bytes of a full payload, including the verdict's reserve

  // H of bounded ops; P = Q = H/2. With `adaptive` a class begins without a bound (as `exact`) until it has been measured
  // (section 4, Warm-up and Estimation), and hard_deadline is the largest H that the nodes may agree on.
  Micros hard_deadline = 1'000'000;
  bool adaptive = false;
  Micros hard_deadline_min = 10'000;
  uint32_t warmup_ops = 20;
  double h_factor = 5;
  uint64_t link_bits_per_second = 0;  // 0: unknown
  Micros op_timeout = 30'000'000;     // T of `exact`
  Micros rank_timeout = 30'000'000;   // submit to start at the latest
  Micros peer_interval = 100'000;     // PING
  Micros peer_timeout = 2'000'000;    // a silent peer is lost after max(this, 20 intervals)
  uint32_t pull_patience = 4;         // x H
  double min_contribution = 0.5;      // of the ranks of the job, per block
  uint32_t max_lag = 32;              // ops that this node may be ahead of the slowest, at most kWindow/2
  uint32_t incast = 8;                // I: owners that are pushed to at a time
  bool carry_over =
      false;  // `consistent` with a tag: what was not counted joins a later op of it (section 7)
  uint32_t carry_max_ops =
      0;  // steps of a tag after which a carried block goes; 0: max(8, 2 x max_lag / ops per step)
  double carry_max_norm = 0;  // carry-over longer than this x the rank's last contribution goes; 0: off
  OnIncomplete on_incomplete = OnIncomplete::kResync;
  uint64_t correction_bytes = 0;  // of one rank and tag, in accumulators; 0: twice what the tensor has
  bool fill_own = true;           // `best_effort`: holes take the own contribution; false: zero

  // Flow control: bytes on the way to one peer, found by PING and PONG (protocol, section 9).
  uint32_t flow_window = 512 * 1024;  // at most
  uint32_t flow_window_min = 32 * 1024;
  // Payload bytes that wait in this lane's receive buffer without loss; granted to the peers in equal parts.
  uint32_t receive_budget = 4 << 20;

  uint64_t max_op_bytes = 64ULL << 20;  // largest tensor
  uint64_t pool_bytes = 256ULL << 20;  // accumulators and early arrivals of this lane; touched only when used
};

// Pool bytes without which the largest op could not be reduced (section 3, Memory). JOIN is refused below it.
uint64_t minimum_pool_bytes(const Settings& settings);

// One op of one local rank, validated by the caller: slots have `count` elements, are `element_size` aligned, and stay
// valid until the events said so.
struct Submission {
  uint32_t op_seq = 0;
  uint32_t local_rank = 0;  // index among the ranks of this node, in rank order
  uint64_t count = 0;
  uint64_t tag = 0;  // 0: none
  ReduceKind kind = ReduceKind::kSum;
  ElementType type = ElementType::kF32;
  OpClass op_class = OpClass::kExact;
  Micros deadline = 0;   // H or T of this op; 0: from the settings
  float loss_scale = 1;  // of the contribution, under AMP: carry-over is kept unscaled
  bool scaled = false;   // the client has a loss scale, be it 1 now (implied by any other)
  const std::byte* contribution = nullptr;
  std::byte* result = nullptr;
  uint64_t cookie = 0;
};

struct MissingRange {
  uint64_t first = 0;  // element
  uint32_t count = 0;  // elements
  uint32_t owner = 0;  // node
};
inline constexpr uint32_t kEventRanges = 16;

// RESULT, RESOLVED or both of one op of one local rank.
struct Event {
  uint32_t op_seq = 0;
  uint32_t local_rank = 0;
  uint64_t cookie = 0;
  uint8_t events = 0;  // kEventResult | kEventResolved
  Status status = Status::kOk;
  uint32_t blocks_expected = 0, blocks_received = 0, blocks_skipped = 0, blocks_uncounted = 0,
           blocks_repaired = 0;
  uint32_t blocks_filled = 0;     // best_effort: holes filled by rule
  uint32_t blocks_corrected = 0;  // CORRECTED: blocks to which something of earlier ops was added
  uint32_t blocks_discarded = 0;  // of this rank's carry-over: too old, not finite, or no memory
  Micros total = 0;               // submit to this event
  Micros lag = 0;                 // waiting for admission
  Micros quorum = 0;              // waiting for half of the nodes; for all of them where the op has no bound
  Micros push = 0;                // start to last push block sent
  uint64_t bytes_sent = 0;
  uint32_t late_nodes = 0;
  uint32_t worst_node =
      UINT32_MAX;  // that this op waited for longest: to be admitted, to come, or for its blocks
  uint32_t ranges_total = 0, ranges = 0;  // INCOMPLETE, and of a result that stays so: DIVERGED, errors
  MissingRange range[kEventRanges];
  char text[496] = {};  // one line for a person; names op, tag, node and rank
};

// A packet to send. Memory: header and tag belong to the lane until the next poll_send; the payload is the
// contribution slot of a local rank or a shard in the pool, and does not change while its op is open.
struct Outgoing {
  uint32_t node = 0;
  uint32_t payload_length = 0;
  const std::byte* header = nullptr;  // wire::kHeaderBytes
  const std::byte* payload = nullptr;
  const std::byte* tag = nullptr;  // wire::kTagBytes, or nullptr with sealing `none`
};

// What an op went through on this node, for traces (times are monotonic, 0 = has not happened).
struct Trace {
  uint32_t op_seq = 0;
  OpClass op_class = OpClass::kExact;
  Status status = Status::kOk;
  uint64_t tag = 0, bytes = 0;
  uint32_t waited_for = UINT32_MAX;  // Event::worst_node of its result
  Micros submitted = 0, admitted = 0, quorum = 0, first_push = 0, push_sent = 0, closed = 0, pull_sent = 0,
         result = 0;
};

struct PeerState {
  Micros last_heard = 0;
  Micros rtt = 0;          // smoothed; 0: none yet
  uint32_t done = 0;       // lowest op that the peer still needs
  uint32_t in_flight = 0;  // bytes
  uint32_t window = 0;     // bytes
  bool suspect = false;
  bool lost = false;
  uint64_t packets_sent = 0, bytes_sent = 0, packets_received = 0, bytes_received = 0;
  uint64_t blocks_repaired = 0;  // blocks that we asked this peer for again
  uint64_t blocks_late = 0;      // its pushed blocks that came after close
  uint64_t ops_waited = 0;  // results here that took longest because it had not come to them or was behind
  Micros waited = 0;        // and how long they waited for it, together
};

struct Counters {
  uint64_t ops[32] = {};  // ended, by Status
  uint64_t drops[static_cast<size_t>(wire::Drop::kCount)] = {};
  uint64_t packets_sent = 0, bytes_sent = 0, packets_received = 0, bytes_received = 0;
  uint64_t blocks_repaired = 0, blocks_resent = 0, blocks_skipped = 0, blocks_uncounted = 0,
           nonfinite_blocks = 0;
  uint64_t blocks_carried = 0, blocks_discarded = 0, slots_queued = 0, blocks_filled = 0;
  uint64_t blocks_undecided = 0;  // owed by ranks that left, or when the job ended
  uint64_t requests_sent = 0, contributions_late = 0;
  uint64_t blocks_corrected = 0, gone_open = 0;
  uint64_t open_ops = 0, pool_used_bytes = 0, pool_bytes = 0;
};

// What the local ranks owe now (section 7).
struct Owed {
  uint64_t blocks = 0;  // of carry-over
  uint64_t slots = 0;   // contributions that wait in their slots
};

// Deadlines that adapt, as they are now: H of each size class (policy.h); 0: the class warms up, or never had an op.
struct Bounds {
  uint32_t policy = 0;  // number of the record in force; 0: none yet
  Micros hard[16] = {};
  uint32_t samples[16] = {};  // ops measured here
};

class Lane {
 public:
  // `pool`: settings.pool_bytes of memory, 64-byte aligned, that outlives the lane (its owner can ask for huge pages);
  // nullptr, or too little for the largest op: the lane takes memory of its own.
  explicit Lane(const Settings& settings, Micros now, std::byte* pool = nullptr);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Takes an op of a local rank; its events come by poll_event. Ops of one local rank come in order of op_seq without
  // gaps. Returns kOk, or why it cannot be taken (kInvalid, kNoMemory: larger than max_op_bytes; none of its events
  // will come). After the job failed, the events come at once with the job's status.
  Status submit(Micros now, const Submission& submission);

  // tag_retire of what take_carry does not hand out: holes of INCOMPLETE results that came and wait to be added to a
  // later one (kCorrect). Shapes, units and answer as in take_carry.
  bool take_correction(Micros now, const Submission& what, std::byte* out);

  // What a local rank owes under a tag (uncounted blocks and queued slots) goes to `out`: `count` elements in accumulator
  // type, unscaled, zero where nothing is owed; queued slots are RESOLVED. `what` names local_rank, kind, type, count
  // and tag. False: fates of the tag are still open, ask again later. Blocks of this lane only. With `out` nullptr what
  // is owed is dropped, counted as undecided.
  bool take_carry(Micros now, const Submission& what, std::byte* out);
  // A local rank leaves: its slots are not touched any more, and what it owes is dropped, counted as undecided. False:
  // an op that is open here still needs its slots; the job can only fail.
  bool forget_rank(Micros now, uint32_t local_rank);

  // Takes a datagram whose source is the address of the node that the header names as sender (the caller checked).
  // Returns kNone or why it was dropped. The bytes are not kept.
  wire::Drop on_packet(Micros now, std::span<const std::byte> datagram);

  // Runs what is due. Call it when next_timer() <= now, after the packets that have arrived were handed in.
  void tick(Micros now);
  Micros next_timer() const;  // kNever: none

  // Fills packets to send; 0: nothing to send now. `out` has room for at least kLeastBurst: behind data goes the PING
  // that measures it. Packets to one node come in runs. What it returns must be sent (or counted as lost) before the
  // next call.
  size_t poll_send(Micros now, std::span<Outgoing> out);

  // The next event, oldest first; false: none.
  bool poll_event(Event* event);

  // Ends every open op with this status and text, and all later ones at once; tells the other nodes unless `quietly`.
  void fail(Micros now, Status status, const char* text, bool quietly = false);
  // True when every other node's lane has been heard, and so takes part: what is sent to it from now on is not lost for
  // want of a receiver. From the start on it PINGs those that it has not heard, every few milliseconds.
  bool met() const;
  bool failed() const;
  Status failure() const;
  const char* failure_text() const;

  // True when all local ops are done and every live peer has all it needs from this node: it may be destroyed after a
  // linger in which it goes on answering. Always true after a failure.
  bool drained() const;

  // Invariant I5 for tests: nothing is open, every slot and page is back.
  bool idle() const;

  const Settings& settings() const;
  uint32_t job_id() const;
  uint32_t epoch() const;
  const Counters& counters() const;
  Owed owed() const;
  // The bounds in force for the next op (section 10).
  Bounds bounds() const;
  PeerState peer(uint32_t node) const;
  bool poll_trace(Trace* trace);  // finished ops, oldest first; the oldest are overwritten when nobody asks

 private:
  friend class LaneImpl;
  std::unique_ptr<class LaneImpl> impl_;
};

}  // namespace sluice::exchange
