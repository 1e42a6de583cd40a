// The simulated network behind port.h; see network.h. Internal to the port.
#pragma once

#include <vector>

#include "transport/port/peer_table.h"
#include "transport/port/queue_counters.h"
#include "transport/port/sim/network.h"

namespace sluice::port::sim {

class SimQueue final : public Queue {
 public:
  SimQueue(Network* network, uint32_t endpoint);
  ~SimQueue() override;

  Result<PeerHandle> add_peer(const Endpoint& endpoint) override;
  void remove_peer(PeerHandle peer) override { peers_.remove(peer); }
  size_t receive(std::span<RxPacket> packets) override;
  void release(std::span<const RxPacket> packets) override;
  size_t send(std::span<const TxPacket> packets) override;
  uint64_t reap() override { return sent_; }
  int fd() const override { return -1; }
  bool arm() override { return waiting() == 0; }
  Endpoint local() const override { return network_->address(endpoint_); }
  QueueCounters counters() const override { return counters_.snapshot(); }

  // For the network: what has arrived and was not yet received.
  size_t waiting() const { return inbox_.size() - first_; }
  void deliver(uint32_t datagram);
  void count_overflow() { LiveCounters::add(counters_.rx_overflow, 1); }

 private:
  Network* const network_;
  const uint32_t endpoint_;
  PeerTable peers_;
  std::vector<uint32_t> targets_;  // endpoint of a peer handle, UINT32_MAX: an address where nobody is
  std::vector<uint32_t> inbox_;    // datagrams of the network, from first_ on
  size_t first_ = 0;
  uint64_t sent_ = 0;
  LiveCounters counters_;
};

class SimPort final : public Port {
 public:
  SimPort(Network* network, uint32_t node);
  const Capabilities& capabilities() const override { return capabilities_; }
  Result<std::unique_ptr<Queue>> open_queue(uint32_t index) override;
  uint32_t max_datagram_to(const Endpoint& endpoint) override;

 private:
  Network* const network_;
  const uint32_t node_;
  Capabilities capabilities_;
};

}  // namespace sluice::port::sim
