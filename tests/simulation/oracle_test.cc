// The oracle and the checkers: what they are made to find, they find.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "tests/simulation/check_results.h"
#include "tests/simulation/check_wire.h"
#include "tests/simulation/gradients.h"
#include "tests/simulation/run.h"
#include "tests/simulation/swarm.h"

namespace sluice::simulation {
namespace {

constexpr uint32_t kPayload = 1408;

std::vector<OpShape> all_shapes(uint64_t count) {
  std::vector<OpShape> shapes;
  for (uint8_t type = 0; type < kElementTypes; ++type) {
    for (const ReduceKind kind : {ReduceKind::kSum, ReduceKind::kMean}) {
      OpShape shape;
      shape.type = static_cast<ElementType>(type);
      shape.kind = kind;
      shape.count = count;
      if (kind == ReduceKind::kSum || is_float(shape.type)) shapes.push_back(shape);
    }
  }
  return shapes;
}

TEST(Gradients, SumsOfContributionsAreWhatTheOracleExpects) {
  // f32 and integers are summed here element by element, without the oracle's own sum.
  for (const uint32_t ranks : {1U, 2U, 7U, 32U}) {
    const Gradients gradients(7, ranks, kPayload);
    OpShape shape;
    shape.count = 1000;
    std::vector<float> sum(shape.count, 0), one(shape.count);
    RankSet all;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      gradients.fill(shape, 3, rank, reinterpret_cast<std::byte*>(one.data()));
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += one[i];
      all[rank] = true;
    }
    std::vector<std::byte> expected(shape.count * sizeof(float));
    for (uint32_t block = 0; block < gradients.blocks(shape); ++block) {
      gradients.expected(shape, 3, block, all,
                         expected.data() + block * gradients.block_elements(shape) * sizeof(float));
    }
    EXPECT_EQ(std::memcmp(sum.data(), expected.data(), expected.size()), 0) << ranks << " ranks";
  }
}

TEST(Gradients, ASumNamesItsRanksInEveryType) {
  Prng random(1);
  for (const uint32_t ranks : {1U, 2U, 3U, 8U, 16U, 24U, 32U, 64U}) {
    const Gradients gradients(random.next(), ranks, kPayload);
    for (const OpShape& shape : all_shapes(3 * 1344)) {
      for (int attempt = 0; attempt < 10; ++attempt) {
        RankSet counted;
        for (uint32_t rank = 0; rank < ranks; ++rank) counted[rank] = random.chance(0.7);
        if (counted.none()) counted[0] = true;
        const uint32_t op = static_cast<uint32_t>(random.below(1000));
        const uint32_t block = 1;
        std::vector<std::byte> bytes(gradients.elements_of(shape, block) * element_size(shape.type));
        gradients.expected(shape, op, block, counted, bytes.data());
        const Recovered found = gradients.recover(shape, op, block, bytes.data());
        ASSERT_TRUE(found.ok) << element_type_name(shape.type) << ", " << ranks << " ranks: " << found.why;
        ASSERT_TRUE(found.whole) << element_type_name(shape.type) << ", " << ranks << " ranks";
        ASSERT_EQ(found.ranks, counted) << element_type_name(shape.type) << ", " << ranks << " ranks";
      }
    }
  }
}

TEST(Gradients, ABlockThatIsWrongIsNoSumOfRanks) {
  const uint32_t ranks = 8;
  const Gradients gradients(5, ranks, kPayload);
  for (const OpShape& shape : all_shapes(4 * 1344)) {
    const size_t size = element_size(shape.type);
    RankSet all;
    for (uint32_t rank = 0; rank < ranks; ++rank) all[rank] = true;
    std::vector<std::byte> good(gradients.elements_of(shape, 1) * size), bad;
    gradients.expected(shape, 9, 1, all, good.data());
    ASSERT_TRUE(gradients.recover(shape, 9, 1, good.data()).ok);
    EXPECT_FALSE(gradients.recover(shape, 10, 1, good.data()).ok) << "the sum of another op";
    EXPECT_FALSE(gradients.recover(shape, 9, 2, good.data()).ok) << "the sum of another block";
    bad = good;
    std::memmove(bad.data(), good.data() + size, good.size() - size);
    EXPECT_FALSE(gradients.recover(shape, 9, 1, bad.data()).ok) << "shifted by one element";
    for (const size_t place : {size_t{0}, size_t{1}, good.size() / size - 1}) {
      bad = good;
      bad[place * size] ^= std::byte{1};
      EXPECT_FALSE(gradients.recover(shape, 9, 1, bad.data()).ok)
          << element_type_name(shape.type) << ": a bit of element " << place;
    }
    if (shape.kind == ReduceKind::kMean) {
      // Seven ranks of eight are in it, and it was divided by eight.
      RankSet seven = all;
      seven[3] = false;
      std::vector<std::byte> one(8);
      gradients.expected(shape, 9, 1, seven, bad.data());
      for (uint32_t position = 0; position < gradients.elements_of(shape, 1); ++position) {
        const double seventh = decode(shape.type, bad.data() + position * size) * 7;
        encode(shape.type, std::llround(seventh), 8, one.data());
        std::memcpy(good.data() + position * size, one.data(), size);
      }
      EXPECT_FALSE(gradients.recover(shape, 9, 1, good.data()).ok)
          << "divided by N, not by the counted ranks";
    }
  }
}

// --- The checkers, fed with what must not be -------------------------------------------------------------------------

class CheckerTest : public testing::Test {
 protected:
  CheckerTest() {
    options_.ranks_of_node = {1, 1, 1};
    OpShape shape;
    shape.count = 2000;
    shape.op_class = OpClass::kConsistent;
    options_.program.assign(20, shape);
    options_.program[1].op_class = OpClass::kExact;
  }

