#include "tools/sluice_sim/bench.h"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "transport/exchange/lane.h"

namespace sluice::simulation {
namespace {

using Clock = std::chrono::steady_clock;
using exchange::Lane;

double ns(Clock::duration time, uint64_t count) {
  return count == 0 ? 0 : std::chrono::duration<double, std::nano>(time).count() / static_cast<double>(count);
}

struct Wired {
  uint32_t from, to;
  std::vector<std::byte> bytes;
};

// Two nodes hand each other what they send, at once and without loss: ops of 4 MiB f32.
int measure(OpClass op_class, wire::Sealing sealing) {
  constexpr uint32_t kNodes = 2;
  constexpr uint64_t kCount = 1 << 20;
  constexpr uint32_t kOps = 30;
  std::vector<std::unique_ptr<Lane>> lanes;
  exchange::Settings settings;
  settings.job = "bench";
  settings.sealing = sealing;
  settings.members.resize(kNodes);
  settings.members[1].join_nonce[0] = 1;
  settings.node_of_rank = {0, 1};
  settings.hard_deadline = 1'000'000;
  settings.pool_bytes = 0;
  settings.max_op_bytes = kCount * 4;
  settings.pool_bytes = 2 * exchange::minimum_pool_bytes(settings);
  Micros now = 1;
  for (settings.self = 0; settings.self < kNodes; ++settings.self)
    lanes.push_back(std::make_unique<Lane>(settings, now));

  std::vector<float> contribution(kCount, 1.0F);
  std::vector<std::vector<float>> result(kNodes, std::vector<float>(kCount));
  std::array<exchange::Outgoing, 64> out;
  std::array<Clock::duration, wire::kTypes> taking{};
  std::array<uint64_t, wire::kTypes> taken{};
  Clock::duration sending{};
  uint64_t sent = 0, done = 0;
  std::vector<Wired> wires;
  const auto started = Clock::now();
  for (uint32_t op = 0; op < kOps; ++op) {
    for (uint32_t node = 0; node < kNodes; ++node) {
      exchange::Submission submission;
      submission.op_seq = op;
      submission.count = kCount;
      submission.op_class = op_class;
      submission.contribution = reinterpret_cast<const std::byte*>(contribution.data());
      submission.result = reinterpret_cast<std::byte*>(result[node].data());
      if (lanes[node]->submit(now, submission) != Status::kOk) return 1;
    }
    for (uint32_t results = 0; results < kNodes;) {
      now += 10;
      for (uint32_t node = 0; node < kNodes; ++node) {
        if (lanes[node]->next_timer() <= now) lanes[node]->tick(now);
        auto from = Clock::now();
        const size_t count = lanes[node]->poll_send(now, out);
        sending += Clock::now() - from;
        sent += count;
        for (size_t i = 0; i < count; ++i) {
          Wired wired{node, out[i].node, {}};
          wired.bytes.insert(wired.bytes.end(), out[i].header, out[i].header + wire::kHeaderBytes);
          wired.bytes.insert(wired.bytes.end(), out[i].payload, out[i].payload + out[i].payload_length);
          if (out[i].tag != nullptr)
            wired.bytes.insert(wired.bytes.end(), out[i].tag, out[i].tag + wire::kTagBytes);
          wires.push_back(std::move(wired));
        }
        for (const Wired& wired : wires) {
          const auto type = static_cast<size_t>(wired.bytes[2]);
          from = Clock::now();
          (void)lanes[wired.to]->on_packet(now, wired.bytes);
          taking[type] += Clock::now() - from;
          ++taken[type];
        }
        wires.clear();
      }
      exchange::Event event;
      for (auto& lane : lanes) {
        while (lane->poll_event(&event)) {
          if ((event.events & kEventResult) != 0) ++results;
          if (is_error(event.status)) return 1;
        }
      }
    }
    ++done;
    if (result[0][kCount - 1] != 2.0F) return 1;
  }
  const std::chrono::duration<double> all = Clock::now() - started;
  fmt::print("{:10} {:5} {:10.0f} {:10.0f} {:12.0f} {:14.0f}\n",
             op_class == OpClass::kExact ? "exact" : "consistent",
             sealing == wire::Sealing::kNone ? "none" : "auth", ns(taking[6], taken[6]),
             ns(taking[7], taken[7]), ns(sending, sent),
             static_cast<double>(done) * kCount * 4 * kNodes / all.count() / 1e6);
  return 0;
}

}  // namespace

int run_bench() {
  fmt::print(
      "2 nodes in one thread, 4 MiB f32, payload 1408; the clock itself costs about 25 ns per packet\n");
  fmt::print("{:10} {:5} {:>10} {:>10} {:>12} {:>14}\n", "class", "seal", "ns/PUSH in", "ns/PULL in",
             "ns/packet out", "MB/s both nodes");
  int worst = 0;
  for (const OpClass op_class : {OpClass::kExact, OpClass::kConsistent}) {
    for (const auto sealing : {wire::Sealing::kNone, wire::Sealing::kAuth}) {
      worst = std::max(worst, measure(op_class, sealing));
    }
  }
  return worst;
}

}  // namespace sluice::simulation
