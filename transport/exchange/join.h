// How the nodes of a job find each other before the first op (protocol, section 14, "Joining"): HELLO and HELLO_ACK, as
// a pure state machine. Datagrams, the time and random bytes come in as arguments; datagrams come out.
//
//   on_packet ─┐        ┌─> poll_send: datagrams, tagged, padded to the size that they probe
//   tick      ─┴─ Join ─┼─> state, fault, peers: finished, failed and why, who is missing
//                       └─> next_timer: when tick is due
//
// Each node proves to each other that it holds the job key and is alive now (a challenge from both sides), that its
// join nonce is the view's (or, where `peers:` is configured, tells it), and that both have the same settings. The
// nodes find the largest payload that reaches every node from every node, by padding HELLOs, and lower it together
// until all of them report the same one. A node that has finished goes on answering: a slower one needs it.
//
// One thread (the control thread). Allocates at construction only, except text().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "transport/wire/packet.h"
#include "transport/wire/seal.h"

namespace sluice::exchange {

// Datagrams (bytes without IP and UDP headers) that are tried below a node's own largest one: an MTU of 9000 with IPv4
// and IPv6, 4 KiB pages, Ethernet with IPv4 and IPv6, tunnels (WireGuard, VXLAN), the IPv6 minimum of 1280, the IPv4
// minimum of 576.
inline constexpr uint16_t kDatagramLadder[] = {8972, 8952, 4096, 1472, 1452, 1392, 1232, 548};
inline constexpr uint16_t kSmallestDatagram = 256;  // below it a block would hold next to nothing
// HELLO without padding, and every HELLO_ACK.
inline constexpr size_t kHelloBytes = wire::kHeaderBytes + sizeof(wire::Hello) + wire::kTagBytes;

struct JoinSettings {
  std::string job;
  wire::JobKey key{};
  uint32_t self = 0;  // index of this node
  // One per node in view order, the own one included: the join nonce that the view names, or nothing where it is still
  // to be learned (`peers:`). The own entry is always there.
  std::vector<std::optional<wire::Nonce128>> join_nonces;
  uint64_t generation = 0;     // of the view
  uint64_t config_digest = 0;  // over the settings that all nodes must share
  wire::Sealing sealing = wire::Sealing::kAuth;
  uint32_t lanes = 1;  // of the view; with `peers:` how many this node has, and the minimum is agreed on
  uint32_t largest_datagram = 0;  // that this node can send in one piece
  // The same on all nodes; the smallest entry, at least kSmallestDatagram, is what every path must carry.
  std::vector<uint16_t> ladder{std::begin(kDatagramLadder), std::end(kDatagramLadder)};
  std::array<uint8_t, 32> random{};  // fresh and secret: challenges and jitter come from it
};

// Why the nodes cannot work together. `ours` and `theirs` are the two values that differ.
struct JoinFault {
  enum class Kind : uint8_t {
    kVersion,     // of the protocol
    kSealing,     // wire::Sealing
    kConfig,      // config digest
    kLanes,       // of the same view
    kGeneration,  // the peer has a newer view: read it again
    kNonce,       // the peer has been started again since the view was written: a new view is needed
    kUnknownStart,  // the peer has finished with an earlier start of this node: the job must be joined anew by all
    kPayload,  // the smallest datagram of the ladder (`ours`, bytes) is too large: for the path (`theirs` is 0),
               // or for what that node can send (`theirs`); `node` may be the own one
  };
  Kind kind = Kind::kVersion;
  uint32_t node = 0;
  uint64_t ours = 0, theirs = 0;

  // One line that names the node by index, both values, and what to do. Allocates.
  std::string text() const;
};

// What is known of one peer, for messages while joining takes long.
struct JoinPeer {
  enum class State : uint8_t {
    kSilent,   // nothing with the right tag has come
    kStrange,  // datagrams came, but none with the right tag: another job key?
    kUnproven,  // tagged HELLOs came, but it has not answered a challenge of this join: one-way path, or old packets
    kBehind,   // alive, with an older view
    kProbing,  // alive; the payload size is being found
    kWaiting,  // alive; waits for others, or differs in the view so far
    kReady,    // reports the same view
  };
  uint32_t node = 0;
  State state = State::kSilent;
  uint64_t wrong_tags = 0;
  Micros rtt = -1;         // last one measured, -1: none
  bool restarted = false;  // alive with another join nonce than the one that was agreed on
};
const char* state_name(JoinPeer::State state);

class Join {
 public:
  enum class State : uint8_t { kJoining, kFinished, kFailed };

  // Sends nothing before the first tick(). One node alone has finished at once.
  explicit Join(JoinSettings settings);

  // A datagram of this job whose type is HELLO or HELLO_ACK, from the address of node `from` (index in the view; the
  // caller knows the addresses). Returns why it was dropped, kNone when it was taken. Answers wait in poll_send().
  // Nothing without the right tag changes anything but a counter, and it is not answered.
  wire::Drop on_packet(uint32_t from, std::span<const std::byte> datagram, Micros now);

  // To be called at next_timer(), or at any other time.
  void tick(Micros now);
  Micros next_timer() const;  // kNever: nothing to send of its own accord

