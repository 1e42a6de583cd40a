// The traps of protocol section 17 that are about carry-over, deadlines and policies, one by one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "base/prng.h"
#include "tests/simulation/quiet.h"
#include "tests/simulation/run.h"
#include "transport/wire/packet.h"

namespace sluice::simulation {
namespace {

constexpr uint64_t kBlock = 336;  // elements of f32

// Carry-over on a network without faults, and one tag.
Options one_tag(uint32_t nodes, uint32_t ops, uint64_t count) {
  OpShape shape;
  shape.count = count;
  shape.op_class = OpClass::kConsistent;
  shape.tag = 1;
  Options options = quiet_network(nodes, ops, shape);
  options.carry_over = true;
  return options;
}

// 5. A rank that computes 1.3 times as long misses every op once it is behind. What it gives counts all the same, in
// later ops: about 90 % with max_lag 32 in the protocol's simulation, 99 % with 4. With a bound on the lag alone: nothing.
TEST(Trap5, ASlowRankCountsLater) {
  for (const auto& [max_lag, least] : {std::pair{32U, 0.90}, std::pair{4U, 0.98}}) {
    Options options = one_tag(4, 600, 4 * kBlock);
    options.max_lag = max_lag;
    options.in_flight = 1;
    options.compute = 20'000;
    options.slowness = {1, 1, 1, 1.3};
    const RunResult result = run(options);
    ASSERT_TRUE(result.ok()) << report(options, result);
    const auto own = static_cast<double>(result.carry.contributions) / 4;
    uint64_t elsewhere = 0;
    for (const uint32_t blocks : result.carry.elsewhere[3]) elsewhere += blocks;
    EXPECT_GT(static_cast<double>(elsewhere), 0.3 * own) << "the slow rank was not late";
    const auto lost = static_cast<double>(result.carry.carried + result.carry.discarded);
    std::printf("max_lag %u: %.1f %% of the slow rank's blocks joined later ops, %.1f %% none\n", max_lag,
                100 * (static_cast<double>(elsewhere) - lost) / own, 100 * lost / own);
    EXPECT_LT(lost, (1 - least) * own) << "max_lag " << max_lag;
  }
}

// 11. The push timer starts at t_q, when half of the nodes have called, not at the first call. 8 nodes, exponential skew
// of 10 ms: which ranks are late shows in the draw itself.
TEST(Trap11, TheDeadlineStartsAtTheMedian) {
  constexpr uint32_t kNodes = 8, kOps = 150;
  constexpr Micros kStep = 400'000, kPush = 25'000;
  Options options = one_tag(kNodes, kOps, kNodes * kBlock);
  options.carry_over = false;
  options.hard_deadline = 2 * kPush;
  options.in_flight = 4;
  options.compute = 0;
  options.max_lag = 32;
  Prng random(11);
  std::vector<std::vector<Micros>> skew(kOps, std::vector<Micros>(kNodes));
  uint64_t after_first = 0, after_median = 0;
  for (uint32_t op = 0; op < kOps; ++op) {
    for (uint32_t rank = 0; rank < kNodes; ++rank) {
      const double even = (static_cast<double>(random.next() >> 11) + 1) * 0x1p-53;
      skew[op][rank] = static_cast<Micros>(-10'000 * std::log(even));
      // One call follows the other: the skews of two ops must not add up.
      const Micros before = op == 0 ? 0 : skew[op - 1][rank];
      options.delays.push_back({rank, op, kStep + skew[op][rank] - before});
    }
    std::vector<Micros> sorted = skew[op];
    std::sort(sorted.begin(), sorted.end());
    for (const Micros one : sorted) {
      after_first += one > sorted[0] + kPush ? 1 : 0;
      after_median += one > sorted[kNodes / 2 - 1] + kPush ? 1 : 0;
    }
  }
  const RunResult result = run(options);
  ASSERT_TRUE(result.ok()) << report(options, result);
  const auto share = [&](double part, double whole) { return 100 * part / whole; };
  const double missed =
      share(static_cast<double>(result.shares.uncounted), static_cast<double>(result.shares.pairs));
  const double first = share(static_cast<double>(after_first), kOps * kNodes);
  const double median = share(static_cast<double>(after_median), kOps * kNodes);
  std::printf("missed %.2f %%; later than P after the first call %.2f %%, after the median one %.2f %%\n",
              missed, first, median);
  EXPECT_GT(first, median + 1);
  EXPECT_NEAR(missed, median, 0.5);
}

// 14. With carry-over all senders start a shard at the same block, which moves from op to op; without, each elsewhere.
TEST(Trap14, StartOffsetsAreCommonWithCarryOver) {
  using Starts = std::map<std::pair<uint32_t, uint32_t>, std::map<uint32_t, uint32_t>>;
  const auto note = [](const wire::Header& header, uint32_t from, uint32_t, void* context) {
    if (is(header, wire::Type::kPush))
      (*static_cast<Starts*>(context))[{header.op_seq, header.shard}].emplace(from, header.block);
    return true;
  };
  for (const bool carry_over : {true, false}) {
    Options options = one_tag(4, 30, 4 * 40 * kBlock);
    options.carry_over = carry_over;
    options.hard_deadline = 100'000;
    Starts starts;
    const RunResult result = run(options, {.filter = note, .context = &starts});
    ASSERT_TRUE(result.ok()) << report(options, result);
    ASSERT_EQ(starts.size(), 30U * 4);
    uint32_t common = 0;
    std::set<uint32_t> places;
    for (const auto& [shard, by_sender] : starts) {
      EXPECT_EQ(by_sender.size(), 3U);
      std::set<uint32_t> blocks;
      for (const auto& [sender, block] : by_sender) blocks.insert(block);
      common += blocks.size() == 1 ? 1 : 0;
      places.insert(blocks.begin(), blocks.end());
    }
    EXPECT_GE(places.size(), 35U) << "of 40 blocks";
    if (carry_over)
      EXPECT_EQ(common, starts.size());
    else
      EXPECT_LT(common, starts.size() / 10);
  }
}

// 20. Only node 0 completes the pulses: the results of all others are lost. They learn each record by PING before its
// first op, so that nobody contributes under another one, and no number stands for two records.
TEST(Trap20, ARecordIsKnownEverywhereBeforeItsFirstOp) {
  struct Seen {
    std::map<uint32_t, std::set<uint8_t>> policies;  // of PUSHes, by op
    uint64_t lost = 0;
  } seen;
  const auto lose = [](const wire::Header& header, uint32_t, uint32_t to, void* context) {
    auto* seen = static_cast<Seen*>(context);
    if (is(header, wire::Type::kPull) && (header.op_seq & wire::kDaemonOps) != 0 && to != 0) {
      ++seen->lost;
      return false;
    }
    if (is(header, wire::Type::kPush) && (header.op_seq & wire::kDaemonOps) == 0)
      seen->policies[header.op_seq].insert(header.policy);
    return true;
  };
  Options options = one_tag(4, 400, 4 * kBlock);
  options.adaptive = true;
  options.warmup_ops = 10;
  options.hard_deadline_min = 20'000;
  options.hard_deadline = 200'000;
  const RunResult result = run(options, {.filter = lose, .context = &seen});
  ASSERT_TRUE(result.ok()) << report(options, result);
  EXPECT_GT(seen.lost, 0U);
  EXPECT_EQ(result.facts.drops[static_cast<size_t>(wire::Drop::kPolicy)], 0U);
  EXPECT_EQ(result.shares.uncounted, 0U);
  std::set<uint8_t> in_force;
  for (const auto& [op, policies] : seen.policies) {
    EXPECT_EQ(policies.size(), 1U) << "op " << op;
    in_force.insert(policies.begin(), policies.end());
  }
  EXPECT_GE(in_force.size(), 2U) << "no record came into force";
}

// 21. The second of two local ranks calls after its node has frozen: its slot is queued, joins a later op whole, as the
// contribution of that rank, and the frozen block stays as it is (which the checkers watch).
TEST(Trap21, ALocalRankAfterTheFreezeIsQueued) {
  constexpr uint32_t kOp = 10, kLate = 1;
  Options options = one_tag(3, 30, 6 * kBlock);
  options.ranks_of_node.assign(3, 2);
  options.delays.push_back({kLate, kOp, options.hard_deadline / 2 / 4 + 3'000});  // local_wait is P/4
  const RunResult result = run(options);
  ASSERT_TRUE(result.ok()) << report(options, result);
  const uint32_t blocks = Gradients(options).blocks(options.program[0]);
  EXPECT_EQ(result.carry.elsewhere[kLate][kOp], blocks);
  uint64_t elsewhere = 0;
  for (const auto& of_rank : result.carry.elsewhere) {
    for (const uint32_t of_op : of_rank) elsewhere += of_op;
  }
  // (The rank stays behind by a call, so its last ones have no op to join.)
  EXPECT_EQ(result.carry.later + result.carry.carried, elsewhere);
  EXPECT_LE(result.carry.carried, 2 * blocks);
  EXPECT_EQ(result.carry.discarded, 0U);
}

// 22. 3 ranks: a sum is exact, a mean is divided once, by all ranks, also where contributions of two ops are in one; and
// what is still owed at the end is undivided, so that it keeps its weight among other ranks. (The checkers read the
// contributions out of every result, and out of what is owed.)
TEST(Trap22, DividedOnceAndOwedUndivided) {
  for (const ReduceKind kind : {ReduceKind::kSum, ReduceKind::kMean}) {
    for (const ElementType type : {ElementType::kF32, ElementType::kF64}) {
      Options options = one_tag(3, 30, 6 * kBlock);
      for (OpShape& shape : options.program) {
        shape.kind = kind;
        shape.type = type;
      }
      const uint32_t blocks = Gradients(options).blocks(options.program[0]);
      options.delays.push_back({2, 10, 3 * options.hard_deadline});
      options.delays.push_back({2, 29, 3 * options.hard_deadline});
      const RunResult result = run(options);
      ASSERT_TRUE(result.ok()) << report(options, result);
      EXPECT_EQ(result.carry.elsewhere[2][10], blocks);
      EXPECT_GE(result.carry.later, blocks);
      EXPECT_GE(result.carry.carried, blocks) << "the last op has none after it";
      EXPECT_EQ(result.carry.in_own_op + result.carry.later + result.carry.carried,
                result.carry.contributions);
      EXPECT_EQ(result.carry.discarded, 0U);
    }
  }
}

// --- 28: lanes by hand, because the gradients of the simulator are finite ---------------------------------------------

class Infinity : public testing::Test {
 protected:
  static constexpr uint32_t kNodes = 3, kOps = 4;
  static constexpr uint64_t kCount = kNodes * kBlock;

  Infinity() {
    exchange::Settings settings;
    settings.job = "by hand";
    settings.sealing = wire::Sealing::kNone;
    settings.members.resize(kNodes);
    for (uint8_t i = 0; i < kNodes; ++i) settings.members[i].join_nonce[0] = i;
    settings.node_of_rank = {0, 1, 2};
    settings.carry_over = true;
    settings.hard_deadline = 10'000;
    settings.max_op_bytes = 1 << 20;
    settings.pool_bytes = 4 * exchange::minimum_pool_bytes(settings);
    for (settings.self = 0; settings.self < kNodes; ++settings.self)
      lanes_.push_back(std::make_unique<exchange::Lane>(settings, now_));
    for (auto& of_node : in_) of_node.assign(kOps, std::vector<float>(kCount, 1.0F));
    for (auto& of_node : out_) of_node.assign(kOps, std::vector<float>(kCount, -1.0F));
  }

  // All nodes call the op; returns when all have its result. `lose`: PUSHes from node 2 to this node do not arrive.
  void exchange(uint32_t op, uint32_t lose = UINT32_MAX) {
    for (uint32_t node = 0; node < kNodes; ++node) {
      exchange::Submission submission;
      submission.op_seq = op;
      submission.count = kCount;
      submission.tag = 1;
      submission.op_class = OpClass::kConsistent;
      submission.contribution = reinterpret_cast<const std::byte*>(in_[node][op].data());
      submission.result = reinterpret_cast<std::byte*>(out_[node][op].data());
      ASSERT_EQ(lanes_[node]->submit(now_, submission), Status::kOk);
    }
    uint32_t results = 0;
    for (int turn = 0; turn < 4000 && results < kNodes; ++turn, now_ += 50) {
      for (uint32_t node = 0; node < kNodes; ++node) {
        exchange::Lane& lane = *lanes_[node];
        if (lane.next_timer() <= now_) lane.tick(now_);
        exchange::Outgoing out[16];
        while (const size_t count = lane.poll_send(now_, out)) {
          for (size_t i = 0; i < count; ++i) {
            wire::Header header;
            std::memcpy(&header, out[i].header, sizeof header);
            if (is(header, wire::Type::kPush) && node == 2 && out[i].node == lose) continue;
            std::vector<std::byte> bytes(out[i].header, out[i].header + wire::kHeaderBytes);
            bytes.insert(bytes.end(), out[i].payload, out[i].payload + out[i].payload_length);
            lanes_[out[i].node]->on_packet(now_, bytes);
          }
        }
        exchange::Event event;
        while (lane.poll_event(&event)) {
          if ((event.events & kEventResult) == 0) continue;
          EXPECT_EQ(event.status, Status::kOk) << event.text;
          ++results;
        }
      }
    }
    ASSERT_EQ(results, kNodes);
  }
  uint64_t discarded(uint32_t node) const { return lanes_[node]->counters().blocks_discarded; }
  // Every element of an op, on all nodes.
  void expect_all(uint32_t op, uint64_t first, uint64_t last, float value) {
    for (uint32_t node = 0; node < kNodes; ++node) {
      for (uint64_t i = first; i < last; ++i) ASSERT_EQ(out_[node][op][i], value) << node << " " << i;
    }
  }

  Micros now_ = 1000;
  std::vector<std::unique_ptr<exchange::Lane>> lanes_;
  std::vector<std::vector<float>> in_[kNodes], out_[kNodes];
};

TEST_F(Infinity, Trap28IsSeenInItsOpAndNeverCarried) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  exchange(0);
  expect_all(0, 0, kCount, 3.0F);
  // Shard 1 of op 1 is node 2's own, shard 0 is node 1's; both blocks of node 2 that travel are lost or not finite.
  in_[2][1].assign(kCount, kInfinity);
  exchange(1, 1);
  expect_all(1, 0, kBlock, 2.0F);            // did not count the Inf
  expect_all(1, kBlock, kCount, kInfinity);  // did, and all see it
  EXPECT_EQ(discarded(2), 1U) << "the block that was not counted";
  exchange(2);
  expect_all(2, 0, kCount, 3.0F);
  // A finite block that was not counted does come again.
  exchange(3, exchange::Geometry::owner(0, 3, kNodes));
  EXPECT_EQ(discarded(2), 1U);
}

}  // namespace
}  // namespace sluice::simulation
