// What a training process and its daemon share: control messages on a SOCK_SEQPACKET socket, and memory.
//
// The daemon creates every shared region as a sealed memfd (design, section 10) and passes it by SCM_RIGHTS. There
// are three regions per client:
//   control   written by the daemon, mapped read-only by the client: completions and reports (ControlPage)
//   submit    written by the client (tail, descriptors, its completion heads), read by the daemon (SubmitPage)
//   arena     contribution and result slots; both write. The client cuts it into slots as it likes.
// Offsets, never pointers. The daemon copies a descriptor once and validates the copy; payload bytes may change at
// any time, which can spoil only the numbers of the client that does it.
//
// Each lane has its own pair of rings: libsluice writes a descriptor to the ring of every lane and merges the lanes'
// completions, so that lanes share nothing (a lane serves its stripe of blocks as if it were alone).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace sluice::ipc {

inline constexpr uint32_t kAbiVersion = 3;  // both sides must have the same; otherwise REFUSE names both
inline constexpr uint32_t kMaxLanes = 16;
inline constexpr uint32_t kRingEntries = 256;  // per lane and direction; 3 events x 64 ops, and kMaxTakes
inline constexpr uint32_t kWindow = 64;        // ops that may be open at once (protocol, section 3)
inline constexpr uint32_t kCacheLine = 64;

// --- Descriptors: client -> daemon ---------------------------------------------------------------------------------

enum class Request : uint32_t {
  kAllreduce = 1,
  // Local, no op: what this rank owes under the tag (docs/protocol.md, section 7: queued slots and carry-over) goes to
  // the slot `result`, `count` elements of the accumulator type, not scaled, 0 where nothing is owed; each lane writes
  // its own blocks. Answered by kEventCarry when no fate of the tag is open any more, with OP_TIMEOUT after deadline_us
  // at the latest. `op_seq` is any number that the answer shall bear; at most kMaxTakes may wait.
  kTakeCarry = 2,
};
inline constexpr uint32_t kFlagDrop =
    1;  // kTakeCarry: there is no slot; what is owed is dropped, as undecided
inline constexpr uint32_t kFlagCorrection =
    2;  // kTakeCarry: not what is owed, but what waits to be added to a result of this rank (protocol, section 6)
inline constexpr uint32_t kMaxTakes = 16;  // kTakeCarry of one rank on one lane
inline constexpr uint32_t kFlagScaled =
    4;  // kAllreduce: the client has a loss scale, be it 1 now (implied by any other)

// One collective call of one rank. `op_seq` counts the calls of the rank in the job from 0; every rank makes the calls
// in the same order. Sizes in elements, offsets in bytes from the start of the arena, 64-byte aligned.
//
// The events of an op may come apart. RESULT frees the slot `result`. RESOLVED frees the slot `contribution`, and may
// be late: a contribution that missed its op waits in its slot for a later op of the tag, for up to max_lag ops.
struct Descriptor {
  uint32_t request = 0;
  uint32_t op_seq = 0;
  uint64_t count = 0;         // elements of the tensor
  uint64_t tag = 0;           // stable name of this tensor from step to step; 0: none
  uint64_t contribution = 0;  // slot with `count` elements; the daemon's until RESOLVED
  uint64_t result = 0;        // slot with `count` elements; the daemon's until RESULT
  uint32_t deadline_us = 0;   // H of this op (bounded), T (exact); 0: the job's setting
  uint8_t kind = 0;           // ReduceKind
  uint8_t element_type = 0;   // ElementType
  uint8_t wire_type = 0;      // ElementType on the network; equal to element_type for now
  uint8_t op_class = 0;       // OpClass
  uint32_t flags = 0;
  float loss_scale = 1.0F;  // of the contribution, under AMP: finite, above 0; carry-over is kept without it
  uint64_t cookie = 0;      // comes back in the completions
};
static_assert(sizeof(Descriptor) == 64);

// --- Completions: daemon -> client ---------------------------------------------------------------------------------

inline constexpr uint8_t kEventCarry = 4;  // alone: the answer to kTakeCarry