  // The next datagram to send. `bytes` is valid until the next call. False: none at present.
  struct Outgoing {
    uint32_t node = 0;
    std::span<const std::byte> bytes;
  };
  bool poll_send(Micros now, Outgoing* out);

  State state() const { return state_; }
  const JoinFault& fault() const;  // in kFailed

  // What all nodes have agreed on; in kFinished.
  uint32_t payload() const;
  uint32_t lanes() const;
  std::vector<wire::ViewMember> members() const;

  // The newest generation that a live peer has named: when it is newer than the own one, read the view again. A join
  // that was still going on has failed by it; one that had finished has not.
  uint64_t newest_generation() const { return newest_generation_; }

  // All peers, in view order.
  std::vector<JoinPeer> peers() const;
  // Who is missing, by node index, in one line; for the error when the caller's deadline ends.
  std::string text() const;

 private:
  static constexpr size_t kProbes =
      4;  // sizes that are probed side by side: the hoped-for one and three below

  struct Probe {
    uint16_t payload = 0;  // 0: free
    uint16_t tries = 0;
  };
  struct Peer {
    // --- who it is ---
    wire::Nonce128 challenge{};  // its challenge, from the last packet that was fresh; zeros before
    bool known = false;          // has answered a challenge; the fields below up to `view` hold what it said
    wire::Nonce128 nonce{};
    uint32_t incarnation = 0;  // how many starts of it have been known before this one
    bool behind = false;
    bool restarted = false;
    uint8_t lanes = 0, phase = 0;
    uint16_t payload = 0;
    uint32_t view = 0;
    // --- sizes ---
    uint16_t heard = 0;  // largest datagram from it, bytes
    uint16_t sent = 0;   // largest datagram to it, bytes
    uint16_t reach = 0;  // largest payload that is known to reach it
    std::array<Probe, kProbes> probes;
    // --- timers: a round is one HELLO without padding and the probes, sent together ---
    Micros due = kNever, interval = 0, rtt = -1;
    bool tell = false;                  // something changed: one round, whatever else is needed
    uint32_t stamp = 0;                 // of the last round
    uint32_t newest_stamp = 0;          // of the newest round that was answered
    uint32_t rounds = 0, answered = 0;  // since contact
    uint32_t silent = 0;                // rounds in a row without an answer
    uint32_t open_probes = 0;           // sizes below the hoped-for one that are probed as well
    // --- to be sent ---
    bool queued = false, send_hello = false, send_ack = false;
    uint8_t send_probes = 0;  // bits: probes[i]
    wire::Nonce128 ack_echo{}, ack_nonce{};
    uint32_t ack_stamp = 0, ack_incarnation = 0;
    uint16_t ack_probe = 0;
    uint8_t ack_flags = 0;
    // --- counters ---
    uint64_t tagged = 0, wrong_tags = 0;
  };

  // What came.
  wire::Drop parse(uint32_t from, std::span<const std::byte> datagram, wire::Header* header,
                   wire::Hello* hello);
  bool fresh(uint32_t node, const wire::Hello& hello) const;
  std::optional<JoinFault> check(uint32_t node, const wire::Header& header, const wire::Hello& hello) const;
  void take(uint32_t node, const wire::Hello& hello, size_t bytes, Micros now);
  void take_answer(uint32_t node, uint32_t stamp, Micros now);
  void queue_ack(uint32_t node, const wire::Header& header, const wire::Hello& hello, size_t bytes);
  // What follows from it.
  void fail(const JoinFault& fault);
  void lower(uint16_t payload, Micros now);
  void advance(Micros now);
  bool agrees(const Peer& peer) const;
  bool needs(const Peer& peer) const;
  void tell_all(Micros now);
  // What goes out.
  void round(uint32_t node, Micros now);
  void probe(uint32_t node, Micros now);
  void enqueue(uint32_t node);
  std::span<const std::byte> build(uint32_t node, bool ack, size_t bytes);
  wire::Nonce128 challenge_for(uint32_t node, uint32_t incarnation) const;
  uint16_t rung_below(uint32_t payload) const;  // 0: none
  Micros base_interval() const;
  Micros soon(Micros now);
  double uniform();  // [0, 1)

  JoinSettings settings_;
  Secret<32> key_;  // of the control tag
  uint32_t job_ = 0;
  std::vector<uint16_t> rungs_;  // payloads below the own largest, largest first
  State state_ = State::kJoining;
  std::optional<JoinFault> fault_;
  uint8_t phase_ = 1;
  uint16_t payload_ = 0;  // the largest that is still possible; only falls
  uint32_t lanes_ = 0;
  uint32_t view_ = 0;         // in phase 2
  bool view_changed_ = true;  // something that view_ is made of
  uint64_t newest_generation_ = 0;
  uint64_t random_ = 0;
  std::vector<Peer> peers_;  // one per node; the own one is not used
  std::vector<wire::ViewMember> members_;
  std::vector<uint32_t> ready_;  // ring of nodes with something to send
  size_t ready_first_ = 0, ready_count_ = 0;
  std::vector<std::byte> buffer_;
};

}  // namespace sluice::exchange
