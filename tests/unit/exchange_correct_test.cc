// Holes of INCOMPLETE results that come later: corrections, and when there are none (docs/protocol.md, section 6).
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "tests/unit/exchange_support.h"
#include "transport/exchange/geometry.h"

namespace sluice::exchange {
namespace {

using Floats = std::vector<float>;
constexpr size_t kCount = 4 * kBlock + 10;  // on two nodes: shards of 3 and 2 blocks, the last one short

Floats ramp(float base, size_t count = kCount) {
  Floats values(count);
  for (size_t i = 0; i < count; ++i) values[i] = base + static_cast<float>(i % 50);
  return values;
}

class Correct : public testing::Test {
 protected:
  Correct() {
    settings.carry_over = true;
    settings.on_incomplete = OnIncomplete::kCorrect;
  }
  // PULLs of these ops do not reach node 1 while `cut`.
  void start() {
    net = std::make_unique<LaneNet>(settings);
    net->lost = [this](const wire::Header& h, uint32_t, uint32_t to) {
      return to == 1 && is(h, wire::Type::kPull) && cut.count(h.op_seq) != 0;
    };
  }
  Call<float>& call(uint32_t node, uint32_t seq, Floats values, float scale = 1) {
    calls.push_back(std::make_unique<Call<float>>(seq, std::move(values), OpClass::kConsistent));
    calls.back()->submission.loss_scale = scale;
    EXPECT_EQ(net->submit(node, *calls.back()), Status::kOk);
    return *calls.back();
  }
  // An op that is INCOMPLETE on node 1, and whose holes are filled after its bound.
  void fill_too_late(uint32_t seq, Floats of_0, Floats of_1) {
    cut = {seq};
    call(0, seq, std::move(of_0));
    call(1, seq, std::move(of_1));
    net->run(15'000);
    cut.clear();
    net->run(100'000);
  }
  // The shard of node 0 in op `seq`, as elements [first, last): what node 1 lacks.
  static std::pair<size_t, size_t> missing(uint32_t seq) {
    const Geometry g{.count = kCount, .block_elements = kBlock, .nodes = 2};
    const uint32_t shard = Geometry::shard_of(0, seq, 2);
    const size_t first = g.shard_first(shard) * kBlock;
    return {first, std::min<size_t>(kCount, first + g.shard_blocks(shard) * kBlock)};
  }
  Status result(uint32_t node, uint32_t seq) const { return net->event(node, seq, kEventResult).status; }
  Status resolved(uint32_t node, uint32_t seq) const { return net->event(node, seq, kEventResolved).status; }
  // What the pool holds: nothing, once everything is handed over.
  void expect_idle() {
    net->run(500'000);
    for (const auto& lane : net->lanes) EXPECT_TRUE(lane->idle());
  }

  Settings settings = small_settings({0, 1});
  std::unique_ptr<LaneNet> net;
  std::set<uint32_t> cut;
  std::vector<std::unique_ptr<Call<float>>> calls;
};

TEST_F(Correct, ALateHoleIsAddedToTheNextResultOfThisRankOnly) {
  start();
  cut = {0};
  call(0, 0, ramp(1));
  Call<float>& first = call(1, 0, ramp(2));
  net->run(15'000);
  ASSERT_EQ(result(1, 0), Status::kIncomplete);
  EXPECT_EQ(result(0, 0), Status::kOk);
  const Event event = net->event(1, 0, kEventResult);
  const auto [begin, end] = missing(0);
  ASSERT_EQ(event.ranges, 1U);
  EXPECT_EQ(event.ranges_total, 1U);
  EXPECT_EQ(event.range[0].first, begin);
  EXPECT_EQ(event.range[0].count, end - begin);
  EXPECT_EQ(event.range[0].owner, 0U);
  EXPECT_NE(std::string(event.text).find("later op of the tag"), std::string::npos) << event.text;
  for (size_t i = 0; i < kCount; ++i)
    ASSERT_EQ(first.out[i], i >= begin && i < end ? 0 : 3 + 2 * static_cast<float>(i % 50)) << i;
  EXPECT_FALSE(net->has_event(1, 0, kEventResolved));

  // The slot is the client's from now on.
  std::fill(first.out.begin(), first.out.end(), -1.0F);
  cut.clear();
  net->run(100'000);
  EXPECT_EQ(resolved(1, 0), Status::kIncomplete);
  EXPECT_EQ(first.out, Floats(kCount, -1.0F));

  Call<float>& second = call(1, 1, ramp(10));
  Call<float>& other = call(0, 1, ramp(20));
  net->run(20'000);
  EXPECT_EQ(result(0, 1), Status::kOk);
  ASSERT_EQ(result(1, 1), Status::kCorrected);
  EXPECT_EQ(net->event(1, 1, kEventResult).blocks_corrected, (end - begin + kBlock - 1) / kBlock);
  for (size_t i = 0; i < kCount; ++i) {
    const float correction = i >= begin && i < end ? 3 + 2 * static_cast<float>(i % 50) : 0;
    ASSERT_EQ(second.out[i] - correction, other.out[i]) << i;
  }
  // Once.
  Call<float>& third = call(1, 2, ramp(10));
  call(0, 2, ramp(20));
  net->run(20'000);
  EXPECT_EQ(result(1, 2), Status::kOk);
  EXPECT_EQ(third.out[begin], 30 + 2 * static_cast<float>(begin % 50));
  expect_idle();
}

TEST_F(Correct, SeveralAddUpAndAnIncompleteResultTakesNoneAlong) {
  start();
  cut = {0, 1, 2};
  Floats expected(kCount, 0);
  for (uint32_t seq = 0; seq < 3; ++seq) {
    call(0, seq, ramp(static_cast<float>(seq)));
    call(1, seq, ramp(static_cast<float>(seq)));
    net->run(15'000);
    ASSERT_EQ(result(1, seq), Status::kIncomplete);
    const auto [begin, end] = missing(seq);
    for (size_t i = begin; i < end; ++i)
      expected[i] += 2 * static_cast<float>(seq) + 2 * static_cast<float>(i % 50);
    if (seq == 1) {  // op 0 is whole before op 2 ends, which is incomplete itself
      cut = {1, 2};
      net->run(100'000);
      ASSERT_EQ(resolved(1, 0), Status::kIncomplete);
    }
  }
  cut.clear();
  net->run(200'000);
  Call<float>& mine = call(1, 3, ramp(1));
  Call<float>& other = call(0, 3, ramp(1));
  net->run(20'000);
  ASSERT_EQ(result(1, 3), Status::kCorrected);
  for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(mine.out[i] - other.out[i], expected[i]) << i;
  expect_idle();
}

TEST_F(Correct, TheLossScaleOfTheOpThatTakesItHolds) {
  start();
  cut = {0};
  call(0, 0, ramp(1), 8);
  call(1, 0, ramp(1), 8);
  net->run(15'000);
  ASSERT_EQ(result(1, 0), Status::kIncomplete);
  cut.clear();
  net->run(100'000);
  Call<float>& mine = call(1, 1, ramp(4), 2);
  Call<float>& other = call(0, 1, ramp(4), 2);
  net->run(20'000);
  ASSERT_EQ(result(1, 1), Status::kCorrected);
  const auto [begin, end] = missing(0);
  for (size_t i = begin; i < end; ++i)
    ASSERT_EQ(mine.out[i] - other.out[i], 2 * (1 + static_cast<float>(i % 50)) / 4) << i;
}

TEST_F(Correct, SixteenBitResultsAreCorrectedInTheirType) {
  settings.carry_over = false;
  start();
  // bf16: the upper half of an f32.
  const auto bf16 = [](float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>(bits >> 16);
  };
  constexpr size_t kHalves = 3 * 672;
  cut = {0};
  std::vector<Call<uint16_t>> all;
  all.reserve(4);
  for (uint32_t seq = 0; seq < 2; ++seq) {
    for (uint32_t node = 0; node < 2; ++node) {
      all.emplace_back(seq, std::vector<uint16_t>(kHalves, bf16(seq == 0 ? 3 : 16)), OpClass::kConsistent,
                       ElementType::kBf16);
      ASSERT_EQ(net->submit(node, all.back()), Status::kOk);
    }
    net->run(15'000);
    if (seq == 0) {
      ASSERT_EQ(result(1, 0), Status::kIncomplete);
    }
    cut.clear();
    net->run(100'000);
  }
  ASSERT_EQ(result(1, 1), Status::kCorrected);
  EXPECT_EQ(all[3].out[0], bf16(32 + 6));
  EXPECT_EQ(all[3].out[kHalves - 1], bf16(32));
  EXPECT_EQ(all[2].out[0], bf16(32));
  expect_idle();
}

TEST_F(Correct, ResyncDropsThem) {
  settings.on_incomplete = OnIncomplete::kResync;
  start();
  cut = {0};
  call(0, 0, ramp(1));
  call(1, 0, ramp(1));
  net->run(15'000);
  EXPECT_NE(std::string(net->event(1, 0, kEventResult).text).find("resync these ranges"), std::string::npos);
  cut.clear();
  net->run(100'000);
  const Event event = net->event(1, 0, kEventResolved);
  EXPECT_EQ(event.status, Status::kDiverged);
  EXPECT_EQ(event.ranges, 1U);
  EXPECT_EQ(event.range[0].first, missing(0).first);
  EXPECT_EQ(std::string(event.text).rfind("DIVERGED: op 0", 0), 0U) << event.text;
  call(1, 1, ramp(1));
  call(0, 1, ramp(1));
  net->run(20'000);
  EXPECT_EQ(result(1, 1), Status::kOk);
  expect_idle();
}

TEST_F(Correct, AFullBufferDivergesAndStopsNothing) {
  settings.correction_bytes = 2 * kBlock * sizeof(float);  // two blocks of the three
  start();
  fill_too_late(0, ramp(1), ramp(1));
  ASSERT_EQ(missing(0).second - missing(0).first, 3U * kBlock);
  EXPECT_EQ(resolved(1, 0), Status::kDiverged);
  EXPECT_EQ(net->event(1, 0, kEventResolved).ranges_total, 1U);
  EXPECT_GT(net->lanes[0]->peer(1).done, 0U);
  // The room is free again: the two blocks of op 1 fit.
  fill_too_late(1, ramp(1), ramp(1));
  EXPECT_EQ(resolved(1, 1), Status::kIncomplete);
  call(0, 2, ramp(1));
  call(1, 2, ramp(1));
  net->run(20'000);
  EXPECT_EQ(result(1, 2), Status::kCorrected);
  expect_idle();
}

TEST_F(Correct, WithoutPagesToSpareItDiverges) {
  settings.pool_bytes = 1;  // the least: what the largest op needs
  start();
  fill_too_late(0, ramp(1), ramp(1));
  EXPECT_EQ(resolved(1, 0), Status::kDiverged);
  expect_idle();
}

TEST_F(Correct, WhatIsNotFiniteCannotBeCorrected) {
  start();
  Floats values = ramp(1);
  values[missing(0).first + 1] = std::numeric_limits<float>::infinity();
  fill_too_late(0, values, ramp(1));
  EXPECT_EQ(resolved(1, 0), Status::kDiverged);
  call(1, 1, ramp(1));
  call(0, 1, ramp(1));
  net->run(20'000);
  EXPECT_EQ(result(1, 1), Status::kOk);
  expect_idle();
}

TEST_F(Correct, ATagThatIsRetiredGivesItBack) {
  start();
  cut = {0};
  call(0, 0, ramp(1));
  Call<float>& mine = call(1, 0, ramp(1));
  net->run(15'000);
  Floats back(kCount, -1);
  auto* out = reinterpret_cast<std::byte*>(back.data());
  EXPECT_FALSE(net->lanes[1]->take_correction(net->now, mine.submission, out));  // holes are open
  cut.clear();
  net->run(100'000);
  ASSERT_TRUE(net->lanes[1]->take_correction(net->now, mine.submission, out));
  const auto [begin, end] = missing(0);
  for (size_t i = 0; i < kCount; ++i)
    ASSERT_EQ(back[i], i >= begin && i < end ? 2 + 2 * static_cast<float>(i % 50) : 0) << i;
  ASSERT_TRUE(net->lanes[1]->take_correction(net->now, mine.submission, out));
  EXPECT_EQ(back, Floats(kCount, 0));
  Submission unknown = mine.submission;
  unknown.tag = 99;
  EXPECT_TRUE(net->lanes[1]->take_correction(net->now, unknown, out));
  call(1, 1, ramp(1));
  call(0, 1, ramp(1));
  net->run(20'000);
  EXPECT_EQ(result(1, 1), Status::kOk);
  expect_idle();
}

TEST_F(Correct, AJobThatEndsSaysWhichRangesStayOpen) {
  start();
  cut = {0};
  call(0, 0, ramp(1));
  call(1, 0, ramp(1));
  net->run(15'000);
  ASSERT_EQ(result(1, 0), Status::kIncomplete);
  // The owner says that it has retired the op: it cannot have, so its view is another one.
  EXPECT_EQ(net->inject(1, net->header(0, wire::Type::kGone, 0), bytes_of(wire::Gone{.base = 5})),
            wire::Drop::kNone);
  const Event event = net->event(1, 0, kEventResolved);
  EXPECT_EQ(event.status, Status::kViewChanged);
  EXPECT_EQ(event.ranges, 1U);
  EXPECT_EQ(net->lanes[1]->counters().gone_open, 1U);
  EXPECT_TRUE(net->lanes[1]->failed());
  net->run(10'000);
  EXPECT_TRUE(net->lanes[0]->failed());
  for (const auto& lane : net->lanes) EXPECT_TRUE(lane->idle());
}

// best_effort has no corrections: its holes are filled at once.
TEST(BestEffort, HolesAreFilledByRule) {
  for (const ReduceKind kind : {ReduceKind::kSum, ReduceKind::kMean}) {
    for (const bool own : {true, false}) {
      Settings settings = small_settings({0, 1});
      settings.fill_own = own;
      LaneNet net(settings);
      net.lost = [](const wire::Header& h, uint32_t, uint32_t to) {
        return to == 1 && is(h, wire::Type::kPull);
      };
      Call<float> a(0, Floats(2 * kBlock, 3), OpClass::kBestEffort, ElementType::kF32, kind);
      Call<float> b(0, Floats(2 * kBlock, 5), OpClass::kBestEffort, ElementType::kF32, kind);
      ASSERT_EQ(net.submit(0, a), Status::kOk);
      ASSERT_EQ(net.submit(1, b), Status::kOk);
      net.run(30'000);
      EXPECT_EQ(net.event(0, 0, kEventResult).status, Status::kOk);
      const Event event = net.event(1, 0, kEventResult);
      EXPECT_EQ(event.status, Status::kApproximated);
      EXPECT_EQ(event.events, kEventResult | kEventResolved);
      EXPECT_EQ(event.blocks_filled, 1U);
      EXPECT_EQ(b.out[2 * kBlock - 1], kind == ReduceKind::kSum ? 8 : 4);  // its own shard
      EXPECT_EQ(b.out[0], !own ? 0 : kind == ReduceKind::kSum ? 10 : 5);
      net.lost = nullptr;
      net.run(300'000);
      EXPECT_TRUE(net.lanes[1]->idle());
    }
  }
}

// Lag: classes without catch-up stay within a step, the ops between two of one tag.
struct Lag : testing::Test {
  Settings settings = small_settings({0, 1});
  std::vector<std::unique_ptr<Call<float>>> calls;
  // Ops that node 0 has pushed or announced while node 1 calls nothing.
  std::set<uint32_t> begun(OpClass op_class, uint32_t tags) {
    settings.max_lag = 8;
    LaneNet net(settings);
    for (uint32_t seq = 0; seq < 12; ++seq) {
      calls.push_back(std::make_unique<Call<float>>(seq, Floats(10, 1), op_class));
      calls.back()->submission.tag = 1 + seq % tags;
      EXPECT_EQ(net.submit(0, *calls.back()), Status::kOk);
    }
    std::set<uint32_t> ops;
    net.lost = [&](const wire::Header& h, uint32_t from, uint32_t) {
      if (from == 0 && is(h, wire::Type::kAnnounce)) ops.insert(h.op_seq);
      return false;
    };
    net.run(20'000);
    EXPECT_EQ(net.lanes[0]->failed(), false);
    return ops;
  }
};

TEST_F(Lag, BestEffortStaysWithinAStep) {
  EXPECT_EQ(begun(OpClass::kBestEffort, 3), (std::set<uint32_t>{0, 1, 2}));
  EXPECT_EQ(begun(OpClass::kBestEffort, 1), (std::set<uint32_t>{0}));
}
TEST_F(Lag, ConsistentWithoutCarryOverToo) {
  EXPECT_EQ(begun(OpClass::kConsistent, 2), (std::set<uint32_t>{0, 1}));
}
TEST_F(Lag, CatchUpAllowsMore) {
  settings.carry_over = true;
  EXPECT_EQ(begun(OpClass::kConsistent, 2).size(), 8U);
}
TEST_F(Lag, ExactAsUsual) { EXPECT_EQ(begun(OpClass::kExact, 2).size(), 8U); }
TEST_F(Lag, NeverMoreThanMaxLag) { EXPECT_EQ(begun(OpClass::kBestEffort, 12).size(), 8U); }

}  // namespace
}  // namespace sluice::exchange
