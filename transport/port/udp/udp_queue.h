// One UDP socket and its buffers; see udp_port.h. Internal to the port.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <vector>

#include "base/mapping.h"
#include "base/unique_fd.h"
#include "transport/port/peer_table.h"
#include "transport/port/queue_counters.h"
#include "transport/port/udp/udp_port.h"

namespace sluice::port {

// What a queue finds out and the port tells: written by the owner thread, read by the control thread.
struct UdpFindings {
  std::atomic<bool> gso_refused{false};
};

// Settled at open; equal for all queues of a port.
struct UdpSetup {
  UdpOptions options;
  bool ipv4 = true;
  uint32_t max_datagram = 0;
  uint32_t slot_bytes = 0;  // of one receive buffer
};

// What the kernel granted to the socket of a queue, as read back.
struct UdpGrants {
  size_t receive_buffer = 0;
  size_t send_buffer = 0;
  bool gso = false;
  bool gro = false;
};

union SocketAddress {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;
};
socklen_t to_socket_address(const Endpoint& endpoint, bool ipv4, SocketAddress* out);
Endpoint from_socket_address(const SocketAddress& address);

class UdpQueue final : public Queue {
 public:
  static Result<std::unique_ptr<UdpQueue>> open(const UdpSetup& setup, uint32_t index,
                                                std::shared_ptr<UdpFindings> findings);

  Result<PeerHandle> add_peer(const Endpoint& endpoint) override;
  void remove_peer(PeerHandle peer) override { peers_.remove(peer); }
  size_t receive(std::span<RxPacket> packets) override;
  void release(std::span<const RxPacket> packets) override;
  size_t send(std::span<const TxPacket> packets) override;
  uint64_t reap() override { return sent_; }
  int fd() const override { return socket_.get(); }
  bool arm() override { return pending_first_ == pending_count_; }
  Endpoint local() const override { return local_; }
  QueueCounters counters() const override { return counters_.snapshot(); }

  const UdpGrants& grants() const { return grants_; }

 private:
  // Messages of one sendmmsg or recvmmsg. More gain nothing measurable: a message carries up to 64 KiB.
  static constexpr size_t kTxMessages = 64;
  static constexpr size_t kRxMessages = 16;
  static constexpr size_t kTxIovecs = 2048;
  static constexpr size_t kTxControl = CMSG_SPACE(sizeof(uint16_t));
  static constexpr size_t kRxControl = CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(uint32_t)) +
                                       CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(int));

  // A received buffer that has been handed out in part at most.
  struct Pending {
    uint32_t slot = 0;
    uint32_t length = 0;
    uint32_t segment = 0;  // bytes per datagram; the last may be shorter
    uint32_t next = 0;     // offset of the next datagram
    bool started = false;  // a message of 0 bytes is one datagram too
    bool congestion_experienced = false;
    PeerHandle peer = kUnknownPeer;
    Endpoint source;
  };

  explicit UdpQueue(std::shared_ptr<UdpFindings> findings) : findings_(std::move(findings)) {}
  Result<void> configure_socket(const UdpSetup& setup);
  Result<void> allocate(const UdpSetup& setup);

  // send: udp_send.cc
  size_t fill(std::span<const TxPacket> packets, bool gso);
  bool sendable(const TxPacket& packet) const;
  size_t one_by_one(std::span<const TxPacket> packets, bool* blocked);
  void count_sent(std::span<const TxPacket> packets);

  // receive: udp_receive.cc
  bool fetch(size_t wanted);
  void take(const mmsghdr& message, uint32_t slot);
  size_t hand_out(std::span<RxPacket> packets);

  UniqueFd socket_;
  bool ipv4_ = true;
  Endpoint local_;
  UdpGrants grants_;
  std::shared_ptr<UdpFindings> findings_;
  PeerTable peers_;
  std::vector<SocketAddress> addresses_;  // by handle
  socklen_t address_length_ = 0;
  LiveCounters counters_;

  bool gso_ = false;
  uint32_t max_datagram_ = 0;
  uint64_t sent_ = 0;  // packets taken by send(), dropped ones included
  std::vector<mmsghdr> tx_messages_;
  std::vector<uint32_t> tx_packets_;  // how many packets message i carries
  std::vector<iovec> tx_iovecs_;
  struct alignas(cmsghdr) TxControl {
    std::byte bytes[kTxControl];
  };
  std::vector<TxControl> tx_control_;

  Mapping buffers_;
  uint32_t slot_bytes_ = 0;
  std::vector<uint32_t> lent_;        // datagrams of a slot that the owner holds, plus 1 while it is pending
  std::vector<uint32_t> free_slots_;  // a stack: what was used last is still in the cache
  std::vector<mmsghdr> rx_messages_;
  std::vector<iovec> rx_iovecs_;
  std::vector<SocketAddress> rx_sources_;
  struct alignas(cmsghdr) RxControl {
    std::byte bytes[kRxControl];
  };
  std::vector<RxControl> rx_control_;
  std::vector<uint32_t> rx_slots_;
  std::vector<Pending> pending_;
  size_t pending_first_ = 0;
  size_t pending_count_ = 0;
  uint32_t last_overflow_ = 0;  // the kernel's own count, wraps
};

}  // namespace sluice::port