  std::vector<std::byte> result_of(uint32_t op, RankSet counted) {
    const OpShape& shape = options_.program[op];
    std::vector<std::byte> bytes(shape.count * element_size(shape.type));
    for (uint32_t block = 0; block < gradients_.blocks(shape); ++block) {
      gradients_.expected(shape, op, block, counted,
                          bytes.data() + static_cast<size_t>(block) * gradients_.block_elements(shape) * 4);
    }
    return bytes;
  }
  Completion completion(uint32_t op, uint32_t rank, const std::vector<std::byte>& result) {
    Completion c;
    c.op = op;
    c.rank = c.node = rank;
    c.blocks_expected = c.blocks_received = gradients_.blocks(options_.program[op]);
    c.result = result;
    c.now = 100;
    return c;
  }
  std::string found() {
    std::string all;
    for (const std::string& line : violations_.list()) all += line + "\n";
    return all;
  }

  Options options_;
  Gradients gradients_{1, 3, kPayload};
  Violations violations_;
};

TEST_F(CheckerTest, ResultsThatAgreeAreFine) {
  FrozenChecker wire(options_, gradients_, &violations_);
  ResultChecker checker(options_, gradients_, &wire, nullptr, &violations_);
  const auto bytes = result_of(0, RankSet(0b111));
  for (uint32_t rank = 0; rank < 3; ++rank) checker.on_result(completion(0, rank, bytes));
  for (uint32_t rank = 0; rank < 3; ++rank) checker.on_resolved(completion(0, rank, bytes));
  EXPECT_EQ(violations_.count(), 0U) << found();
}

TEST_F(CheckerTest, ResultsThatDifferAreFound) {
  FrozenChecker wire(options_, gradients_, &violations_);
  ResultChecker checker(options_, gradients_, &wire, nullptr, &violations_);
  const auto all = result_of(0, RankSet(0b111)), two = result_of(0, RankSet(0b011));
  checker.on_result(completion(0, 0, all));
  checker.on_result(completion(0, 1, two));
  EXPECT_NE(found().find("differs from what another rank got"), std::string::npos) << found();
}

TEST_F(CheckerTest, ARankThatIsMissingIsFoundWhereItMustNotBe) {
  FrozenChecker wire(options_, gradients_, &violations_);
  ResultChecker checker(options_, gradients_, &wire, nullptr, &violations_);
  const auto two = result_of(1, RankSet(0b011));
  checker.on_result(completion(1, 0, two));
  EXPECT_NE(found().find("of an exact op has 2 ranks"), std::string::npos) << found();
}

TEST_F(CheckerTest, TooFewRanksMustBeSkipped) {
  FrozenChecker wire(options_, gradients_, &violations_);
  ResultChecker checker(options_, gradients_, &wire, nullptr, &violations_);
  const auto one = result_of(0, RankSet(0b001));
  checker.on_result(completion(0, 0, one));
  EXPECT_NE(found().find("it must be skipped"), std::string::npos) << found();
}

TEST_F(CheckerTest, UncountedThatIsNotReportedIsFound) {
  FrozenChecker wire(options_, gradients_, &violations_);
  ResultChecker checker(options_, gradients_, &wire, nullptr, &violations_);
  const auto two = result_of(0, RankSet(0b011));
  for (uint32_t rank = 0; rank < 3; ++rank) checker.on_result(completion(0, rank, two));
  for (uint32_t rank = 0; rank < 3; ++rank) checker.on_resolved(completion(0, rank, two));
  EXPECT_NE(found().find("op 0 rank 2 reports 0 uncounted blocks, there are 6"), std::string::npos)
      << found();
}

TEST_F(CheckerTest, HolesMustBeZeroAndListed) {
  FrozenChecker wire(options_, gradients_, &violations_);
  ResultChecker checker(options_, gradients_, &wire, nullptr, &violations_);
  auto bytes = result_of(0, RankSet(0b111));
  Completion c = completion(0, 0, bytes);
  c.status = Status::kIncomplete;
  c.blocks_received -= 1;
  c.ranges_total = 1;
  c.ranges.push_back({0, 336, 0});
  checker.on_result(c);
  EXPECT_NE(found().find("missing block 0 is not zero"), std::string::npos) << found();
  const uint64_t before = violations_.count();
  std::memset(bytes.data(), 0, 336 * 4);
  Completion good = c;
  good.rank = 1;
  good.result = bytes;
  checker.on_result(good);
  EXPECT_EQ(violations_.count(), before) << found();
  good.rank = 2;
  good.blocks_received -= 1;
  checker.on_result(good);
  EXPECT_NE(found().find("lists 1 missing blocks, counts 2"), std::string::npos) << found();
}

TEST_F(CheckerTest, ACounterThatSealsTwoPacketsIsFound) {
  NonceChecker checker(options_, &violations_);
  Sent sent;
  sent.node = 1;
  sent.header.sender = 1;
  sent.header.counter = 5;
  sent.hash = 77;
  checker.on_sent(sent);
  checker.on_sent(sent);  // the same bytes to another receiver
  EXPECT_EQ(violations_.count(), 0U);
  sent.hash = 78;
  checker.on_sent(sent);
  EXPECT_NE(found().find("sealed two packets with counter 5"), std::string::npos) << found();
}

TEST_F(CheckerTest, APushThatChangesIsFound) {
  FrozenChecker checker(options_, gradients_, &violations_);
  std::vector<std::byte> payload(336 * 4, std::byte{1});
  Sent sent;
  sent.node = 1;
  sent.to = 0;
  sent.header.type = static_cast<uint8_t>(wire::Type::kPush);
  sent.header.sender = 1;
  sent.header.elements = 336;
  sent.header.ranks = 1;
  sent.payload = payload;
  checker.on_sent(sent);
  checker.on_sent(sent);
  EXPECT_EQ(violations_.count(), 0U) << found();
  payload[100] = std::byte{2};
  checker.on_sent(sent);
  EXPECT_NE(found().find("with other bytes than before"), std::string::npos) << found();
  sent.to = 2;
  checker.on_sent(sent);
  EXPECT_NE(found().find("node 0 owns it"), std::string::npos) << found();
}

TEST_F(CheckerTest, APullThatChangesIsFound) {
  FrozenChecker checker(options_, gradients_, &violations_);
  std::vector<std::byte> payload(336 * 4, std::byte{1});
  Sent sent;
  sent.node = 0;
  sent.to = 1;
  sent.header.type = static_cast<uint8_t>(wire::Type::kPull);
  sent.header.flags = wire::kFlagAllCounted;
  sent.header.elements = 336;
  sent.header.ranks = 3;
  sent.payload = payload;
  checker.on_sent(sent);
  EXPECT_EQ(violations_.count(), 0U) << found();
  sent.header.ranks = 2;
  checker.on_sent(sent);
  EXPECT_NE(found().find("with another value or verdict than before"), std::string::npos) << found();
}

TEST_F(CheckerTest, AMinorityThatClosesIsFound) {
  QuorumChecker checker(options_, &violations_);
  Sent sent;
  sent.node = 1;
  sent.header.type = static_cast<uint8_t>(wire::Type::kPull);
  checker.on_submit(0, 1, 0, Status::kOk);
  checker.on_submit(0, 2, 0, Status::kOk);
  checker.on_sent(sent);  // two of three
  EXPECT_EQ(violations_.count(), 0U) << found();
  sent.header.op_seq = 1;  // exact
  checker.on_submit(0, 1, 1, Status::kOk);
  checker.on_submit(0, 2, 1, Status::kOk);
  checker.on_sent(sent);
  EXPECT_EQ(violations_.count(), 1U) << found();
  sent.header.op_seq = 2;
  checker.on_submit(0, 1, 2, Status::kOk);
  checker.on_sent(sent);
  EXPECT_EQ(violations_.count(), 2U) << found();
}

TEST_F(CheckerTest, ADatagramThatNobodySentMustBeDropped) {
  options_.sealing = wire::Sealing::kAuth;
  DropChecker checker(options_, &violations_);
  std::vector<std::byte> datagram(64);
  Delivered delivered;
  delivered.datagram = datagram;
  delivered.drop = wire::Drop::kTag;
  checker.on_delivered(delivered);
  EXPECT_EQ(violations_.count(), 0U);
  delivered.drop = wire::Drop::kNone;
  checker.on_delivered(delivered);
  EXPECT_NE(found().find("took a datagram that nobody sent"), std::string::npos) << found();
  delivered.genuine = true;
  checker.on_delivered(delivered);
  EXPECT_EQ(violations_.count(), 1U);
  checker.on_delivered(delivered);
  EXPECT_NE(found().find("from node 0 twice"), std::string::npos) << found();
}

TEST_F(CheckerTest, ANodeThatRunsAheadIsFound) {
  options_.max_lag = 2;
  LagChecker checker(options_, gradients_, &violations_);
  const std::vector<std::byte> bytes;
  Sent sent;
  sent.header.type = static_cast<uint8_t>(wire::Type::kAnnounce);
  sent.header.op_seq = 1;
  checker.on_sent(sent);
  for (uint32_t rank = 0; rank < 3; ++rank) checker.on_resolved(completion(0, rank, bytes));
  sent.header.op_seq = 2;
  checker.on_sent(sent);
  EXPECT_EQ(violations_.count(), 0U) << found();
  sent.header.op_seq = 3;
  checker.on_sent(sent);
  EXPECT_NE(found().find("still needs op 1"), std::string::npos) << found();
}

TEST_F(CheckerTest, LateAndDoubleEventsAreFound) {
  TimeChecker time(options_, &violations_);
  EventChecker events(options_, &violations_);
  const std::vector<std::byte> bytes;
  Completion c = completion(0, 0, bytes);
  c.submitted = 0;
  c.now = options_.hard_deadline * 5 + 5'000;
  time.on_result(c);
  EXPECT_EQ(violations_.count(), 0U) << found();
  c.now += 1;
  time.on_result(c);
  EXPECT_NE(found().find("above its bound"), std::string::npos) << found();
  events.on_submit(0, 0, 0, Status::kOk);
  events.on_resolved(c);
  EXPECT_NE(found().find("RESOLVED before RESULT"), std::string::npos) << found();
  events.on_result(c);
  events.on_result(c);
  EXPECT_NE(found().find("two RESULTs"), std::string::npos) << found();
  c.status = Status::kOpTimeout;
  c.op = 1;
  events.on_result(c);
  EXPECT_NE(found().find("OP_TIMEOUT"), std::string::npos) << found();
}

TEST_F(CheckerTest, IncompleteAfterHealingIsFound) {
  HealChecker checker(options_, &violations_);
  const std::vector<std::byte> bytes;
  checker.on_heal(0, 3);
  Completion c = completion(3 + 2 * options_.in_flight, 0, bytes);
  c.status = Status::kIncomplete;
  checker.on_result(c);
  EXPECT_EQ(violations_.count(), 0U) << found();
  ++c.op;
  checker.on_result(c);
  EXPECT_EQ(violations_.count(), 1U);
}

// --- The runs themselves -----------------------------------------------------------------------------------------------

TEST(Run, TheSameSeedGivesTheSameHashAndAnotherSeedAnother) {
  const Options options = draw("swarm", 11);
  const RunResult first = run(options), second = run(options);
  EXPECT_TRUE(first.ok()) << report(options, first);
  EXPECT_EQ(first.facts.hash, second.facts.hash);
  EXPECT_EQ(first.facts.datagrams, second.facts.datagrams);
  Options other = options;
  ++other.seed;
  EXPECT_NE(run(other).facts.hash, first.facts.hash);
}

TEST(Run, ADeadlockIsFound) {
  // Everybody hears of everybody, but no block of node 0 ever arrives, and exact ops have all the time in the world.
  Options options = draw("calm", 3);
  options.ranks_of_node = {1, 1, 1};
  options.op_timeout = 1'000'000'000'000;
  options.in_flight = 1;
  for (OpShape& shape : options.program) {
    shape.op_class = OpClass::kExact;
    shape.count = 1000;
    shape.deadline = 0;
    shape.loss_scale = 1;
    shape.retire = false;
  }
  options.adaptive = false;
  options.heal_at = 2;
  const auto no_push_of_0 = [](const wire::Header& header, uint32_t from, uint32_t, void*) {
    return from != 0 || header.type != static_cast<uint8_t>(wire::Type::kPush);
  };
  const RunResult result = run(options, {.filter = no_push_of_0});
  ASSERT_EQ(result.list.size(), 1U) << report(options, result);
  EXPECT_NE(result.list[0].find("stalled at"), std::string::npos) << report(options, result);
  EXPECT_NE(report(options, result).find("--seed 3 --scenario calm"), std::string::npos);
}

// --- carry-over ---------------------------------------------------------------------------------------------------------

class CarryTest : public testing::Test {
 protected:
  static constexpr uint32_t kRanks = 3, kOps = 6;
  CarryTest() {
    options_.ranks_of_node = {1, 1, 1};
    options_.carry_over = true;
    OpShape shape;
    shape.count = 336;
    shape.op_class = OpClass::kConsistent;
    shape.tag = 5;
    options_.program.assign(kOps, shape);
  }
  // The sum of these contributions (op, rank).
  std::vector<float> sum(const Gradients& gradients,
                         const std::vector<std::pair<uint32_t, uint32_t>>& parts) {
    std::vector<float> all(336, 0.0F), one(336);
    for (const auto& [op, rank] : parts) {
      gradients.fill(options_.program[op], op, rank, reinterpret_cast<std::byte*>(one.data()));
      for (size_t i = 0; i < all.size(); ++i) all[i] += one[i];
    }
    return all;
  }
  static const std::byte* bytes(const std::vector<float>& values) {
    return reinterpret_cast<const std::byte*>(values.data());
  }
  Options options_;
  Violations violations_;
};

TEST_F(CarryTest, ASumNamesItsContributions) {
  const Gradients gradients(options_);
  ASSERT_EQ(gradients.tags().size(), 1U);
  const auto late = sum(gradients, {{0, 2}, {3, 0}, {3, 1}, {3, 2}});
  const Recovered found = gradients.recover(options_.program[3], 3, 0, bytes(late));
  ASSERT_TRUE(found.ok) << found.why;
  EXPECT_TRUE(found.whole);
  EXPECT_EQ(found.ranks, RankSet(0b111));
  EXPECT_EQ(found.in.size(), 4U);
}

TEST_F(CarryTest, AContributionThatIsThereTwiceIsNoSum) {
  const Gradients gradients(options_);
  for (uint32_t op = 0; op < kOps; ++op) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const auto twice = sum(gradients, {{op, 0}, {op, 1}, {op, 2}, {op, rank}});
      EXPECT_FALSE(gradients.recover(options_.program[op], op, 0, bytes(twice)).ok);
    }
  }
}

