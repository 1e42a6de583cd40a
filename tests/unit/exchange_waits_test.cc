// Who was waited for: an op that begins or ends late names the node that held it up, and a node that is lost is named as
// people know it (docs/protocol.md, section 3).
#include <gtest/gtest.h>

#include "tests/unit/exchange_support.h"

namespace sluice::exchange {
namespace {

using Floats = std::vector<float>;

struct Waits : testing::Test {
  void SetUp() override {
    settings = small_settings({0, 1, 2});
    settings.node_names = {"ant at 10.0.0.1:9470", "bee at 10.0.0.2:9470", "cat at 10.0.0.3:9470"};
    settings.peer_timeout = 20'000'000;
  }
  void start() { net = std::make_unique<LaneNet>(settings); }
  void call(uint32_t node, uint32_t seq, OpClass op_class) {
    calls.push_back(std::make_unique<Call<float>>(seq, Floats(6 * kBlock, 1), op_class));
    ASSERT_EQ(net->submit(node, *calls.back()), Status::kOk);
  }
  void call_all(uint32_t seq, OpClass op_class) {
    for (uint32_t node = 0; node < 3; ++node) call(node, seq, op_class);
  }
  // Node `by`, which was on time, says that op `seq` waited for node 2.
  void expect_named(uint32_t by, uint32_t seq, Micros least, Micros most) {
    const Event event = net->event(by, seq, kEventResult);
    EXPECT_EQ(event.status, Status::kOk) << event.text;
    EXPECT_EQ(event.worst_node, 2U) << "node " << by;
    EXPECT_GE(event.lag + event.quorum, least);
    EXPECT_LE(event.lag + event.quorum, most);
    EXPECT_NE(std::string(event.text).find("ms for node 2 (rank 2; cat at 10.0.0.3:9470)"), std::string::npos)
        << "says '" << event.text << "'";
  }
  Settings settings;
  std::unique_ptr<LaneNet> net;
  std::vector<std::unique_ptr<Call<float>>> calls;
};

// An op without a bound needs everybody: it waits for the node that comes last.
TEST_F(Waits, AnExactOpNamesWhoCameLast) {
  start();
  call_all(0, OpClass::kExact);
  net->run(20'000);
  const uint64_t before = net->lanes[0]->peer(2).ops_waited;
  call(0, 1, OpClass::kExact);
  call(1, 1, OpClass::kExact);
  net->run(2'000'000);
  call(2, 1, OpClass::kExact);
  net->run(20'000);
  expect_named(0, 1, 1'900'000, 2'010'000);
  expect_named(1, 1, 1'900'000, 2'010'000);
  EXPECT_EQ(net->event(2, 1, kEventResult).lag, 0);
  EXPECT_STREQ(net->event(2, 1, kEventResult).text, "") << "the late one waited for nobody";
  EXPECT_EQ(net->lanes[0]->peer(2).ops_waited, before + 1);
  EXPECT_GE(net->lanes[0]->peer(2).waited, 1'900'000);
}

// A trainer that stands still for 5 s: bounded ops go on for one step, then admission waits for it.
TEST_F(Waits, AdmissionNamesTheNodeBehind) {
  start();
  call_all(0, OpClass::kConsistent);
  net->run(50'000);
  for (uint32_t seq = 1; seq < 3; ++seq) {
    call(0, seq, OpClass::kConsistent);
    call(1, seq, OpClass::kConsistent);
    net->run(50'000);
  }
  EXPECT_EQ(net->event(0, 1, kEventResult).worst_node, 2U) << "it was not counted";
  EXPECT_FALSE(net->has_event(0, 2, kEventResult));
  net->run(5'000'000);
  call(2, 1, OpClass::kConsistent);
  call(2, 2, OpClass::kConsistent);
  net->run(50'000);
  expect_named(0, 2, 4'900'000, 5'200'000);
  expect_named(1, 2, 4'900'000, 5'200'000);
}

// A daemon that stands still for 5 s, after it has taken part in the op: its shard is missing everywhere, so everybody is
// behind in the same op; it is the one that is silent.
TEST_F(Waits, AdmissionNamesTheSilentNode) {
  settings.pull_patience = 1000;
  start();
  call_all(0, OpClass::kConsistent);
  net->run(50'000);
  bool stopped = false;
  net->lost = [&](const wire::Header& header, uint32_t from, uint32_t) {
    stopped |= from == 2 && is(header, wire::Type::kPush);
    return stopped && from == 2;
  };
  call_all(1, OpClass::kConsistent);
  net->run(20'000);
  call_all(2, OpClass::kConsistent);
  net->run(5'000'000);
  EXPECT_FALSE(net->has_event(0, 2, kEventResult));
  net->lost = nullptr;
  net->run(500'000);
  expect_named(0, 2, 4'900'000, 5'600'000);
  expect_named(1, 2, 4'900'000, 5'600'000);
}

// The same, but its last packets have reached node 1: only node 0 is behind, which waits for the silent one in turn.
TEST_F(Waits, AdmissionSeesThroughWhoWaitsInTurn) {
  settings.pull_patience = 1000;
  start();
  call_all(0, OpClass::kConsistent);
  net->run(50'000);
  const Micros stopped = net->now + 20'000;
  net->lost = [&](const wire::Header&, uint32_t from, uint32_t to) {
    return from == 2 && (to == 0 || net->now >= stopped);
  };
  call_all(1, OpClass::kConsistent);
  net->run(20'000);
  EXPECT_TRUE(net->has_event(1, 1, kEventResult)) << "node 1 has all of op 1";
  call_all(2, OpClass::kConsistent);
  net->run(5'000'000);
  EXPECT_FALSE(net->has_event(1, 2, kEventResult));
  net->lost = nullptr;
  net->run(500'000);
  expect_named(0, 2, 4'500'000, 5'600'000);
  expect_named(1, 2, 4'500'000, 5'600'000);
}

// A short wait is counted, and nobody is bothered with it.
TEST_F(Waits, AShortWaitSaysNothing) {
  start();
  call(0, 0, OpClass::kExact);
  call(1, 0, OpClass::kExact);
  net->run(900'000);
  call(2, 0, OpClass::kExact);
  net->run(20'000);
  EXPECT_EQ(net->event(0, 0, kEventResult).worst_node, 2U);
  EXPECT_STREQ(net->event(0, 0, kEventResult).text, "");
}

TEST_F(Waits, ALostNodeHasRankNameAndAddress) {
  settings.peer_timeout = 2'000'000;
  start();
  call_all(0, OpClass::kConsistent);
  net->run(50'000);
  net->lost = [](const wire::Header&, uint32_t from, uint32_t to) { return from == 2 || to == 2; };
  call(0, 1, OpClass::kExact);
  call(1, 1, OpClass::kExact);
  net->run(4'000'000);
  for (uint32_t node = 0; node < 2; ++node) {
    const Event event = net->event(node, 1, kEventResult);
    EXPECT_EQ(event.status, Status::kPeerLost);
    EXPECT_NE(std::string(event.text).find("node 2 (rank 2; cat at 10.0.0.3:9470)"), std::string::npos)
        << event.text;
  }
}

// Who was never heard may still be joining: it gets the time of a rank.
TEST_F(Waits, APeerThatWasNeverHeardIsNotLostSoon) {
  settings.peer_timeout = 2'000'000;
  settings.rank_timeout = 5'000'000;
  start();
  net->lost = [](const wire::Header&, uint32_t, uint32_t) { return true; };
  call(0, 0, OpClass::kExact);
  net->run(4'500'000);
  EXPECT_FALSE(net->lanes[0]->failed()) << net->lanes[0]->failure_text();
  net->run(1'000'000);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kPeerLost);
  EXPECT_NE(std::string(net->lanes[0]->failure_text()).find("nothing heard from node 1 (rank 1; bee at"),
            std::string::npos)
      << net->lanes[0]->failure_text();
}

// Every text that names nodes holds the longest names that there can be.
TEST_F(Waits, LongNamesFit) {
  for (std::string& name : settings.node_names) name = std::string(63, 'n') + " at " + std::string(63, 'a');
  settings.op_timeout = 1'000'000;
  start();
  call(0, 0, OpClass::kExact);
  net->run(1'500'000);
  const std::string text = net->event(0, 0, kEventResult).text;
  EXPECT_EQ(net->event(0, 0, kEventResult).status, Status::kOpTimeout);
  EXPECT_NE(text.find("node 1 (rank 1; nnn"), std::string::npos) << text;
  EXPECT_NE(text.find(" and 1 more. Look at these processes, or raise exchange.op_timeout"),
            std::string::npos)
      << text;
}

}  // namespace
}  // namespace sluice::exchange