// One event, or two in one, of one op on one lane. Blocks count on this lane only; libsluice adds the lanes up. A
// RESOLVED that comes alone tells only of the contribution (blocks_uncounted, blocks_discarded).
struct Completion {
  uint32_t op_seq = 0;
  uint8_t events = 0;  // kEventResult | kEventResolved, or kEventCarry
  uint8_t status = 0;  // Status
  uint16_t lane = 0;
  uint64_t cookie = 0;
  uint32_t blocks_expected = 0;   // blocks of the result
  uint32_t blocks_received = 0;   // of them received by the time of this event
  uint32_t blocks_skipped = 0;    // set to zero by their owner: too few contributed
  uint32_t blocks_uncounted = 0;  // of this rank's contribution: not in the owner's sum
  uint32_t total_us = 0;          // submit to this event
  uint32_t wait_us = 0;     // lag_wait + quorum_wait (protocol, section 3); the latter: exact, for all nodes
  uint32_t push_us = 0;     // start to last push block sent
  uint32_t repaired = 0;    // blocks asked for again
  uint16_t late_nodes = 0;  // nodes whose pushes some owner did not count in full, as far as seen here
  uint16_t worst_node = UINT16_MAX;  // that this op waited for longest (index in the view); 65535: none
  uint32_t lag_us = 0;               // of wait_us: for admission (protocol, section 3)
  uint64_t bytes_sent = 0;     // datagram bytes that this lane sent for this op until now (all local ranks)
  uint32_t blocks_filled = 0;  // best_effort: of the result, filled by rule
  uint32_t blocks_discarded = 0;  // of this rank's carry-over: too old, not finite, or no memory for it
  uint32_t blocks_corrected = 0;  // of the result: what was missing in earlier ones of the tag was added
  uint32_t padding = 0;
  uint64_t unused[6] = {};  // to whole cache lines
};
static_assert(sizeof(Completion) == 128);

// --- Reports: what does not fit a completion -----------------------------------------------------------------------

struct MissingRange {
  uint64_t first = 0;  // element
  uint32_t count = 0;  // elements
  uint32_t owner = 0;  // node
};
inline constexpr uint32_t kReportRanges = 96;
inline constexpr uint32_t kReportText = 496;

// One per op slot (op_seq mod kWindow) and lane; valid from the completion that announces it until the op slot is used
// again. `text` is one line for a person that names rank, node, tag and op; empty when there is nothing to say.
struct Report {
  uint32_t op_seq = 0;
  uint32_t ranges = 0;        // listed below
  uint32_t ranges_total = 0;  // may be more than were listed
  uint32_t version = 0;       // odd while the lane writes; 0: never written (ring.h)
  char text[kReportText] = {};
  MissingRange range[kReportRanges] = {};
};
static_assert(sizeof(Report) == 2048);

// --- Rings ---------------------------------------------------------------------------------------------------------

// Free-running 64-bit indices: slot = index % kRingEntries, empty when equal, full when kRingEntries apart. One writer
// and one reader. A distance above kRingEntries is a broken peer: the daemon disconnects, the client reports
// DAEMON_LOST.
struct alignas(kCacheLine) RingIndex {
  std::atomic<uint64_t> value{0};
};

// The client's page. `submit_tail[l]` and `complete_head[l]` are written by the client only.
struct SubmitPage {
  RingIndex submit_tail[kMaxLanes];
  RingIndex complete_head[kMaxLanes];
  // The client sleeps (or is about to) on ControlPage::wake; the lane makes a futex call only then.
  struct alignas(kCacheLine) {
    std::atomic<uint32_t> value{0};
  } client_waits;
  Descriptor ring[kMaxLanes][kRingEntries];
};

