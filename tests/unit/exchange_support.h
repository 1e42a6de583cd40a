// A few lanes over a network in virtual time, for tests of single rules: each test says which packets are lost, and looks
// at every event. (Whole clusters under all faults at once are the simulator's.)
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "transport/exchange/lane.h"

namespace sluice::exchange {

inline constexpr uint32_t kBlock = 336;  // f32 elements of a block with a payload of 1408

inline Settings small_settings(std::vector<uint32_t> node_of_rank) {
  Settings s;
  s.job = "unit";
  s.sealing = wire::Sealing::kNone;
  s.node_of_rank = std::move(node_of_rank);
  uint32_t nodes = 0;
  for (const uint32_t node : s.node_of_rank) nodes = std::max(nodes, node + 1);
  s.members.resize(nodes);
  for (uint32_t node = 0; node < nodes; ++node)
    s.members[node].join_nonce[0] = static_cast<uint8_t>(node + 1);
  s.hard_deadline = 10'000;
  s.pull_patience = 0;
  s.max_op_bytes = 1 << 17;
  s.pool_bytes = 8 << 20;
  return s;
}

inline bool is(const wire::Header& header, wire::Type type) {
  return header.type == static_cast<uint8_t>(type);
}

// One call of one rank, with its slots.
template <typename T>
struct Call {
  std::vector<T> in, out;
  Submission submission;

  Call(uint32_t seq, std::vector<T> values, OpClass op_class, ElementType type = ElementType::kF32,
       ReduceKind kind = ReduceKind::kSum)
      : in(std::move(values)), out(in.size()) {
    std::memset(out.data(), 0x5a, out.size() * sizeof(T));
    submission.op_seq = seq;
    submission.count = in.size();
    submission.tag = 7;
    submission.kind = kind;
    submission.type = type;
    submission.op_class = op_class;
    submission.contribution = reinterpret_cast<const std::byte*>(in.data());
    submission.result = reinterpret_cast<std::byte*>(out.data());
  }
};

class LaneNet {
 public:
  using Rule = std::function<bool(const wire::Header&, uint32_t from, uint32_t to)>;

  explicit LaneNet(const Settings& base) {
    for (uint32_t node = 0; node < base.members.size(); ++node) {
      Settings s = base;
      s.self = node;
      lanes.push_back(std::make_unique<Lane>(s, now));
    }
    events.resize(lanes.size());
  }

  Micros now = 1'000'000;
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<std::vector<Event>> events;  // by node, oldest first
  Rule lost;                               // true: this packet does not arrive
  std::vector<wire::Header> sent;          // headers, when `record`
  bool record = false;

  template <typename T>
  Status submit(uint32_t node, const Call<T>& call) {
    return lanes[node]->submit(now, call.submission);
  }

  // Runs everything for so long.
  void run(Micros time) {
    const Micros end = now + time;
    for (uint64_t rounds = 0; rounds < 2'000'000; ++rounds) {
      pump();
      Micros next = network_.empty() ? kNever : network_.top().at;
      for (const auto& lane : lanes) next = std::min(next, lane->next_timer());
      next = std::max(next, now);
      if (next > end) break;
      if (next == now) ++next;  // what is due now and does not go away is tried again
      now = std::min(next, end);
      while (!network_.empty() && network_.top().at <= now) {
        const Packet packet = network_.top();
        network_.pop();
        lanes[packet.to]->on_packet(now, packet.bytes);
      }
      for (const auto& lane : lanes) {
        if (lane->next_timer() <= now) lane->tick(now);
      }
      if (now == end) break;
    }
    pump();
    now = end;
  }

  // The first event of this op with one of these bits; fails the test when there is none.
  Event event(uint32_t node, uint32_t seq, uint8_t bits, uint32_t rank = 0) const {
    for (const Event& event : events[node]) {
      if (event.op_seq == seq && (event.events & bits) != 0 && event.local_rank == rank) return event;
    }
    ADD_FAILURE() << "node " << node << " has no event " << int(bits) << " of op " << seq;
    return {};
  }
  bool has_event(uint32_t node, uint32_t seq, uint8_t bits, uint32_t rank = 0) const {
    for (const Event& event : events[node]) {
      if (event.op_seq == seq && (event.events & bits) != 0 && event.local_rank == rank) return true;
    }
    return false;
  }

  // A header as a lane of `from` would make it.
  wire::Header header(uint32_t from, wire::Type type, uint32_t seq) {
    wire::Header h;
    h.type = static_cast<uint8_t>(type);
    h.sender = static_cast<uint16_t>(from);
    h.job = lanes[from]->job_id();
    h.epoch = lanes[from]->epoch();
    h.op_seq = seq;
    h.counter = next_counter_++;
    return h;
  }
  wire::Drop inject(uint32_t to, const wire::Header& header, const std::vector<std::byte>& payload = {}) {
    std::vector<std::byte> bytes(sizeof header + payload.size());
    std::memcpy(bytes.data(), &header, sizeof header);
    if (!payload.empty()) std::memcpy(bytes.data() + sizeof header, payload.data(), payload.size());
    const wire::Drop drop = lanes[to]->on_packet(now, bytes);
    pump();
    return drop;
  }

 private:
  struct Packet {
    Micros at;
    uint64_t order;
    uint32_t to;
    std::vector<std::byte> bytes;
    bool operator<(const Packet& other) const { return at != other.at ? at > other.at : order > other.order; }
  };

  void pump() {
    std::vector<Outgoing> out(64);
    for (uint32_t node = 0; node < lanes.size(); ++node) {
      while (const size_t count = lanes[node]->poll_send(now, out)) {
        for (size_t i = 0; i < count; ++i) {
          wire::Header header;
          std::memcpy(&header, out[i].header, sizeof header);
          if (record) sent.push_back(header);
          if (lost && lost(header, node, out[i].node)) continue;
          Packet packet{now + 50, order_++, out[i].node, {}};
          packet.bytes.insert(packet.bytes.end(), out[i].header, out[i].header + wire::kHeaderBytes);
          packet.bytes.insert(packet.bytes.end(), out[i].payload, out[i].payload + out[i].payload_length);
          if (out[i].tag != nullptr)
            packet.bytes.insert(packet.bytes.end(), out[i].tag, out[i].tag + wire::kTagBytes);
          network_.push(std::move(packet));
        }
      }
      Event event;
      while (lanes[node]->poll_event(&event)) events[node].push_back(event);
    }
  }

  std::priority_queue<Packet> network_;
  uint64_t order_ = 0;
  uint64_t next_counter_ = 1'000'000;
};

template <typename T>
std::vector<std::byte> bytes_of(const T& body) {
  std::vector<std::byte> bytes(sizeof body);
  std::memcpy(bytes.data(), &body, sizeof body);
  return bytes;
}

}  // namespace sluice::exchange
