// Carry-over, block by block (docs/protocol.md, sections 5 and 7): what rounding leaves behind, what never enters it, what
// goes. Two ranks on one node, or two nodes; conservation is exact because the values are whole numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/unit/exchange_support.h"
#include "transport/exchange/geometry.h"

namespace sluice::exchange {
namespace {

using Floats = std::vector<float>;

uint16_t to_bf16(float value) {  // of values that bf16 holds
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}
float from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out = 0;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
uint16_t to_f16(float value) {  // of normal values that f16 holds
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | ((bits >> 23 & 0xff) - 112) << 10 |
                               (bits >> 13 & 0x3ff));
}
float from_f16(uint16_t value) {
  const int exponent = value >> 10 & 31;
  if (exponent == 31) return std::numeric_limits<float>::infinity();
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(value & 1023), -24)
                              : std::ldexp(static_cast<float>(1024 + (value & 1023)), exponent - 25);
  return (value & 0x8000) != 0 ? -magnitude : magnitude;
}

class Carry : public testing::Test {
 protected:
  void start(std::vector<uint32_t> node_of_rank) {
    settings.node_of_rank = small_settings(node_of_rank).node_of_rank;
    settings.members = small_settings(node_of_rank).members;
    settings.carry_over = true;
    net = std::make_unique<LaneNet>(settings);
  }
  template <typename T>
  std::shared_ptr<Call<T>> call(uint32_t node, uint32_t seq, std::vector<T> values, ElementType type,
                                uint32_t rank = 0, float scale = 1) {
    auto made = std::make_shared<Call<T>>(seq, std::move(values), OpClass::kConsistent, type);
    slots.push_back(made);
    made->submission.scaled = scaled;
    made->submission.local_rank = rank;
    made->submission.loss_scale = scale;
    EXPECT_EQ(net->submit(node, *made), Status::kOk);
    return made;
  }
  Floats owed(uint32_t node, Submission what, uint32_t rank = 0) {
    Floats values(what.count);
    what.local_rank = rank;
    EXPECT_TRUE(net->lanes[node]->take_carry(net->now, what, reinterpret_cast<std::byte*>(values.data())));
    return values;
  }

  Settings settings = small_settings({0});
  bool scaled = false;                       // the clients have a loss scale
  std::vector<std::shared_ptr<void>> slots;  // of all calls: lanes read and write them until RESOLVED
  std::unique_ptr<LaneNet> net;
};

