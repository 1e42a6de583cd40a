// Policies: time codes, records, and what all nodes make of a pulse (docs/protocol.md, sections 4 and 10).
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "transport/exchange/policy.h"

namespace sluice::exchange {
namespace {

TEST(SizeClass, DoublesFrom4KiB) {
  EXPECT_EQ(size_class(0), 0U);
  EXPECT_EQ(size_class(4096), 0U);
  EXPECT_EQ(size_class(4097), 1U);
  EXPECT_EQ(size_class(8192), 1U);
  EXPECT_EQ(size_class(25U << 20), 13U);
  EXPECT_EQ(size_class(UINT64_MAX), kSizeClasses - 1);
}

TEST(TimeCode, RoundsUpByLessThanTenPercentAndIsStable) {
  EXPECT_EQ(encode_time(0), 0);
  EXPECT_EQ(decode_time(0), 0);
  for (Micros time = 2; time < 2'000'000; time = time * 9 / 8 + 1) {
    const uint8_t code = encode_time(time);
    EXPECT_GE(decode_time(code) + 1, time);
    EXPECT_LE(decode_time(code), time * 1.1 + 1);
    EXPECT_EQ(decode_time(encode_time(decode_time(code))), decode_time(code)) << time;
  }
}

TEST(Record, SurvivesTheWire) {
  Policy policy;
  policy.number = 7;
  policy.from = 1234;
  policy.hadamard = true;
  policy.incast = 3;
  policy.exit_share = 40;
  policy.of_class[5] = {decode_time(80), decode_time(81), decode_time(70)};
  std::array<std::byte, kPolicyRecordBytes> record;
  encode_policy(policy, record.data());
  Policy back;
  ASSERT_TRUE(decode_policy(record, &back));
  EXPECT_EQ(back.number, 7U);
  EXPECT_EQ(back.from, 1234U);
  EXPECT_TRUE(back.hadamard);
  EXPECT_FALSE(back.halt);
  EXPECT_EQ(back.incast, 3);
  EXPECT_EQ(back.exit_share, 40);
  for (uint32_t c = 0; c < kSizeClasses; ++c) {
    EXPECT_EQ(back.of_class[c].push, policy.of_class[c].push);
    EXPECT_EQ(back.of_class[c].pull, policy.of_class[c].pull);
    EXPECT_EQ(back.of_class[c].complete, policy.of_class[c].complete);
  }
}

TEST(Record, RefusesWhatNoPulseMakes) {
  std::array<std::byte, kPolicyRecordBytes> zero{};
  Policy back;
  EXPECT_FALSE(decode_policy(zero, &back));
  EXPECT_FALSE(decode_policy(std::span(zero).first(63), &back));
}

TEST(Pulse, WordsComeBack) {
  PulseNode node;
  node.of_class[3] = {64, 1500, 900};
  node.blocks = 10;
  node.lost = 2;
  node.highest = 99;
  node.number = 4;
  node.from = 5;
  node.calm = 6;
  node.link = 10'000'000'000;
  std::array<int64_t, kPulseWords> words{};
  encode_pulse(node, words);
  const PulseNode back = decode_pulse(words);
  EXPECT_EQ(back.of_class[3].samples, 64);
  EXPECT_EQ(back.of_class[3].p95, 1500);
  EXPECT_EQ(back.of_class[3].complete, 900);
  EXPECT_EQ(back.highest, 99);
  EXPECT_EQ(back.calm, 6);
  EXPECT_EQ(back.link, 10'000'000'000);
}

class NextPolicy : public testing::Test {
 protected:
  std::vector<PulseNode> nodes = std::vector<PulseNode>(4);
  PolicyLimits limits{.nodes = 4};
  Policy last;
};

TEST_F(NextPolicy, AClassWarmsUpUntilHalfOfTheNodesHaveMeasuredIt) {
  nodes[0].of_class[2] = {20, 4000, 3000};
  EXPECT_EQ(next_policy(1, last, nodes, limits).of_class[2].push, 0);
  nodes[3].of_class[2] = {20, 4000, 3000};
  const Policy policy = next_policy(1, last, nodes, limits);
  // H = 5 x P95 = 20 ms, in halves, rounded up to a time code.
  EXPECT_GE(policy.of_class[2].push, 10'000);
  EXPECT_LE(policy.of_class[2].push, 11'000);
  EXPECT_EQ(policy.of_class[2].push, policy.of_class[2].pull);
}

TEST_F(NextPolicy, OneSlowNodeDoesNotSetTheDeadline) {
  for (PulseNode& node : nodes) node.of_class[2] = {64, 4000, 3000};
  nodes[1].of_class[2].p95 = 900'000;
  EXPECT_LE(next_policy(1, last, nodes, limits).of_class[2].push, 11'000);
}

TEST_F(NextPolicy, StaysBetweenFourTimesIdealAndTheLargestDeadline) {
  for (PulseNode& node : nodes) node.of_class[15] = {64, 1000, 900};
  // The slowest link that is known: 128 MiB x 3/4 at 1 Gbit/s take 805 ms, four times that is above 1 s.
  nodes[0].link = 100'000'000'000;
  nodes[2].link = 1'000'000'000;
  EXPECT_NEAR(static_cast<double>(next_policy(1, last, nodes, limits).of_class[15].push), 500'000, 50'000);
  nodes[0].link = nodes[2].link = 0;
  EXPECT_NEAR(static_cast<double>(next_policy(1, last, nodes, limits).of_class[15].push), 5'000, 500);
}

TEST_F(NextPolicy, TakesEffectLateEnoughForEverybodyToHear) {
  nodes[2].highest = 500;
  EXPECT_EQ(next_policy(1, last, nodes, limits).from, 628U);
  last.from = 1000;
  EXPECT_EQ(next_policy(2, last, nodes, limits).from, 1064U);
}

TEST_F(NextPolicy, LossDoublesTheShareAndHalvesIncastCalmTakesBack) {
  for (PulseNode& node : nodes) node.blocks = 1000;
  nodes[0].lost = 8;  // 0.2 %
  Policy policy = next_policy(1, last, nodes, limits);
  EXPECT_EQ(policy.exit_share, 20);
  EXPECT_EQ(policy.incast, 4);
  EXPECT_FALSE(policy.hadamard);
  nodes[0].lost = 100;  // 2.5 %
  for (int i = 0; i < 5; ++i) policy = next_policy(2, policy, nodes, limits);
  EXPECT_EQ(policy.exit_share, 50);
  EXPECT_TRUE(policy.hadamard);
  nodes[0].lost = 0;
  for (PulseNode& node : nodes) node.calm = 8;
  policy = next_policy(3, policy, nodes, limits);
  EXPECT_EQ(policy.exit_share, 49);
  EXPECT_EQ(policy.incast, 2);
  EXPECT_FALSE(policy.hadamard);
}

TEST(Estimator, P95IsThe61stOf64) {
  Estimator estimator;
  for (Micros i = 1; i <= 64; ++i) estimator.add(i);
  for (int i = 0; i < 640; ++i) estimator.add(1 + i % 64);  // the EWMA settles
  EXPECT_EQ(estimator.samples(), 64);
  EXPECT_NEAR(static_cast<double>(estimator.p95()), 61, 1);
}

}  // namespace
}  // namespace sluice::exchange
