// transport/port/faulty: every fault fires, as often as it was asked for, in its direction and on whom it was meant for.
#include <bit>
#include <map>
#include <set>

#include "tests/unit/faulty_support.h"

namespace sluice::port::testing {
namespace {

constexpr uint64_t kMany = 20'000;

// One fault in one direction, and the datagrams that come through.
class EachWay : public ::testing::TestWithParam<bool> {
 protected:
  std::vector<Bytes> run(const LinkFaults& faults, uint64_t count = kMany) {
    FaultyPlan plan;
    (GetParam() ? plan.send : plan.receive) = faults;
    bench_ = std::make_unique<Bench>(plan);
    return GetParam() ? bench_->send(count) : bench_->receive(count);
  }
  void TearDown() override {
    if (bench_ == nullptr) return;
    const FaultCounters counters = bench_->port->fault_counters();
    for (const uint64_t fired : GetParam() ? counters.receive : counters.send) EXPECT_EQ(fired, 0U);
  }
  uint64_t fired(Fault fault) const { return bench_->fired(fault); }
  std::unique_ptr<Bench> bench_;
};
INSTANTIATE_TEST_SUITE_P(Ways, EachWay, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "out" : "in"; });

TEST_P(EachWay, Loss) {
  const auto got = run({.loss = 0.05});
  expect_rate(fired(Fault::kLost), kMany, 0.05);
  EXPECT_EQ(got.size() + fired(Fault::kLost), kMany);
}

TEST_P(EachWay, LossComesInBursts) {
  // Bad for 10 datagrams on average, once in 110: one in eleven is lost if the bad state loses all.
  const auto got = run({.burst_enter = 0.01, .burst_leave = 0.1});
  const uint64_t lost = fired(Fault::kLostInBurst);
  EXPECT_EQ(got.size() + lost, kMany);
  EXPECT_NEAR(static_cast<double>(lost) / kMany, 1.0 / 11, 0.02);
  uint64_t gaps = 0;
  for (size_t i = 1; i < got.size(); ++i) gaps += number_of(got[i]) != number_of(got[i - 1]) + 1 ? 1 : 0;
  const double length = static_cast<double>(lost) / static_cast<double>(gaps);
  EXPECT_NEAR(length, 10, 2.5);  // independent loss of the same share would give 1.1
}

TEST_P(EachWay, Duplicates) {
  const auto got = run({.duplicate = 0.1});
  expect_rate(fired(Fault::kDuplicated), kMany, 0.1);
  EXPECT_EQ(got.size(), kMany + fired(Fault::kDuplicated));
  std::map<uint64_t, int> seen;
  for (const Bytes& bytes : got) {
    EXPECT_EQ(bytes, numbered(number_of(bytes)));
    ++seen[number_of(bytes)];
  }
  EXPECT_EQ(seen.size(), kMany);
  for (const auto& [number, times] : seen) EXPECT_LE(times, 2) << number;
}

TEST_P(EachWay, Corruption) {
  const auto got = run({.corrupt = 0.1});
  expect_rate(fired(Fault::kCorrupted), kMany, 0.1);
  ASSERT_EQ(got.size(), kMany);
  uint64_t damaged = 0;
  for (const Bytes& bytes : got) {
    ASSERT_EQ(bytes.size(), kLength);
    // The number may be what was hit: compare with what follows it too.
    const Bytes whole = numbered(number_of(bytes));
    int flipped = 0;
    for (size_t i = 8; i < kLength; ++i) flipped += std::popcount(static_cast<unsigned>(bytes[i] ^ whole[i]));
    EXPECT_LE(flipped, 3);
    damaged += flipped > 0 || number_of(bytes) >= kMany ? 1 : 0;
  }
  // Hits on low bits of the number, and two flips of one bit, cannot be seen here.
  EXPECT_LE(damaged, fired(Fault::kCorrupted));
  EXPECT_GE(damaged, fired(Fault::kCorrupted) * 97 / 100);
}

TEST_P(EachWay, Truncation) {
  const auto got = run({.truncate = 0.1});
  expect_rate(fired(Fault::kTruncated), kMany, 0.1);
  ASSERT_EQ(got.size(), kMany);
  uint64_t cut = 0;
  std::set<size_t> lengths;
  for (const Bytes& bytes : got) {
    if (bytes.size() == kLength) continue;
    EXPECT_LT(bytes.size(), kLength);
    lengths.insert(bytes.size());
    ++cut;
  }
  EXPECT_EQ(cut, fired(Fault::kTruncated));
  EXPECT_GT(lengths.size(), kLength * 9 / 10) << "every length is possible";
}

TEST_P(EachWay, ReorderedOnesAreOvertaken) {
  const auto got = run({.reorder = 0.1, .reorder_delay = 50});
  expect_rate(fired(Fault::kReordered), kMany, 0.1);
  ASSERT_EQ(got.size(), kMany);
  uint64_t late = 0, newest = 0;
  for (const Bytes& bytes : got) {
    const uint64_t number = number_of(bytes);
    late += number < newest ? 1 : 0;
    EXPECT_LE(newest, number + 52);
    newest = std::max(newest, number);
  }
  EXPECT_LE(late, fired(Fault::kReordered));
  EXPECT_GE(late, fired(Fault::kReordered) * 9 / 10);
}

TEST_P(EachWay, LatencyKeepsTheOrder) {
  const auto got = run({.latency = 30}, 1000);
  EXPECT_EQ(fired(Fault::kDelayed), 1000U);
  ASSERT_EQ(got.size(), 1000U);
  for (uint64_t i = 0; i < got.size(); ++i) EXPECT_EQ(number_of(got[i]), i);
}

TEST_P(EachWay, ReplaysAreOldDatagramsOfTheSamePeer) {
  const auto got = run({.replay = 0.05});
  const uint64_t replayed = fired(Fault::kReplayed);
  expect_rate(replayed, kMany, 0.05);
  EXPECT_EQ(got.size(), kMany + replayed);
  uint64_t newest = 0, very_old = 0, old = 0;
  for (const Bytes& bytes : got) {
    EXPECT_EQ(bytes, numbered(number_of(bytes)));
    old += number_of(bytes) < newest ? 1 : 0;
    very_old += number_of(bytes) + 200 < newest ? 1 : 0;
    newest = std::max(newest, number_of(bytes));
  }
  EXPECT_NEAR(static_cast<double>(old), static_cast<double>(replayed), 50);
  EXPECT_GT(very_old, replayed / 20);
}

TEST_P(EachWay, TheSameSeedTreatsTheSameTrafficTheSame) {
  LinkFaults faults{.latency = 3, .jitter = 40, .tail_probability = 0.01, .loss = 0.02, .burst_enter = 0.01};
  faults.duplicate = faults.reorder = faults.replay = faults.corrupt = faults.truncate = 0.03;
  FaultyPlan plan;
  (GetParam() ? plan.send : plan.receive) = faults;
  const auto traffic = [&](uint64_t seed) {
    plan.seed = seed;
    Bench bench(plan);
    auto got = GetParam() ? bench.send(3000) : bench.receive(3000);
    const FaultCounters counters = bench.port->fault_counters();
    for (size_t i = 0; i < kFaults; ++i) {
      const auto fault = static_cast<Fault>(i);
      if (fault == Fault::kCut || fault == Fault::kRefused || fault == Fault::kUnheld) continue;
      EXPECT_GT(counters.total(fault), 20U) << fault_name(fault);
    }
    return got;
  };
  const auto first = traffic(7);
  EXPECT_EQ(first, traffic(7));
  EXPECT_NE(first, traffic(8));
}

TEST(FaultyPort, NothingOnChangesNothing) {
  Bench bench(FaultyPlan{});
  EXPECT_EQ(bench.port->capabilities().kind, "faulty(sim)");
  EXPECT_TRUE(bench.port->capabilities().note.empty());
  EXPECT_EQ(bench.send(500).size(), 500U);
  EXPECT_EQ(bench.receive(500).size(), 500U);
  for (size_t i = 0; i < kFaults; ++i) EXPECT_EQ(bench.fired(static_cast<Fault>(i)), 0U);
}

TEST(FaultyPort, SaysWhatIsOn) {
  FaultyPlan plan;
  plan.send.loss = 0.05;
  plan.refuse = 0.01;
  plan.cuts = {{{.endpoint = ipv4_endpoint(10, 0, 0, 2, 0)}, false, true}};
  const std::string note = Bench(plan).port->capabilities().note;
  for (const char* part :
       {"send loss 0.0500", "device full 0.0100", "from 10.0.0.2 cut", "seed 1", "on purpose"})
    EXPECT_NE(note.find(part), std::string::npos) << part << " in " << note;
  EXPECT_EQ(note.find("to 10.0.0.2"), std::string::npos) << note;
}

TEST(FaultyPort, RulesAreForOnePeer) {
  for (const bool by_index : {false, true}) {
    FaultyPlan plan;
    PeerRule rule;
    if (by_index) {
      rule.peer.index = 1;
    } else {
      rule.peer.endpoint = ipv4_endpoint(10, 0, 0, 2, 0);  // node 2, any port
    }
    rule.send.loss = 1;
    rule.receive.loss = 0.5;
    plan.rules = {rule};
    Bench bench(plan);
    EXPECT_EQ(bench.send(1000, 1).size(), 1000U);
    EXPECT_EQ(bench.receive(1000, 1).size(), 1000U);
    EXPECT_EQ(bench.send(1000, 2).size(), 0U);
    expect_rate(bench.receive(1000, 2).size(), 1000, 0.5);
  }
}

TEST(FaultyPort, APeersLuckIsItsOwn) {
  FaultyPlan plan;
  plan.send.loss = 0.3;
  Bench alone(plan);
  const auto expected = alone.send(300, 2);
  Bench bench(plan);
  bench.send(123, 1);
  EXPECT_EQ(bench.send(300, 2), expected);
  Bench again(plan);
  EXPECT_NE(again.send(300, 1), expected) << "not the same luck for all peers";
}

TEST(FaultyPort, CutsAreOneWayIfAsked) {
  FaultyPlan plan;
  plan.cuts = {{{.endpoint = ipv4_endpoint(10, 0, 0, 1, 9470)}, true, false},
               {{.endpoint = ipv4_endpoint(10, 0, 0, 2, 9470)}, false, true},
               {{.endpoint = ipv4_endpoint(10, 0, 0, 2, 9471)}, true, true}};  // another port
  Bench bench(plan);
  EXPECT_EQ(bench.send(100, 1).size(), 0U);
  EXPECT_EQ(bench.receive(100, 1).size(), 100U);
  EXPECT_EQ(bench.send(100, 2).size(), 100U);
  EXPECT_EQ(bench.receive(100, 2).size(), 0U);
  EXPECT_EQ(bench.fired(Fault::kCut), 200U);
}

TEST(FaultyPort, StrangersAreCutToo) {
  FaultyPlan plan;
  plan.cuts = {{{.endpoint = ipv4_endpoint(10, 0, 0, 2, 0)}, false, true}};
  plan.receive.duplicate = 1;
  Bench bench(plan);
  for (const PeerHandle peer : bench.peers) bench.queue->remove_peer(peer);
  EXPECT_EQ(bench.receive(100, 2).size(), 0U);
  EXPECT_EQ(bench.receive(100, 1).size(), 200U);
}

}  // namespace
}  // namespace sluice::port::testing
