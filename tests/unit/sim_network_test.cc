// The simulated network: reproducible, and every knob of the plan does what it says, at the rate it says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/prng.h"
#include "transport/port/sim/network.h"

namespace sluice::port::sim {
namespace {

using Bytes = std::vector<std::byte>;

Bytes numbered(uint64_t number, size_t length = 100) {
  Bytes bytes(length, std::byte{0x5a});
  std::memcpy(bytes.data(), &number, 8);
  return bytes;
}

uint64_t number_of(std::span<const std::byte> bytes) {
  uint64_t number = UINT64_MAX;
  if (bytes.size() >= 8) std::memcpy(&number, bytes.data(), 8);
  return number;
}

struct Arrival {
  Micros time;
  uint32_t from;
  uint32_t to;
  Bytes bytes;
};

// A network that notes what arrives.
struct Bench {
  explicit Bench(const FaultPlan& plan, uint32_t nodes = 2, uint64_t seed = 1)
      : network({.nodes = nodes, .queues = 1, .seed = seed, .plan = plan}) {
    network.on_delivery([this](uint32_t from, uint32_t to, std::span<const std::byte> bytes) {
      arrivals.push_back({network.now(), from, to, Bytes(bytes.begin(), bytes.end())});
    });
  }
  // `count` datagrams from 0 to 1, one every `gap`.
  void stream(uint64_t count, Micros gap = 1, uint32_t from = 0, uint32_t to = 1) {
    for (uint64_t i = 0; i < count; ++i) {
      network.send(from, to, numbered(i));
      network.advance_to(network.now() + gap);
    }
  }
  void finish() {
    while (network.next_event() != kNever) network.advance_to(network.next_event());
    const NetworkCounters& c = network.counters();
    EXPECT_EQ(c.sent + c.duplicated + c.replayed, c.delivered + c.lost + c.lost_in_burst + c.partitioned +
                                                      c.switch_overflow + c.receive_overflow);
    EXPECT_EQ(c.delivered, arrivals.size());
    EXPECT_EQ(network.pending(), 0U);
  }
  std::vector<uint64_t> numbers() const {
    std::vector<uint64_t> all;
    for (const Arrival& arrival : arrivals) all.push_back(number_of(arrival.bytes));
    return all;
  }
  Network network;
  std::vector<Arrival> arrivals;
};

TEST(SimNetwork, CalmDeliversAllInOrderAfterTheLatency) {
  FaultPlan plan;
  plan.everywhere.latency = 70;
  Bench bench(plan);
  bench.stream(1000);
  bench.finish();
  ASSERT_EQ(bench.arrivals.size(), 1000U);
  for (size_t i = 0; i < 1000; ++i) {
    EXPECT_EQ(bench.arrivals[i].bytes, numbered(i));
    EXPECT_EQ(bench.arrivals[i].time, static_cast<Micros>(i) + 70);
  }
}

TEST(SimNetwork, TheSameSeedGivesTheSameTraceAndAnotherSeedAnother) {
  const auto trace = [](uint64_t seed, uint64_t change) {
    Bench bench(swarm_plan(7, 5, 1'000'000), 5, seed);
    Prng random(3);
    for (uint64_t i = 0; i < 20000; ++i) {
      const auto from = static_cast<uint32_t>(random.below(5));
      const auto to = static_cast<uint32_t>(random.below(5));
      bench.network.send(from, to, numbered(i == 10000 ? i + change : i, 8 + random.below(1400)));
      bench.network.advance_to(bench.network.now() + static_cast<Micros>(random.below(5)));
    }
    bench.finish();
    return bench.network.trace_hash();
  };
  EXPECT_EQ(trace(1, 0), trace(1, 0));
  EXPECT_NE(trace(1, 0), trace(2, 0));
  EXPECT_NE(trace(1, 0), trace(1, 1)) << "one bit of one datagram must show";
}

TEST(SimNetwork, TraceIsTheSameOnEveryMachine) {
  // A value from another run: fails when a change of code, compiler or library changes what a seed means.
  FaultPlan plan;
  plan.everywhere.jitter = 30;
  plan.everywhere.loss = 0.1;
  plan.everywhere.tail_probability = 0.01;
  plan.everywhere.duplicate = 0.05;
  plan.everywhere.corrupt = 0.01;
  Bench bench(plan, 2, 42);
  bench.stream(5000);
  bench.finish();
  EXPECT_EQ(bench.network.trace_hash(), 0xe7b12883ed224fefULL)
      << std::hex << "0x" << bench.network.trace_hash();
}

TEST(SimNetwork, LossHitsTheRate) {
  FaultPlan plan;
  plan.everywhere.loss = 0.1;
  Bench bench(plan);
  bench.stream(100000, 0);
  bench.finish();
  EXPECT_NEAR(static_cast<double>(bench.network.counters().lost), 10000, 500);
}

TEST(SimNetwork, BurstsAreBursts) {
  FaultPlan plan;
  plan.everywhere.burst_enter = 0.01;
  plan.everywhere.burst_leave = 0.1;
  Bench bench(plan);
  bench.stream(200000, 0);
  bench.finish();
  // Bad 1/11 of the time, in runs of 10 on average.
  EXPECT_NEAR(static_cast<double>(bench.network.counters().lost_in_burst) / 200000, 1.0 / 11, 0.01);
  std::vector<uint64_t> numbers = bench.numbers();
  size_t runs = 0;
  for (size_t i = 1; i < numbers.size(); ++i) runs += numbers[i] != numbers[i - 1] + 1;
  const double length =
      static_cast<double>(bench.network.counters().lost_in_burst) / static_cast<double>(runs);
  EXPECT_NEAR(length, 10, 1);
}

TEST(SimNetwork, OneLinkOneDirection) {
  FaultPlan plan;
  LinkRule rule;
  rule.from = 0;
  rule.to = 1;
  rule.faults.loss = 1;
  plan.rules.push_back(rule);
  Bench bench(plan, 3);
  for (const auto& [from, to] : {std::pair{0U, 1U}, {1U, 0U}, {0U, 2U}, {2U, 1U}})
    bench.stream(10, 1, from, to);
  bench.finish();
  EXPECT_EQ(bench.arrivals.size(), 30U);
  for (const Arrival& arrival : bench.arrivals) EXPECT_FALSE(arrival.from == 0 && arrival.to == 1);
}

TEST(SimNetwork, TailsSpreadOverTheOctaves) {
  FaultPlan plan;
  plan.everywhere.latency = 10;
  plan.everywhere.tail_probability = 0.5;
  plan.everywhere.tail_min = 100;
  plan.everywhere.tail_max = 100'000;
  Bench bench(plan);
  bench.stream(40000, 0);
  bench.finish();
  std::map<int, int> decades;
  for (const Arrival& arrival : bench.arrivals) {
    ASSERT_TRUE(arrival.time == 10 || (arrival.time >= 110 && arrival.time <= 100'010));
    if (arrival.time > 10) ++decades[static_cast<int>(std::to_string(arrival.time - 10).size())];
  }
  const int all = decades[3] + decades[4] + decades[5] + decades[6];
  EXPECT_NEAR(all, 20000, 600);
  for (const int decade : {3, 4, 5}) EXPECT_NEAR(decades[decade], all / 3, all / 10) << decade;
}

TEST(SimNetwork, DuplicatesArriveTwice) {
  FaultPlan plan;
  plan.everywhere.duplicate = 0.2;
  plan.everywhere.jitter = 50;
  Bench bench(plan);
  bench.stream(10000, 0);
  bench.finish();
  std::map<uint64_t, int> seen;
  for (const uint64_t number : bench.numbers()) ++seen[number];
  size_t twice = 0;
  for (const auto& [number, times] : seen) {
    ASSERT_LE(times, 2);
    twice += times == 2;
  }
  EXPECT_EQ(seen.size(), 10000U);
  EXPECT_NEAR(static_cast<double>(twice), 2000, 200);
}

TEST(SimNetwork, ReorderedOnesAreOvertaken) {
  FaultPlan plan;
  plan.everywhere.reorder = 0.1;
  plan.everywhere.reorder_delay = 100;
  Bench bench(plan);
  bench.stream(10000);
  bench.finish();
  std::vector<uint64_t> numbers = bench.numbers();
  ASSERT_EQ(numbers.size(), 10000U);
  uint64_t highest = 0;
  size_t late = 0;
  for (const uint64_t number : numbers) {
    late += number < highest;
    highest = std::max(highest, number);
  }
  EXPECT_NEAR(static_cast<double>(late), 1000, 150);
  std::sort(numbers.begin(), numbers.end());
  for (size_t i = 0; i < numbers.size(); ++i) ASSERT_EQ(numbers[i], i);
}

TEST(SimNetwork, ReplaysAreOldDatagramsOfTheSameLink) {
  FaultPlan plan;
  plan.everywhere.replay = 0.1;
  Bench bench(plan, 3);
  for (uint64_t i = 0; i < 10000; ++i) {
    bench.network.send(0, 1, numbered(i));
    bench.network.send(0, 2, numbered(i + 1'000'000));
    bench.network.advance_to(bench.network.now() + 1);
  }
  bench.finish();
  std::map<uint32_t, uint64_t> newest;
  size_t old = 0;
  size_t very_old = 0;
  for (const Arrival& arrival : bench.arrivals) {
    const uint64_t number = number_of(arrival.bytes);
    ASSERT_EQ(arrival.to == 2, number >= 1'000'000);
    if (number < newest[arrival.to]) {
      ++old;
      very_old += newest[arrival.to] - number > 100;
    }
    newest[arrival.to] = std::max(newest[arrival.to], number);
  }
  EXPECT_NEAR(static_cast<double>(bench.network.counters().replayed), 2000, 200);
  EXPECT_GT(old, 1500U);
  EXPECT_GT(very_old, 300U);
}

TEST(SimNetwork, DamageIsDoneToCopies) {
  FaultPlan plan;
  plan.everywhere.corrupt = 0.3;
  Bench flips(plan);
  flips.stream(10000, 0);
  flips.finish();
  size_t damaged = 0;
  for (size_t i = 0; i < flips.arrivals.size(); ++i) {
    const Bytes good = numbered(i);
    size_t bits = 0;
    ASSERT_EQ(flips.arrivals[i].bytes.size(), good.size());
    for (size_t at = 0; at < good.size(); ++at) {
      bits +=
          static_cast<size_t>(std::popcount(static_cast<uint8_t>(good[at] ^ flips.arrivals[i].bytes[at])));
    }
    ASSERT_LE(bits, 3U);
    damaged += bits > 0;
  }
  EXPECT_NEAR(static_cast<double>(damaged), 3000, 200);

  plan = {};
  plan.everywhere.truncate = 0.3;
  Bench cuts(plan);
  cuts.stream(10000, 0);
  cuts.finish();
  std::set<size_t> lengths;
  size_t cut = 0;
  for (const Arrival& arrival : cuts.arrivals) {
    cut += arrival.bytes.size() < 100;
    lengths.insert(arrival.bytes.size());
  }
  EXPECT_NEAR(static_cast<double>(cut), 3000, 200);
  EXPECT_EQ(lengths.size(), 101U);  // 0 to 99 and whole
}

TEST(SimNetwork, PartitionsCutBothWaysOrOne) {
  for (const auto& [out, into] : {std::pair{true, true}, {true, false}, {false, true}}) {
    FaultPlan plan;
    plan.everywhere.latency = 5;
    Partition partition;
    partition.start = 100;
    partition.end = 200;
    partition.group = {0, 1};
    partition.out = out;
    partition.into = into;
    plan.partitions.push_back(partition);
    Bench bench(plan, 4);
    while (bench.network.now() < 300) {
      for (uint32_t from = 0; from < 4; ++from) {
        for (uint32_t to = 0; to < 4; ++to)
          bench.network.send(from, to, numbered(static_cast<uint64_t>(bench.network.now())));
      }
      bench.network.advance_to(bench.network.now() + 10);
    }
    bench.finish();
    std::map<std::pair<uint32_t, uint32_t>, size_t> during;
    std::map<std::pair<uint32_t, uint32_t>, size_t> outside;
    for (const Arrival& arrival : bench.arrivals) {
      const uint64_t sent = number_of(arrival.bytes);
      ++(sent >= 100 && sent < 200 ? during : outside)[{arrival.from, arrival.to}];
    }
    for (uint32_t from = 0; from < 4; ++from) {
      for (uint32_t to = 0; to < 4; ++to) {
        const bool leaves = from < 2 && to >= 2;
        const bool enters = from >= 2 && to < 2;
        EXPECT_EQ((during[{from, to}]), ((leaves && out) || (enters && into) ? 0U : 10U))
            << from << "->" << to;
        EXPECT_EQ((outside[{from, to}]), 20U);
      }
    }
  }
}

TEST(SimNetwork, PausedNodesGetItAllAfterwardsInOrder) {
  FaultPlan plan;
  plan.everywhere.latency = 5;
  plan.pauses.push_back({1, 100, 200});
  plan.pauses.push_back({1, 150, 300});  // overlaps
  Bench bench(plan);
  EXPECT_FALSE(bench.network.paused(1));
  bench.network.advance_to(120);
  EXPECT_TRUE(bench.network.paused(1));
  EXPECT_FALSE(bench.network.paused(0));
  EXPECT_EQ(bench.network.paused_until(1), 300);
  bench.stream(50);
  bench.finish();
  ASSERT_EQ(bench.arrivals.size(), 50U);
  for (size_t i = 0; i < 50; ++i) {
    EXPECT_EQ(bench.arrivals[i].time, 300);
    EXPECT_EQ(number_of(bench.arrivals[i].bytes), i);
  }
}

TEST(SimNetwork, APausedNodeHoldsNoMoreThanItsReceiveBuffer) {
  FaultPlan plan;
  plan.pauses.push_back({1, 0, 1000});
  plan.receive_buffer = 10;
  Bench bench(plan);
  bench.stream(50);
  bench.finish();
  EXPECT_EQ(bench.arrivals.size(), 10U);
  EXPECT_EQ(bench.network.counters().receive_overflow, 40U);
}

TEST(SimNetwork, LinkSpeedPacesAndFullDevicesRefuse) {
  FaultPlan plan;
  plan.everywhere.latency = 0;
  plan.bits_per_second = 1'000'000'000;
  plan.device_queue_bytes = 20'000;
  Bench bench(plan);
  uint64_t sent = 0;
  while (bench.network.send(0, 1, numbered(sent, 1472))) ++sent;
  EXPECT_NEAR(static_cast<double>(sent), 20'000.0 / 1538, 1.5);  // 1472 + 66 on the wire
  const Micros free_at = bench.network.device_free_at(0);
  EXPECT_GT(free_at, bench.network.now());
  bench.network.advance_to(free_at);
  EXPECT_TRUE(bench.network.send(0, 1, numbered(sent, 1472))) << "free when it said so";
  while (sent < 10000) {
    if (bench.network.send(0, 1, numbered(++sent, 1472))) continue;
    --sent;
    bench.network.advance_to(bench.network.device_free_at(0));
  }
  bench.finish();
  // 10,001 datagrams at 12.3 us each.
  EXPECT_NEAR(static_cast<double>(bench.network.now()), 10001 * 12.304, 1000);
}

TEST(SimNetwork, IncastOverflowsTheSwitch) {
  FaultPlan plan;
  plan.bits_per_second = 1'000'000'000;
  plan.switch_queue_bytes = 50'000;
  plan.device_queue_bytes = 1'000'000;
  Bench bench(plan, 9);
  for (uint32_t from = 1; from < 9; ++from) {
    for (uint64_t i = 0; i < 50; ++i) ASSERT_TRUE(bench.network.send(from, 0, numbered(i, 1472)));
  }
  bench.finish();
  const NetworkCounters& counters = bench.network.counters();
  EXPECT_GT(counters.switch_overflow, 200U);
  EXPECT_GT(counters.delivered, 70U);
}

TEST(SimNetwork, HealEndsEveryFault) {
  FaultPlan plan;
  LinkFaults& faults = plan.everywhere;
  faults.loss = faults.duplicate = faults.corrupt = faults.truncate = faults.reorder = faults.replay = 0.2;
  faults.tail_probability = 0.2;
  faults.burst_enter = 0.1;
  plan.rules.push_back({0, 1, faults});
  plan.partitions.push_back({0, kNever, {0}, true, true});
  plan.pauses.push_back({1, 0, 1'000'000'000});
  Bench bench(plan, 3);
  for (const uint32_t to : {1U, 2U}) bench.stream(200, 1, 0, to);
  bench.stream(200, 1, 2, 1);
  EXPECT_TRUE(bench.arrivals.empty());
  const size_t parked = bench.network.pending();
  EXPECT_GT(parked, 100U);
  bench.network.heal();
  bench.network.advance_to(bench.network.now() + 20'000);
  EXPECT_FALSE(bench.network.paused(1));
  EXPECT_EQ(bench.network.pending(), 0U) << "what waited at the paused node arrives at once";
  EXPECT_EQ(bench.arrivals.size(), parked);
  bench.arrivals.clear();
  bench.network.on_delivery([&](uint32_t from, uint32_t to, std::span<const std::byte> bytes) {
    bench.arrivals.push_back({bench.network.now(), from, to, Bytes(bytes.begin(), bytes.end())});
  });
  for (const uint32_t to : {1U, 2U}) bench.stream(200, 1, 0, to);
  bench.network.advance_to(bench.network.now() + 1000);
  ASSERT_EQ(bench.arrivals.size(), 400U);
  for (size_t i = 0; i < 400; ++i) EXPECT_EQ(bench.arrivals[i].bytes, numbered(i % 200));
}

TEST(SimNetwork, HandlersMaySend) {
  FaultPlan plan;
  plan.everywhere.latency = 10;
  Network network({.nodes = 2, .queues = 1, .seed = 1, .plan = plan});
  int bounces = 0;
  network.on_delivery([&](uint32_t from, uint32_t to, std::span<const std::byte> bytes) {
    if (++bounces < 1000) network.send(to, from, bytes);
  });
  network.send(0, 1, numbered(1));
  network.advance_to(9);
  EXPECT_EQ(bounces, 0);
  network.advance_to(10'000);
  EXPECT_EQ(bounces, 1000);
}

TEST(SimNetwork, AddressesNameEndpoints) {
  Network network({.nodes = 300, .queues = 4, .seed = 1, .plan = {}});
  for (const uint32_t endpoint : {0U, 5U, 1023U, 1199U}) {
    EXPECT_EQ(network.endpoint_of(network.address(endpoint)), endpoint);
  }
  EXPECT_EQ(to_string(network.address(257 * 4 + 3)), "10.0.1.1:9473");
  EXPECT_EQ(network.endpoint_of(*parse_endpoint("10.0.1.44:9470")), UINT32_MAX);  // node 300
  EXPECT_EQ(network.endpoint_of(*parse_endpoint("10.0.0.0:9474")), UINT32_MAX);
  EXPECT_EQ(network.endpoint_of(*parse_endpoint("127.0.0.1:9470")), UINT32_MAX);
}

TEST(SwarmPlan, IsReproducibleVariedAndDescribed) {
  std::set<std::string> texts;
  std::map<std::string, int> words;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const FaultPlan plan = swarm_plan(seed, 6, 1'000'000, 0.3);
    const std::string text = describe(plan);
    EXPECT_EQ(text, describe(swarm_plan(seed, 6, 1'000'000, 0.3)));
    texts.insert(text);
    EXPECT_LE(plan.everywhere.loss, 0.3);
    for (const Pause& pause : plan.pauses) EXPECT_LE(pause.end, 1'250'000);
    for (const char* word : {"loss", "bursts", "duplicate", "reorder", "replay", "corrupt", "truncate",
                             "tail", "jitter", "link", "partition", "pauses", "bit/s"}) {
      words[word] += text.find(word) != std::string::npos;
    }
  }
  EXPECT_EQ(texts.size(), 300U);
  for (const auto& [word, times] : words)
    EXPECT_TRUE(times > 20 && times < 280) << word << " in " << times << " of 300";
}

TEST(Prng, KnownValues) {
  // xoshiro256** seeded by SplitMix64(0), from the authors' reference code.
  uint64_t state = 0;
  EXPECT_EQ(split_mix(&state), 0xe220a8397b1dcdafULL);
  Prng random(0);
  EXPECT_EQ(random.next(), 0x99ec5f36cb75f2b4ULL);
  EXPECT_EQ(random.next(), 0xbf6e1f784956452aULL);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_LT(random.below(7), 7U);
    const int64_t between = random.between(-3, 3);
    EXPECT_TRUE(between >= -3 && between <= 3);
    const int64_t log = random.log_between(1, 1000);
    EXPECT_TRUE(log >= 1 && log <= 1000);
  }
  EXPECT_EQ(random.log_between(5, 5), 5);
  EXPECT_EQ(random.between(INT64_MIN, INT64_MAX) == random.between(INT64_MIN, INT64_MAX), false);
  EXPECT_FALSE(random.chance(0));
  EXPECT_TRUE(random.chance(1));
}

}  // namespace
}  // namespace sluice::port::sim
