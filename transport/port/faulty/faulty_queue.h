// A queue between its owner and the inner queue; see faulty_port.h. Internal to the port.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/unique_fd.h"
#include "transport/port/faulty/faulty_pipe.h"
#include "transport/port/faulty/faulty_port.h"
#include "transport/port/peer_table.h"

namespace sluice::port {

// Settled when the port is made; equal for all its queues, which it outlives.
struct FaultySetup {
  FaultyOptions options;
  bool send = false;           // the plan has something for what leaves
  bool receive = false;        // ... for what arrives
  bool copies_on_send = true;  // of the inner port
  uint32_t max_datagram = 0;   // of the inner port
  uint32_t slot_bytes = 0;
};

class FaultyQueue final : public Queue {
 public:
  static Result<std::unique_ptr<Queue>> open(const FaultySetup& setup, std::unique_ptr<Queue> inner,
                                             uint32_t index, LiveFaults* send, LiveFaults* receive);

  Result<PeerHandle> add_peer(const Endpoint& endpoint) override;
  void remove_peer(PeerHandle peer) override;
  size_t receive(std::span<RxPacket> packets) override;
  void release(std::span<const RxPacket> packets) override;
  size_t send(std::span<const TxPacket> packets) override;
  uint64_t reap() override;
  int fd() const override { return sleeps_ ? sleeps_.get() : inner_->fd(); }
  bool arm() override;
  Endpoint local() const override { return inner_->local(); }
  QueueCounters counters() const override { return inner_->counters(); }

 private:
  static constexpr size_t kBurst = 256;  // packets that are judged before they are sent
  static constexpr size_t kFlush = 64;   // held ones that are sent in one call
  static constexpr size_t kMaxLinks = 1024;
  static constexpr size_t kTickets = 1024;
  // Of tokens of datagrams whose memory is ours; the rest is the slot.
  static constexpr uint64_t kOwnToken = uint64_t{1} << 63;

  // A peer, from the first time that it is made known; kept when it is removed, so that its luck goes on: a handshake
  // whose every attempt adds and removes the peer would otherwise meet the same fate every time.
  struct Link {
    Endpoint endpoint;
    PeerHandle handle = kUnknownPeer;  // of the inner queue
    uint32_t uses = 0;                 // add_peer minus remove_peer of our owner
    uint32_t held = 0;  // in either pipe; on the way out each keeps the inner queue's peer alive
    uint64_t last_use = 0;
    Way send{0};
    Way receive{0};
  };
  // What was decided for the next packet of the owner: drawn once, although a full device may refuse it again and again.
  struct Fate {
    PeerHandle peer;
    bool passes;
  };
  struct Lent {
    uint64_t ticket;
    uint32_t slot;
  };
  struct Ticket {
    uint64_t own;
    uint64_t inner;
  };

  FaultyQueue(const FaultySetup& setup, uint32_t index);
  Result<void> prepare();          // memory and descriptors, as the plan needs
  Link* link_of(PeerHandle peer);  // nullptr: the owner does not know this handle (any more)
  uint32_t make_link(const Endpoint& endpoint);
  void apply(const Endpoint& endpoint, uint32_t id, Way* send, Way* receive) const;
  uint64_t seed_of(bool send, uint32_t link, uint64_t generation) const;

  // send: faulty_send.cc
  bool judge(const TxPacket& packet, Micros now);
  size_t decide(std::span<const TxPacket> packets, Micros now);
  bool flush(Micros now);
  void left(const Held& held);
  size_t taken(size_t packets);
  void take_back();

  // receive: faulty_receive.cc
  bool judge(RxPacket* packet, Micros now);
  size_t deliver(std::span<RxPacket> packets, Micros now);
  size_t take_in(std::span<RxPacket> packets, Micros now);

  const FaultySetup& setup_;
  const FaultyPlan& plan_;
  const uint32_t index_;
  const bool holds_send_;
  const bool holds_receive_;
  Pipe out_;
  Pipe in_;
  std::unique_ptr<Queue> inner_;  // after the pipes: it may refer to their memory until it ends

  PeerTable known_;  // endpoint to link; holds one use of each
  std::vector<Link> links_;
  std::vector<uint32_t> link_of_handle_;
  uint64_t uses_ = 0;
  Way strangers_;

  Prng refusals_;
  std::vector<Fate> fates_;
  std::vector<TxPacket> run_;
  std::vector<Held> leaving_;
  bool full_ = false;        // the last send came back short
  uint64_t sent_ = 0;        // packets of the owner
  uint64_t inner_sent_ = 0;  // packets that the inner queue took
  // If the inner queue does not copy: slots that it refers to, and what of the owner's packets went with what of ours.
  std::vector<Lent> lent_;
  size_t lent_first_ = 0;
  std::vector<Ticket> tickets_;
  size_t ticket_first_ = 0;
  uint64_t reaped_ = 0;

  UniqueFd sleeps_;  // epoll over the two below
  UniqueFd timer_;
  Micros timer_at_ = kNever;
  bool wants_room_ = false;
};

}  // namespace sluice::port
