// What the tests of the faulty port share: a node with a faulty port between two calm ones, in a simulated network with
// its clock, so that every number is that of one seed.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "transport/port/endpoint.h"
#include "transport/port/faulty/faulty_port.h"
#include "transport/port/sim/network.h"

namespace sluice::port::testing {

using Bytes = std::vector<std::byte>;
inline constexpr size_t kLength = 200;

inline Bytes numbered(uint64_t number, size_t length = kLength) {
  Bytes bytes(length, std::byte{0x5a});
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}
inline uint64_t number_of(const Bytes& bytes) {
  uint64_t number = UINT64_MAX;
  if (bytes.size() >= sizeof number) std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

// Nodes 1 and 2 are calm; node 0's port is the faulty one.
struct Bench {
  explicit Bench(FaultyPlan plan, size_t hold_bytes = 1 << 20)
      : network({.nodes = 3, .queues = 1, .seed = 1, .plan = calm()}) {
    FaultyOptions options;
    options.plan = std::move(plan);
    options.hold_bytes = hold_bytes;
    options.clock = [this] { return network.now(); };
    port = make_faulty_port(network.open_port(0), options);
    queue = std::move(*port->open_queue(0));
    for (uint32_t node = 1; node < 3; ++node) {
      others.push_back(network.open_port(node));
      other_queues.push_back(std::move(*others.back()->open_queue(0)));
      peers.push_back(*queue->add_peer(other_queues.back()->local()));
      back.push_back(*other_queues.back()->add_peer(queue->local()));
    }
  }
  static sim::FaultPlan calm() {
    sim::FaultPlan plan;
    plan.everywhere.latency = 0;
    plan.receive_buffer = 1 << 20;
    return plan;
  }

  static size_t put(Queue& from, PeerHandle to, const Bytes& bytes) {
    TxPacket packet;
    packet.peer = to;
    packet.header = bytes.data();
    packet.header_length = static_cast<uint16_t>(std::min<size_t>(bytes.size(), 16));
    packet.payload = bytes.data() + packet.header_length;
    packet.payload_length = static_cast<uint32_t>(bytes.size() - packet.header_length);
    return from.send({&packet, 1});
  }
  static std::vector<Bytes> take(Queue& queue, std::vector<RxPacket>* packets = nullptr) {
    std::vector<Bytes> all;
    RxPacket burst[32];
    for (size_t got = 0; (got = queue.receive(burst)) > 0;) {
      for (size_t i = 0; i < got; ++i) {
        all.emplace_back(burst[i].data, burst[i].data + burst[i].length);
        if (packets != nullptr) packets->push_back(burst[i]);
      }
      queue.release(std::span(burst).first(got));
    }
    return all;
  }
  // Lets everything that is held out.
  void wait(Micros time = 1'000'000) {
    network.advance_to(network.now() + time);
    EXPECT_EQ(queue->send({}), 0U);
    network.advance_to(network.now() + 1);
  }
  // Sends `count` datagrams from the faulty node to `node`, one each microsecond, and collects.
  std::vector<Bytes> send(uint64_t count, uint32_t node = 1, uint64_t first = 0) {
    for (uint64_t i = 0; i < count; ++i) {
      EXPECT_EQ(put(*queue, peers[node - 1], numbered(first + i)), 1U);
      network.advance_to(network.now() + 1);
    }
    wait();
    return take(*other_queues[node - 1]);
  }
  // The other way.
  std::vector<Bytes> receive(uint64_t count, uint32_t node = 1, uint64_t first = 0) {
    std::vector<Bytes> all;
    for (uint64_t i = 0; i < count; ++i) {
      EXPECT_EQ(put(*other_queues[node - 1], back[node - 1], numbered(first + i)), 1U);
      network.advance_to(network.now() + 1);
      for (Bytes& bytes : take(*queue)) all.push_back(std::move(bytes));
    }
    wait();
    for (Bytes& bytes : take(*queue)) all.push_back(std::move(bytes));
    return all;
  }
  uint64_t fired(Fault fault) const { return port->fault_counters().total(fault); }

  sim::Network network;
  std::unique_ptr<FaultyPort> port;
  std::vector<std::unique_ptr<Port>> others;
  std::unique_ptr<Queue> queue;
  std::vector<std::unique_ptr<Queue>> other_queues;
  std::vector<PeerHandle> peers, back;
};

// `count` of `trials` is what probability `p` gives, within five standard deviations.
inline void expect_rate(uint64_t count, uint64_t trials, double p) {
  const double mean = static_cast<double>(trials) * p;
  EXPECT_NEAR(static_cast<double>(count), mean, 5 * std::sqrt(mean * (1 - p))) << "of " << trials;
}

}  // namespace sluice::port::testing
