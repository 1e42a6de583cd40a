// How a slow rank catches up (queued slots, debts that travel without a submit), how deadlines adapt, and how lost packets
// are repaired: rule by rule (docs/protocol.md, sections 4, 6, 7 and 10).
#include <gtest/gtest.h>

#include <numeric>

#include "tests/unit/exchange_support.h"
#include "transport/exchange/policy.h"

namespace sluice::exchange {
namespace {

using wire::Type;
using Floats = std::vector<float>;

struct Catchup : testing::Test {
  void start(std::vector<uint32_t> node_of_rank) {
    const Settings fresh = small_settings(std::move(node_of_rank));
    settings.node_of_rank = fresh.node_of_rank;
    settings.members = fresh.members;
    net = std::make_unique<LaneNet>(settings);
  }
  Call<float>& call(uint32_t node, uint32_t seq, float value, size_t count = 4 * kBlock, uint32_t rank = 0,
                    OpClass op_class = OpClass::kConsistent) {
    calls.push_back(std::make_unique<Call<float>>(seq, Floats(count, value), op_class));
    calls.back()->submission.local_rank = rank;
    EXPECT_EQ(net->submit(node, *calls.back()), Status::kOk);
    return *calls.back();
  }
  bool idle() {
    net->run(500'000);
    return std::all_of(net->lanes.begin(), net->lanes.end(), [](const auto& lane) { return lane->idle(); });
  }
  Settings settings = small_settings({0, 1});
  std::unique_ptr<LaneNet> net;
  std::vector<std::unique_ptr<Call<float>>> calls;
};

// Node 1 calls op 0 after everybody has closed it: its slot is queued, and travels with the next op of the tag.
TEST_F(Catchup, AWhollyLateContributionJoinsTheNextOp) {
  settings.carry_over = true;
  start({0, 1});
  Call<float>& first = call(0, 0, 1);
  net->run(20'000);
  EXPECT_EQ(first.out, Floats(4 * kBlock, 1));  // one of two ranks is half: both owners close without node 1
  call(1, 0, 10);
  net->run(20'000);
  EXPECT_EQ(net->lanes[1]->counters().slots_queued, 1U);
  EXPECT_EQ(net->event(1, 0, kEventResult).status, Status::kOk);
  EXPECT_FALSE(net->has_event(1, 0, kEventResolved));
  Call<float>& other = call(0, 1, 2);
  Call<float>& mine = call(1, 1, 20);
  net->run(20'000);
  EXPECT_EQ(mine.out, Floats(4 * kBlock, 32));
  EXPECT_EQ(other.out, mine.out);
  EXPECT_TRUE(net->has_event(1, 0, kEventResolved));
  EXPECT_TRUE(idle());
}

// Node 0 goes on without node 1: what node 1 owes goes along without a submit, after late_wait.
TEST_F(Catchup, DebtsTravelWithoutASubmit) {
  settings.carry_over = true;
  start({0, 1});
  call(0, 0, 1);
  net->run(20'000);
  call(1, 0, 10);
  net->run(20'000);
  Call<float>& second = call(0, 1, 2);
  net->run(30'000);
  // Its own submit of op 1 is queued in turn.
  call(1, 1, 20);
  net->run(20'000);
  EXPECT_EQ(second.out, Floats(4 * kBlock, 12));
  EXPECT_EQ(net->lanes[1]->counters().slots_queued, 2U);
  EXPECT_TRUE(net->has_event(1, 0, kEventResolved));
  // What waits is handed out when the tag is retired.
  Floats owed(4 * kBlock, -1);
  net->run(100'000);
  ASSERT_TRUE(net->lanes[1]->take_carry(net->now, calls.back()->submission,
                                        reinterpret_cast<std::byte*>(owed.data())));
  EXPECT_EQ(owed, Floats(4 * kBlock, 20));
  net->run(1);
  EXPECT_TRUE(net->has_event(1, 1, kEventResolved));
  EXPECT_TRUE(idle());
}

// A second rank of a node that calls after the freeze is queued, and carried by itself.
TEST_F(Catchup, ALateSiblingIsQueued) {
  settings.carry_over = true;
  settings.min_contribution = 0.3;
  start({0, 0, 1});
  call(0, 0, 1, 4 * kBlock, 0);
  Call<float>& other = call(1, 0, 5);
  net->run(20'000);
  EXPECT_EQ(other.out[0], 6);
  call(0, 0, 100, 4 * kBlock, 1);
  net->run(20'000);
  EXPECT_EQ(net->event(0, 0, kEventResult, 1).status, Status::kOk);
  EXPECT_FALSE(net->has_event(0, 0, kEventResolved, 1));
  call(0, 1, 1, 4 * kBlock, 0);
  call(0, 1, 100, 4 * kBlock, 1);
  Call<float>& next = call(1, 1, 5);
  net->run(20'000);
  EXPECT_EQ(next.out[0], 206);
  EXPECT_TRUE(net->has_event(0, 0, kEventResolved, 1));
  EXPECT_TRUE(idle());
}

// Without carry-over the same is lost, and counted.
TEST_F(Catchup, WithoutCarryOverALateSiblingIsLost) {
  settings.min_contribution = 0.3;
  start({0, 0, 1});
  call(0, 0, 1, 4 * kBlock, 0);
  call(1, 0, 5);
  net->run(20'000);
  call(0, 0, 100, 4 * kBlock, 1);
  net->run(20'000);
  EXPECT_EQ(net->event(0, 0, kEventResolved, 1).blocks_uncounted, 4U);
  EXPECT_EQ(net->lanes[0]->counters().contributions_late, 1U);
  EXPECT_TRUE(idle());
}

// More tags than a rank can have: the one that was used longest ago and owes nothing makes room.
TEST_F(Catchup, ManyTags) {
  settings.carry_over = true;
  start({0, 1});
  for (uint32_t seq = 0; seq < 300; ++seq) {
    for (uint32_t node = 0; node < 2; ++node) {
      calls.push_back(std::make_unique<Call<float>>(seq, Floats(8, 1), OpClass::kConsistent));
      calls.back()->submission.tag = seq;
      ASSERT_EQ(net->submit(node, *calls.back()), Status::kOk);
    }
    net->run(2'000);
    ASSERT_EQ(net->event(1, seq, kEventResult).status, Status::kOk);
  }
  EXPECT_TRUE(idle());
}

// --- deadlines that adapt ---

TEST_F(Catchup, AClassIsMeasuredAndGetsADeadline) {
  settings.adaptive = true;
  settings.carry_over = true;
  settings.hard_deadline = 200'000;
  settings.hard_deadline_min = 2'000;
  start({0, 1, 2});
  // The pulses of node 2 get nowhere at first: it learns the record from a PING.
  bool cut = true;
  bool record = false;
  std::vector<uint32_t> policy(3, 0);
  net->lost = [&](const wire::Header& h, uint32_t from, uint32_t to) {
    if (is(h, Type::kAnnounce)) policy[from] = std::max<uint32_t>(policy[from], h.policy);
    record |= to == 2 && is(h, Type::kPing);
    return cut && to == 2 && is(h, Type::kPull) && (h.op_seq & wire::kDaemonOps) != 0;
  };
  for (uint32_t seq = 0; seq < 420; ++seq) {
    for (uint32_t node = 0; node < 3; ++node) call(node, seq, 1, 900);
    net->run(3'000);
    if (seq == 200) cut = false;
    for (uint32_t node = 0; node < 3; ++node) {
      ASSERT_EQ(net->event(node, seq, kEventResult).status, Status::kOk);
      net->events[node].clear();
    }
    calls.clear();
  }
  for (uint32_t node = 0; node < 3; ++node) EXPECT_GT(policy[node], 0U) << node;
  EXPECT_TRUE(record);
  // Now bounded: an op whose owner is silent ends soon, though hard_deadline is 200 ms.
  net->lost = [](const wire::Header& h, uint32_t from, uint32_t to) {
    return is(h, Type::kPull) && from == 0 && to == 1;
  };
  for (uint32_t node = 0; node < 3; ++node) call(node, 420, 1, 900);
  net->run(30'000);
  EXPECT_EQ(net->event(1, 420, kEventResult).status, Status::kIncomplete);
}

// A pulse is small: were its blocks shared out as those of an op, most lanes would have none, and so no bounds.
TEST_F(Catchup, EachLaneHasBoundsOfItsOwn) {
  settings.adaptive = true;
  settings.lanes = 2;
  settings.lane = 1;
  start({0, 1, 2});
  for (uint32_t seq = 0; seq < 320; ++seq) {
    for (uint32_t node = 0; node < 3; ++node) call(node, seq, 1, 12 * kBlock);
    net->run(3'000);
    calls.clear();
  }
  const Bounds bounds = net->lanes[0]->bounds();
  EXPECT_GT(bounds.policy, 0U);
  EXPECT_GT(bounds.hard[size_class(12 * kBlock * sizeof(float))], 0);
  for (uint32_t node = 1; node < 3; ++node) EXPECT_EQ(net->lanes[node]->bounds().policy, bounds.policy);
}

// A tail that is seen from all and a block that is missing from one: the shard waits a share of t_C, not for P.
TEST_F(Catchup, EarlyExit) {
  settings.adaptive = true;
  settings.carry_over = true;
  settings.hard_deadline = 400'000;
  settings.hard_deadline_min = 400'000;
  start({0, 1});
  for (uint32_t seq = 0; seq < 320; ++seq) {
    call(0, seq, 1, 12 * kBlock);
    call(1, seq, 1, 12 * kBlock);
    net->run(3'000);
    calls.clear();
    net->events[0].clear();
    net->events[1].clear();
  }
  net->lost = [](const wire::Header& h, uint32_t from, uint32_t) {
    return from == 1 && is(h, Type::kPush) && h.block == 1;
  };
  call(0, 320, 1, 12 * kBlock);
  call(1, 320, 1, 12 * kBlock);
  net->run(60'000);
  const Event event = net->event(1, 320, kEventResolved);
  EXPECT_EQ(event.blocks_uncounted, 1U);
  EXPECT_LT(event.total, 50'000);
}

// --- repairs ---

// Every first copy of a kind of packet is lost.
TEST_F(Catchup, WhatIsLostOnceIsRepaired) {
  for (const Type type : {Type::kPush, Type::kPull, Type::kAnnounce, Type::kRequest}) {
    for (const OpClass op_class : {OpClass::kExact, OpClass::kConsistent}) {
      settings.hard_deadline = 400'000;
      start({0, 1, 2});
      std::vector<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>> seen;
      net->lost = [&](const wire::Header& h, uint32_t from, uint32_t to) {
        if (!is(h, type) && !(type == Type::kRequest && is(h, Type::kPush))) return false;
        const std::tuple key{h.type | h.op_seq << 8, from, to, static_cast<uint32_t>(h.block)};
        if (std::count(seen.begin(), seen.end(), key) >= (type == Type::kAnnounce ? 2 : 1)) return false;
        seen.push_back(key);
        return true;
      };
      std::vector<Call<float>*> mine;
      for (uint32_t node = 0; node < 3; ++node)
        mine.push_back(&call(node, 0, static_cast<float>(node + 1), 30 * kBlock, 0, op_class));
      net->run(1'000'000);
      for (uint32_t node = 0; node < 3; ++node) {
        EXPECT_EQ(net->event(node, 0, kEventResult).status, Status::kOk) << type_name(type);
        EXPECT_EQ(mine[node]->out, Floats(30 * kBlock, 6)) << type_name(type);
      }
      EXPECT_TRUE(idle());
      calls.clear();
    }
  }
}

// A node that has received nothing of a shard asks for all of it.
TEST_F(Catchup, AskingForEverything) {
  settings.hard_deadline = 400'000;
  start({0, 1});
  Micros deaf_until = net->now + 60'000;
  net->lost = [&](const wire::Header& h, uint32_t, uint32_t to) {
    return to == 1 && is(h, Type::kPull) && net->now < deaf_until;
  };
  call(0, 0, 1, 20 * kBlock);
  Call<float>& mine = call(1, 0, 2, 20 * kBlock);
  net->run(400'000);
  EXPECT_EQ(net->event(1, 0, kEventResult).status, Status::kOk);
  EXPECT_EQ(mine.out, Floats(20 * kBlock, 3));
  EXPECT_GT(net->lanes[0]->counters().packets_sent, 20U);
}

// `exact` sums in rank order: what comes early waits.
TEST_F(Catchup, ExactSumsInRankOrder) {
  start({0, 1, 2, 3});
  std::vector<Call<float>*> mine;
  const float values[] = {1e8F, 3, -1e8F, 5};  // in another order another sum
  for (const uint32_t node : {3U, 2U, 1U, 0U}) {
    mine.push_back(&call(node, 0, values[node], 9 * kBlock, 0, OpClass::kExact));
    net->run(2'000);
  }
  net->run(100'000);
  const float sum = ((values[0] + values[1]) + values[2]) + values[3];
  for (const Call<float>* call : mine) EXPECT_EQ(call->out, Floats(9 * kBlock, sum));
  EXPECT_TRUE(idle());
}

// The least pool: ops wait for memory, and none is lost.
TEST_F(Catchup, TheLeastPoolIsEnough) {
  settings.pool_bytes = 1;
  start({0, 1, 2});
  for (uint32_t seq = 0; seq < 20; ++seq) {
    for (uint32_t node = 0; node < 3; ++node) call(node, seq, 1, 90 * kBlock, 0, OpClass::kExact);
  }
  net->run(5'000'000);
  for (uint32_t node = 0; node < 3; ++node) EXPECT_EQ(net->event(node, 19, kEventResult).status, Status::kOk);
  for (const auto& call : calls) ASSERT_EQ(call->out, Floats(90 * kBlock, 3));
  EXPECT_TRUE(idle());
}

TEST_F(Catchup, SealedPacketsOfOneNodeAreTakenByAll) {
  for (const wire::Sealing sealing : {wire::Sealing::kAuth}) {
    settings.sealing = sealing;
    start({0, 1, 2});
    for (uint32_t node = 0; node < 3; ++node) call(node, 0, 1, 9 * kBlock);
    net->run(20'000);
    for (uint32_t node = 0; node < 3; ++node)
      EXPECT_EQ(net->event(node, 0, kEventResult).status, Status::kOk);
    // One bit of a payload: nobody takes it.
    wire::Header h = net->header(1, Type::kPing, 0);
    EXPECT_EQ(net->inject(0, h, std::vector<std::byte>(sizeof(wire::Ping) + wire::kTagBytes)),
              wire::Drop::kTag);
    // A day later the keys are new.
    for (const auto& lane : net->lanes) lane->tick(net->now);
    net->now += 25LL * 3600 * 1'000'000;
    for (uint32_t node = 0; node < 3; ++node) call(node, 1, 2, 9 * kBlock);
    net->run(300'000);
    EXPECT_EQ(net->event(2, 1, kEventResult).status, Status::kOk);
  }
}

}  // namespace
}  // namespace sluice::exchange