TEST_F(CarryTest, WhatIsNowhereAndWhatIsInTwoPlacesIsFound) {
  const Gradients gradients(options_);
  ConservationChecker checker(options_, gradients, &violations_);
  for (uint32_t op = 0; op < kOps; ++op) {
    const auto value =
        op == 2 ? sum(gradients, {{2, 0}, {2, 1}}) : sum(gradients, {{op, 0}, {op, 1}, {op, 2}});
    checker.applied(op, 0, gradients.recover(options_.program[op], op, 0, bytes(value)));
  }
  RunEnd end;
  end.finished = true;
  checker.at_end(end);
  ASSERT_EQ(violations_.count(), 1U);
  EXPECT_NE(violations_.list()[0].find("1 are nowhere, among them block 0 of rank 2 in op 2"),
            std::string::npos)
      << violations_.list()[0];

  // Its rank still owes it: now nothing is amiss. Owed by another rank, or twice, it is.
  const auto owed = sum(gradients, {{2, 2}});
  Taken taken;
  taken.rank = 2;
  taken.owed = std::span(bytes(owed), owed.size() * sizeof(float));
  checker.on_taken(taken);
  checker.at_end(end);
  EXPECT_EQ(violations_.count(), 1U);
  taken.rank = 1;
  checker.on_taken(taken);
  EXPECT_EQ(violations_.count(), 3U);
}

}  // namespace
}  // namespace sluice::simulation