// The daemon's page. `submit_head[l]` and `complete_tail[l]` are written by lane l only.
struct ControlPage {
  uint32_t abi_version = kAbiVersion;
  uint32_t lanes = 0;
  RingIndex submit_head[kMaxLanes];
  RingIndex complete_tail[kMaxLanes];
  // Lane l sleeps (or is about to) on its eventfd; the client writes to the eventfd only then.
  struct alignas(kCacheLine) {
    std::atomic<uint32_t> value{0};
  } lane_sleeps[kMaxLanes];
  // Futex word, bumped with every batch of completions; FUTEX_WAIT works on a read-only mapping.
  struct alignas(kCacheLine) {
    std::atomic<uint32_t> value{0};
  } wake;
  // Set once, before the socket is closed: why this client was let go (Status), with text.
  struct alignas(kCacheLine) {
    std::atomic<uint32_t> value{0};
    char text[240];
  } gone;
  Completion ring[kMaxLanes][kRingEntries];
  Report report[kMaxLanes][kWindow];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// --- Control messages: 256 bytes each, on /run/sluice/sluice.sock ---------------------------------------------------

enum class MessageType : uint32_t {
  kHello = 1,     // client: I am here, and want to take part in job NAME
  kWelcome = 2,   // daemon: my endpoint, my join nonce for this job
  kRefuse = 3,    // daemon: code and text (a longer one besides, as a memfd); the socket is closed after it
  kJoin = 4,      // client: the view (memfd attached unless the daemon has `peers:`), my rank, sizes
  kJoined = 5,    // daemon: fds attached: control, submit, arena, one eventfd per lane
  kRegister = 6,  // kept for GPU memory
  kLeave = 7,     // client: all ops are done, I go
  kBye = 8,       // daemon: code; the answer to kLeave, or sent when it shuts down
  kMapped =
      9,  // client: I have mapped the regions (the daemon then seals them against new writable mappings)
  kAbort = 10,      // client: abort the job on all nodes
  kAdmin = 16,      // sluicectl: one JSON request in `text`; answers are kAdminPart messages
  kAdminPart = 17,  // daemon: a memfd with the JSON answer attached
};

inline constexpr uint32_t kJoinedCarries = 1;  // JOINED: `consistent` carries over
inline constexpr uint32_t kJoinedCorrects =
    2;                                       // JOINED: holes of a `consistent` result come with a later one
inline constexpr uint32_t kMaxJobName = 63;  // printable, no slash, no space

struct Message {
  uint32_t type = 0;
  uint32_t abi_version = kAbiVersion;
  uint32_t code = 0;            // REFUSE, BYE, ABORT: Status; JOINED: kJoinedCarries | kJoinedCorrects
  uint32_t rank = 0;            // HELLO, JOIN
  uint32_t world_size = 0;      // HELLO, JOIN: ranks of the job
  uint32_t local_ranks = 0;     // HELLO, JOIN: ranks of the job on this node
  uint32_t lanes = 0;           // WELCOME: of this node; JOIN: of the job (the minimum); JOINED: in use
  uint32_t payload = 0;         // WELCOME: largest payload by this node's MTU; JOINED: in use
  uint64_t arena_bytes = 0;     // JOIN: wanted; JOINED: given
  uint64_t max_op_bytes = 0;    // JOIN: largest tensor that will be reduced
  uint8_t join_nonce[16] = {};  // WELCOME, JOIN
  char job[kMaxJobName + 1] = {};
  union {
    char text[112] =
        {};  // REFUSE: one line for a person; WELCOME: endpoint "ip:port" of lane 0 (lane l: port + l), a space, node name
    uint8_t key[32];  // JOIN: the job key
  };
  uint32_t timeout_ms = 0;   // JOIN: how long to wait for the peers
  uint32_t nodes = 0;        // JOINED: nodes of the view
  uint32_t deadline_us = 0;  // JOIN: H for `consistent`; 0: the daemon's setting
  // JOINED: index of this node in the view; HELLO: generation of the view that the card shall be for. A job of the same
  // name and an older generation that is still open here ends then, with VIEW_CHANGED.
  uint32_t node = 0;
};
static_assert(sizeof(Message) == 256);

// The view as the clients agreed on it through their own rendezvous: JOIN carries a memfd with ViewHeader, one ViewNode
// per node in view order (order of the lowest rank of each node), then the node of each rank (uint32_t per rank).
struct ViewHeader {
  uint32_t generation = 0;
  uint32_t nodes = 0;
  uint32_t ranks = 0;    // the world size
  uint16_t lanes = 0;    // smallest `lanes` of all WELCOMEs
  uint16_t payload = 0;  // smallest `payload` of all WELCOMEs
};
struct ViewNode {
  uint8_t join_nonce[16] = {};
  char endpoint[64] = {};  // as in WELCOME
  char name[64] = {};      // for people
};
static_assert(sizeof(ViewHeader) == 16 && sizeof(ViewNode) == 144);

}  // namespace sluice::ipc