// Two ranks of one node, summed in f32 and rounded to 16 bits before the push: 256 + 1 in bf16 is 256 or 258.
TEST_F(Carry, WhatRoundingOfANodesSumTakesAwayIsKept) {
  start({0, 0, 1});
  constexpr size_t kCount = 1500;
  double applied = 0, submitted = 0;
  Submission what;
  for (uint32_t seq = 0; seq < 9; ++seq) {
    const auto a = call<uint16_t>(0, seq, std::vector<uint16_t>(kCount, to_bf16(256)), ElementType::kBf16, 0);
    const auto b = call<uint16_t>(0, seq, std::vector<uint16_t>(kCount, to_bf16(1)), ElementType::kBf16, 1);
    const auto c = call<uint16_t>(1, seq, std::vector<uint16_t>(kCount, to_bf16(0)), ElementType::kBf16);
    net->run(20'000);
    ASSERT_EQ(net->event(0, seq, kEventResult).status, Status::kOk);
    ASSERT_EQ(a->out, c->out);
    applied += from_bf16(a->out[kCount - 1]);
    submitted += 257;
    what = a->submission;
  }
  const Floats rest = owed(0, what);
  EXPECT_NE(rest[kCount - 1], 0);
  EXPECT_EQ(applied + static_cast<double>(rest[kCount - 1]), submitted);
  EXPECT_EQ(owed(0, what, 1), Floats(kCount, 0));  // one of the two keeps it
  for (const float value : rest) ASSERT_EQ(value, rest[0]);
}

// A node owes rests after nearly every op. They wait for its next submit, and do not go out ahead of it.
TEST_F(Carry, RestsAloneAreNoReasonToContribute) {
  start({0, 0, 1});
  const auto submit = [&](uint32_t seq, uint32_t node) {
    for (uint32_t rank = 0; rank < (node == 0 ? 2U : 1U); ++rank) {
      call<uint16_t>(node, seq, std::vector<uint16_t>(1500, to_bf16(rank == 0 ? 256 : 1)), ElementType::kBf16,
                     rank);
    }
  };
  submit(0, 0);
  submit(0, 1);
  net->run(20'000);
  ASSERT_GT(net->lanes[0]->owed().blocks, 0U);
  net->record = true;
  submit(1, 1);
  net->run(4'000);
  for (const wire::Header& h : net->sent)
    EXPECT_FALSE(h.sender == 0 && h.op_seq == 1 && is(h, wire::Type::kAnnounce));
  submit(1, 0);
  net->run(20'000);
  EXPECT_EQ(net->event(0, 1, kEventResolved).blocks_uncounted, 0U);
}

// f16 ends at 65,504: what does not fit waits, and the sum stays finite.
TEST_F(Carry, WhatSaturatesIsKept) {
  start({0, 0});
  constexpr size_t kCount = 700;
  Submission what;
  double applied = 0;
  for (uint32_t seq = 0; seq < 2; ++seq) {
    const float value = seq == 0 ? 40'000 : 0;
    const auto a = call<uint16_t>(0, seq, std::vector<uint16_t>(kCount, seq == 0 ? to_f16(value) : 0),
                                  ElementType::kF16, 0);
    const auto b = call<uint16_t>(0, seq, std::vector<uint16_t>(kCount, seq == 0 ? to_f16(value) : 0),
                                  ElementType::kF16, 1);
    net->run(20'000);
    const Event event = net->event(0, seq, kEventResult);
    ASSERT_EQ(event.status, Status::kOk);
    applied += from_f16(a->out[3]);
    if (seq == 0) {
      EXPECT_EQ(applied, 65'504);
    }
    what = a->submission;
  }
  EXPECT_EQ(applied + static_cast<double>(owed(0, what)[3]), 80'000);
}

TEST_F(Carry, WithoutCarryOverNothingIsKeptOrSaturated) {
  start({0, 0});
  settings.carry_over = false;
  net = std::make_unique<LaneNet>(settings);
  const auto a = call<uint16_t>(0, 0, std::vector<uint16_t>(10, to_f16(40'000)), ElementType::kF16, 0);
  const auto b = call<uint16_t>(0, 0, std::vector<uint16_t>(10, to_f16(40'000)), ElementType::kF16, 1);
  net->run(20'000);
  EXPECT_TRUE(std::isinf(from_f16(a->out[0])));
  EXPECT_EQ(net->lanes[0]->counters().nonfinite_blocks, 1U);
  EXPECT_TRUE(net->lanes[0]->idle());
}

TEST_F(Carry, AnInfinityOfARankIsNoRest) {
  start({0, 0});
  const uint16_t infinity = 0x7c00;
  const auto a = call<uint16_t>(0, 0, std::vector<uint16_t>(10, infinity), ElementType::kF16, 0);
  const auto b = call<uint16_t>(0, 0, std::vector<uint16_t>(10, to_f16(2049 - 1)), ElementType::kF16, 1);
  net->run(20'000);
  EXPECT_EQ(a->out[0], infinity);
  EXPECT_EQ(owed(0, a->submission), Floats(10, 0));
}

// The pushes of node 1 for op 0 are lost: its blocks are carried, except the one that is not finite.
struct Uncounted : Carry {
  static constexpr size_t kCount =
      4 * kBlock;  // node 1 pushes the first two or the last two blocks to node 0
  void lose(std::vector<uint32_t> ops) {
    net->lost = [ops](const wire::Header& h, uint32_t from, uint32_t) {
      return from == 1 && is(h, wire::Type::kPush) &&
             std::find(ops.begin(), ops.end(), h.op_seq) != ops.end();
    };
  }
  static size_t first_lost(uint32_t seq) {
    return Geometry{.count = kCount, .block_elements = kBlock, .nodes = 2}.shard_first(
               Geometry::shard_of(0, seq, 2)) *
           kBlock;
  }
};

TEST_F(Uncounted, ABlockThatIsNotFiniteIsDiscardedAndNeverSeenAgain) {
  start({0, 1});
  lose({0});
  Floats bad(kCount, 3);
  bad[first_lost(0) + kBlock + 7] = std::numeric_limits<float>::quiet_NaN();
  call<float>(0, 0, Floats(kCount, 1), ElementType::kF32);
  const auto a0 = call<float>(1, 0, bad, ElementType::kF32);
  net->run(30'000);
  const Event event = net->event(1, 0, kEventResolved);
  EXPECT_EQ(event.blocks_uncounted, 2U);
  EXPECT_EQ(event.blocks_discarded, 1U);
  EXPECT_EQ(net->lanes[1]->counters().blocks_discarded, 1U);
  EXPECT_EQ(net->lanes[1]->counters().blocks_carried, 1U);
  EXPECT_EQ(a0->out[first_lost(0)], 1);
  const auto b1 = call<float>(0, 1, Floats(kCount, 1), ElementType::kF32);
  const auto a1 = call<float>(1, 1, Floats(kCount, 5), ElementType::kF32);
  net->run(30'000);
  ASSERT_EQ(net->event(1, 1, kEventResult).status, Status::kOk);
  EXPECT_EQ(a1->out[first_lost(0)], 1 + 5 + 3);
  EXPECT_EQ(a1->out[first_lost(0) + kBlock + 7], 1 + 5);
  EXPECT_EQ(a1->out, b1->out);
}

// min_contribution of all ranks: the block of two of three nodes is skipped, is zero everywhere, and all of it is carried.
TEST_F(Carry, ASkippedBlockIsZeroAndCarriedByAll) {
  settings.min_contribution = 1;
  start({0, 1, 2});
  net->lost = [](const wire::Header& h, uint32_t from, uint32_t) {
    return from == 2 && is(h, wire::Type::kPush) && h.op_seq == 0;
  };
  constexpr size_t kCount = 3 * kBlock;
  std::vector<std::shared_ptr<Call<float>>> calls;
  for (uint32_t seq = 0; seq < 2; ++seq) {
    for (uint32_t node = 0; node < 3; ++node)
      calls.push_back(
          call<float>(node, seq, Floats(kCount, static_cast<float>(node + 1)), ElementType::kF32));
    net->run(40'000);
  }
  // Node 2 owns the last block, which has everybody's contribution.
  for (uint32_t node = 0; node < 3; ++node) {
    const Event event = net->event(node, 0, kEventResult);
    EXPECT_EQ(event.status, Status::kOk);
    EXPECT_EQ(event.blocks_skipped, 2U);
    EXPECT_EQ(net->event(node, 0, kEventResolved).blocks_uncounted, 2U);
    EXPECT_EQ(calls[node]->out[0], 0);
    EXPECT_EQ(calls[node]->out[kCount - 1], 6);
    EXPECT_EQ(calls[3 + node]->out[0], 12);
    EXPECT_EQ(calls[3 + node]->out[kCount - 1], 6);
    EXPECT_EQ(owed(node, calls[3]->submission), Floats(kCount, 0));
  }
}

// A rank behind the others: when its op 0 comes to be owed, op 1 is open here already, and takes it along.
TEST_F(Carry, WhatComesToBeOwedGoesWithAnOpThatIsOpen) {
  start({0, 1, 2});
  const auto first = call<float>(0, 0, Floats(900, 1), ElementType::kF32);
  call<float>(1, 0, Floats(900, 2), ElementType::kF32);
  net->run(20'000);
  EXPECT_EQ(first->out, Floats(900, 3));
  const auto second = call<float>(0, 1, Floats(900, 10), ElementType::kF32);
  call<float>(1, 1, Floats(900, 20), ElementType::kF32);
  net->run(1'000);
  const auto late = call<float>(2, 0, Floats(900, 100), ElementType::kF32);
  net->run(20'000);
  EXPECT_EQ(late->out, Floats(900, 3));
  EXPECT_EQ(second->out, Floats(900, 130));
  EXPECT_FALSE(
      net->has_event(2, 0, kEventResolved));  // the fate comes with the own call of the op that took it
  const auto own = call<float>(2, 1, Floats(900, 200), ElementType::kF32);
  net->run(20'000);
  EXPECT_EQ(net->event(2, 0, kEventResolved).blocks_uncounted, 0U);
  EXPECT_EQ(owed(2, own->submission), Floats(900, 200));
  EXPECT_TRUE(net->lanes[2]->drained());
}

// Without a tag nothing says that the next op is the same tensor: counted ranks divide, and what comes late is lost.
TEST_F(Carry, WithoutATagNothingIsCarried) {
  start({0, 1, 2});
  const auto mean = [&](uint32_t node, uint32_t seq, float value) {
    auto made = std::make_shared<Call<float>>(seq, Floats(900, value), OpClass::kConsistent,
                                              ElementType::kF32, ReduceKind::kMean);
    slots.push_back(made);
    made->submission.tag = 0;
    EXPECT_EQ(net->submit(node, *made), Status::kOk);
    return made;
  };
  const auto first = mean(0, 0, 1);
  mean(1, 0, 3);
  net->run(20'000);
  EXPECT_EQ(first->out, Floats(900, 2));
  const auto late = mean(2, 0, 100);
  net->run(20'000);
  EXPECT_EQ(late->out, Floats(900, 2));
  EXPECT_GT(net->event(2, 0, kEventResolved).blocks_uncounted, 0U);
  const auto next = mean(0, 1, 3);
  mean(1, 1, 6);
  mean(2, 1, 9);
  net->run(20'000);
  EXPECT_EQ(next->out, Floats(900, 6));
  EXPECT_EQ(owed(2, late->submission), Floats(900, 0));
}

// A loss scale that begins at 1 is one all the same: what is owed under it takes the scale of the op that it goes into,
// which its ANNOUNCEs say, and waits while none has come.
TEST_F(Carry, AScaleOfOneIsAScale) {
  scaled = true;
  for (const bool told : {true, false}) {
    start({0, 1, 2});
    net->lost = [&](const wire::Header& h, uint32_t, uint32_t to) {
      return !told && to == 2 && h.op_seq == 1 && is(h, wire::Type::kAnnounce);
    };
    const auto first = call<float>(0, 0, Floats(900, 1), ElementType::kF32);
    call<float>(1, 0, Floats(900, 2), ElementType::kF32);
    net->run(20'000);
    const auto second = call<float>(0, 1, Floats(900, 80), ElementType::kF32, 0, 8);
    call<float>(1, 1, Floats(900, 160), ElementType::kF32, 0, 8);
    net->run(1'000);
    call<float>(2, 0, Floats(900, 100), ElementType::kF32);
    net->run(20'000);
    EXPECT_EQ(second->out, Floats(900, told ? 1040 : 240));
    const auto own = call<float>(2, 1, Floats(900, 1600), ElementType::kF32, 0, 8);
    net->run(20'000);
    EXPECT_EQ(owed(2, own->submission), Floats(900, told ? 200 : 300));
  }
}

TEST_F(Uncounted, CarryThatIsTooLongGoes) {
  settings.carry_max_norm = 2;
  start({0, 1});
  lose({0, 1});
  std::vector<std::shared_ptr<Call<float>>> calls;
  // Lost in op 0: two blocks of 8 against four of 8: the carry is shorter than twice the gradient, and goes along.
  // Lost in op 1: the other two blocks. Against gradients of 1 both are out of proportion.
  for (uint32_t seq = 0; seq < 3; ++seq) {
    calls.push_back(call<float>(0, seq, Floats(kCount, 0), ElementType::kF32));
    calls.push_back(call<float>(1, seq, Floats(kCount, seq < 2 ? 8 : 1), ElementType::kF32));
    net->run(30'000);
    ASSERT_EQ(net->event(1, seq, kEventResult).status, Status::kOk);
  }
  EXPECT_EQ(net->event(1, 1, kEventResolved).blocks_discarded, 0U);
  EXPECT_EQ(net->event(1, 2, kEventResolved).blocks_discarded, 2U);
  EXPECT_EQ(calls[2]->out[first_lost(0)], 16);  // it went with op 1
  EXPECT_EQ(calls[4]->out, Floats(kCount, 1));
  EXPECT_EQ(owed(1, calls[5]->submission), Floats(kCount, 0));
}

TEST_F(Uncounted, TooOldCarryGoes) {
  settings.carry_max_ops = 2;
  start({0, 1});
  lose({0, 1, 2, 3});
  std::vector<std::shared_ptr<Call<float>>> calls;
  for (uint32_t seq = 0; seq < 6; ++seq) {
    calls.push_back(call<float>(0, seq, Floats(kBlock, 0), ElementType::kF32));
    calls.push_back(call<float>(1, seq, Floats(kBlock, 1), ElementType::kF32));
    net->run(30'000);
  }
  // One block, whose owner is node 0 in every second op.
  double applied = 0;
  for (uint32_t seq = 0; seq < 6; ++seq) applied += calls[2 * seq]->out[0];
  uint64_t discarded = 0;
  for (uint32_t seq = 0; seq < 6; ++seq) discarded += net->event(1, seq, kEventResolved).blocks_discarded;
  EXPECT_EQ(applied + static_cast<double>(owed(1, calls[0]->submission)[0]) + static_cast<double>(discarded),
            6);
}

// A loss scale that changes while something is carried.
TEST_F(Uncounted, CarryIsRescaled) {
  start({0, 1});
  lose({0});
  call<float>(0, 0, Floats(kCount, 0), ElementType::kF32, 0, 16);
  const auto first = call<float>(1, 0, Floats(kCount, 16), ElementType::kF32, 0, 16);
  net->run(30'000);
  const auto other = call<float>(0, 1, Floats(kCount, 0), ElementType::kF32, 0, 4);
  const auto second = call<float>(1, 1, Floats(kCount, 4), ElementType::kF32, 0, 4);
  net->run(30'000);
  EXPECT_EQ(second->out[first_lost(0)], 8);  // twice 1, at a scale of 4
  EXPECT_EQ(other->out, second->out);
}

// Every accumulator type can be measured for carry_max_norm.
template <typename T>
void norm_of(ElementType type) {
  Settings settings = small_settings({0, 1});
  settings.carry_over = true;
  settings.carry_max_norm = 0.5;
  LaneNet net(settings);
  net.lost = [](const wire::Header& h, uint32_t from, uint32_t) {
    return from == 1 && is(h, wire::Type::kPush) && h.op_seq == 0;
  };
  std::vector<std::unique_ptr<Call<T>>> calls;
  for (uint32_t seq = 0; seq < 2; ++seq) {
    for (uint32_t node = 0; node < 2; ++node) {
      calls.push_back(
          std::make_unique<Call<T>>(seq, std::vector<T>(64, static_cast<T>(2)), OpClass::kConsistent, type));
      ASSERT_EQ(net.submit(node, *calls.back()), Status::kOk);
    }
    net.run(30'000);
  }
  EXPECT_EQ(calls[3]->out[0], static_cast<T>(4)) << element_type_name(type);
  EXPECT_EQ(net.event(1, 1, kEventResolved).blocks_discarded, 1U) << element_type_name(type);
}
TEST(CarryNorm, OfEveryType) {
  norm_of<float>(ElementType::kF32);
  norm_of<double>(ElementType::kF64);
  norm_of<int32_t>(ElementType::kI32);
  norm_of<int64_t>(ElementType::kI64);
  norm_of<uint8_t>(ElementType::kU8);
}

}  // namespace
}  // namespace sluice::exchange
