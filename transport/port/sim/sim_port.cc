#include "transport/port/sim/sim_port.h"

#include <cerrno>

#include "transport/port/endpoint.h"

namespace sluice::port::sim {

SimQueue::SimQueue(Network* network, uint32_t endpoint) : network_(network), endpoint_(endpoint) {
  network_->open_queues_[endpoint_] = this;
}

SimQueue::~SimQueue() {
  network_->open_queues_[endpoint_] = nullptr;
  for (; first_ < inbox_.size(); ++first_) network_->drop(inbox_[first_]);
}

Result<PeerHandle> SimQueue::add_peer(const Endpoint& endpoint) {
  if (!is_ipv4(endpoint))
    return Error{EAFNOSUPPORT, "the simulated network has no address " + to_string(endpoint)};
  const PeerHandle peer = peers_.add(endpoint);
  if (targets_.size() < peers_.capacity()) targets_.resize(peers_.capacity());
  targets_[peer] = network_->endpoint_of(endpoint);
  return peer;
}

void SimQueue::deliver(uint32_t datagram) {
  if (network_->datagrams_[datagram].bytes.size() > network_->max_datagram()) {
    LiveCounters::add(counters_.rx_truncated, 1);
    network_->drop(datagram);
    return;
  }
  if (first_ == inbox_.size()) {
    inbox_.clear();
    first_ = 0;
  }
  inbox_.push_back(datagram);
}

size_t SimQueue::receive(std::span<RxPacket> packets) {
  LiveCounters::add(counters_.rx_calls, 1);
  size_t count = 0;
  uint64_t bytes = 0;
  for (; count < packets.size() && first_ < inbox_.size(); ++count, ++first_) {
    const Network::Datagram& datagram = network_->datagrams_[inbox_[first_]];
    RxPacket& packet = packets[count];
    packet.data = datagram.bytes.data();
    packet.length = static_cast<uint32_t>(datagram.bytes.size());
    packet.source = network_->address(datagram.from);
    packet.peer = peers_.find(packet.source);
    packet.congestion_experienced = false;
    packet.token = inbox_[first_];
    bytes += packet.length;
  }
  LiveCounters::add(counters_.rx_datagrams, count);
  LiveCounters::add(counters_.rx_bytes, bytes);
  return count;
}

void SimQueue::release(std::span<const RxPacket> packets) {
  for (const RxPacket& packet : packets) network_->drop(static_cast<uint32_t>(packet.token));
}

size_t SimQueue::send(std::span<const TxPacket> packets) {
  LiveCounters::add(counters_.tx_calls, 1);
  size_t done = 0;
  for (; done < packets.size(); ++done) {
    const TxPacket& packet = packets[done];
    const size_t length = size_t{packet.header_length} + packet.payload_length + packet.trailer_length;
    const bool known = peers_.contains(packet.peer);
    if (!known || length > network_->max_datagram()) {
      LiveCounters::add(counters_.tx_errors, 1);
      continue;
    }
    // Nobody lives at the address: the datagram leaves and is never seen again.
    if (targets_[packet.peer] != UINT32_MAX) {
      const std::span<const std::byte> pieces[3] = {{packet.header, packet.header_length},
                                                    {packet.payload, packet.payload_length},
                                                    {packet.trailer, packet.trailer_length}};
      if (!network_->send(endpoint_, targets_[packet.peer], pieces)) {
        LiveCounters::add(counters_.tx_again, 1);
        break;
      }
    }
    LiveCounters::add(counters_.tx_datagrams, 1);
    LiveCounters::add(counters_.tx_bytes, length);
  }
  sent_ += done;
  return done;
}

SimPort::SimPort(Network* network, uint32_t node) : network_(network), node_(node) {
  capabilities_.kind = "sim";
  capabilities_.device = "node" + std::to_string(node);
  capabilities_.max_datagram = network->max_datagram();
  capabilities_.queues = network->queues();
  capabilities_.link_bits_per_second = network->plan().bits_per_second;
}

Result<std::unique_ptr<Queue>> SimPort::open_queue(uint32_t index) {
  if (index >= network_->queues()) {
    return Error{EINVAL, "queue " + std::to_string(index) + " of " + std::to_string(network_->queues())};
  }
  const uint32_t endpoint = node_ * network_->queues() + index;
  if (network_->open_queues_[endpoint] != nullptr) {
    return Error{EADDRINUSE, to_string(network_->address(endpoint)) + " is open already"};
  }
  return std::unique_ptr<Queue>(std::make_unique<SimQueue>(network_, endpoint));
}

uint32_t SimPort::max_datagram_to(const Endpoint& endpoint) {
  return network_->endpoint_of(endpoint) == UINT32_MAX ? 0 : network_->max_datagram();
}

}  // namespace sluice::port::sim
