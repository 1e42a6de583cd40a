// The handshake of the nodes, over a virtual network with loss, duplicates, reordering and paths that swallow large
// datagrams; and everything that must not bring it about.
#include "transport/exchange/join.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "tests/unit/join_network.h"

namespace sluice::exchange {
namespace {

using Fault = JoinFault::Kind;
using Peer = JoinPeer::State;
constexpr Micros kSecond = 1'000'000;
const std::vector<uint16_t> kLadder(std::begin(kDatagramLadder), std::end(kDatagramLadder));

void expect_agreement(const JoinNetwork& net, uint32_t payload, uint32_t lanes) {
  for (const auto& join : net.joins) {
    ASSERT_EQ(join->state(), Join::State::kFinished) << join->text();
    EXPECT_EQ(join->payload(), payload);
    EXPECT_EQ(join->lanes(), lanes);
    ASSERT_EQ(join->members().size(), net.joins.size());
    for (size_t i = 0; i < net.joins.size(); ++i) {
      EXPECT_EQ(join->members()[i].join_nonce, net.joins[0]->members()[i].join_nonce);
    }
  }
}

// One datagram of each kind that node 0 sends to node 1.
struct Recorded {
  std::vector<Bytes> hellos, acks;
};
Recorded record(JoinNetwork& net, uint32_t from, uint32_t to) {
  Recorded recorded;
  net.tap = [&recorded, from, to](uint32_t a, uint32_t b, const Bytes& datagram) {
    if (a == from && b == to) {
      (JoinNetwork::is_hello(datagram) ? recorded.hellos : recorded.acks).push_back(datagram);
    }
    return true;
  };
  EXPECT_TRUE(net.run_until_finished(10 * kSecond));
  net.tap = nullptr;
  EXPECT_FALSE(recorded.hellos.empty());
  EXPECT_FALSE(recorded.acks.empty());
  return recorded;
}

wire::Hello hello_in(const Bytes& datagram) {
  wire::Hello hello;
  std::memcpy(&hello, datagram.data() + wire::kHeaderBytes, sizeof(hello));
  return hello;
}
wire::JobKey job_key() {
  wire::JobKey key;
  key.fill(7);
  return key;
}
// As a member of the job could send it.
void tag_again(Bytes& datagram) {
  const std::span<std::byte> all(datagram);
  const auto tag =
      wire::control_tag(wire::control_key("job", job_key()), all.first(48), all.subspan(48, all.size() - 64));
  std::copy(tag.begin(), tag.end(), datagram.end() - 16);
}

// --- agreement ---

TEST(Join, OneNodeHasFinishedAtOnce) {
  JoinNetwork net({.nodes = 1});
  EXPECT_TRUE(net.run_until_finished(0));
  expect_agreement(net, 8896, 2);
  EXPECT_EQ(net.sent, 0U);
  EXPECT_EQ(net.joins[0]->next_timer(), kNever);
}

TEST(Join, CalmNetworkTakesAFewRoundTrips) {
  for (uint32_t nodes = 2; nodes <= 16; ++nodes) {
    JoinNetwork net({.seed = nodes, .nodes = nodes});
    EXPECT_TRUE(net.run_until_finished(kSecond)) << net.joins[0]->text();
    expect_agreement(net, 8896, 2);
    EXPECT_LT(net.now, 30'000) << nodes;
    EXPECT_LT(net.sent, 14ULL * nodes * nodes) << nodes;
    // Nothing goes on by itself afterwards.
    const uint64_t before = net.sent;
    net.run(net.now + kSecond, [] { return false; });
    EXPECT_LE(net.sent, before + 4ULL * nodes * nodes);
    const uint64_t after = net.sent;
    net.run(net.now + 10 * kSecond, [] { return false; });
    EXPECT_EQ(net.sent, after);
  }
}

TEST(Join, LearnsNoncesAndTheSmallestNumberOfLanes) {
  JoinNetwork net(
      {.nodes = 3, .learn = true, .adjust = [](uint32_t node, JoinSettings& s) { s.lanes = 4 - node; }});
  EXPECT_TRUE(net.run_until_finished(kSecond));
  expect_agreement(net, 8896, 2);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(net.joins[0]->members()[i].join_nonce, nonce_of(i));
}

TEST(Join, SmallestOwnDatagramWinsWithoutProbingMore) {
  JoinNetwork net({.nodes = 4, .adjust = [](uint32_t node, JoinSettings& s) {
                     s.largest_datagram = node == 2 ? 2016 : 8972;
                   }});
  size_t largest = 0;
  net.tap = [&largest](uint32_t, uint32_t, const Bytes& datagram) {
    largest = std::max(largest, datagram.size());
    return true;
  };
  EXPECT_TRUE(net.run_until_finished(kSecond));
  expect_agreement(net, 1920, 2);  // 2016 is not on the ladder: IP over InfiniBand
  EXPECT_EQ(net.joins[0]->payload() % 64, 0U);
}

TEST(Join, ABlackHoleForLargeDatagramsCostsAFractionOfASecond) {
  struct {
    size_t path;
    uint32_t payload;
  } const cases[] = {{8960, 8896}, {8959, 8832}, {4096, 4032}, {1500, 1408}, {1472, 1408},
                     {1471, 1344}, {1400, 1280}, {1240, 1152}, {548, 448}};
  for (const auto& test : cases) {
    JoinNetwork net({.seed = test.path, .nodes = 5});
    net.set_limit(3, 1, test.path);
    EXPECT_TRUE(net.run_until_finished(5 * kSecond)) << test.path;
    expect_agreement(net, test.payload, 2);
    EXPECT_EQ(net.expected_payload(8972, kLadder), test.payload);
    EXPECT_LT(net.now, 700'000) << test.path;
  }
}

TEST(Join, APathThatCarriesTooLittleIsNamed) {
  JoinNetwork net({.nodes = 3});
  net.set_limit(0, 2, 500);
  net.run(5 * kSecond, [&net] { return net.is(0, Join::State::kFailed); });
  ASSERT_EQ(net.joins[0]->state(), Join::State::kFailed);
  const JoinFault& fault = net.joins[0]->fault();
  EXPECT_EQ(fault.kind, Fault::kPayload);
  EXPECT_EQ(fault.node, 2U);
  EXPECT_EQ(fault.ours, 512U);
  EXPECT_NE(fault.text().find("node 2"), std::string::npos);
  EXPECT_NE(fault.text().find("512"), std::string::npos);
  EXPECT_FALSE(net.run_until_finished(10 * kSecond));
}

TEST(Join, ANodeThatCannotSendEnoughFailsAtOnce) {
  JoinNetwork net({.nodes = 2, .adjust = [](uint32_t node, JoinSettings& s) {
                     s.largest_datagram = node == 0 ? 400 : 8972;
                   }});
  net.run(kSecond, [] { return false; });
  for (uint32_t node = 0; node < 2; ++node) {
    ASSERT_EQ(net.joins[node]->state(), Join::State::kFailed);
    EXPECT_EQ(net.joins[node]->fault().kind, Fault::kPayload);
    EXPECT_EQ(net.joins[node]->fault().node, 0U);
    EXPECT_EQ(net.joins[node]->fault().ours, 512U);
  }
  EXPECT_EQ(net.joins[0]->fault().theirs, 400U);
}

TEST(Join, LongRoundTripsAreNoReasonToShrink) {
  for (const Micros delay : {Micros{20'000}, Micros{75'000}, Micros{150'000}, Micros{400'000}}) {
    JoinNetwork net({.nodes = 3, .delay_min = delay, .delay_max = delay + delay / 10});
    EXPECT_TRUE(net.run_until_finished(20 * kSecond)) << delay;
    expect_agreement(net, 8896, 2);
    EXPECT_LT(net.sent, 160U) << "nor to send the same again before an answer could have come";
    for (const JoinPeer& peer : net.joins[0]->peers()) {
      EXPECT_GE(peer.rtt, 2 * delay);
      EXPECT_LT(peer.rtt, 3 * delay);
    }
  }
}

// The swarm: world sizes 1 to 16, up to 30 % loss, duplicates, reordering, late starts, paths of several sizes. 300
// seeds, 50 a case.
class JoinSwarm : public testing::TestWithParam<uint64_t> {};

TEST_P(JoinSwarm, AllAgreeOnTheLargestPayloadThatReachesAll) {
  for (uint64_t seed = GetParam(); seed < GetParam() + 50; ++seed) {
    std::mt19937_64 random(seed);
    const auto nodes = static_cast<uint32_t>(1 + seed % 16);
    JoinNetwork net({.seed = seed,
                     .nodes = nodes,
                     .learn = seed % 3 == 0,
                     .loss = 0.3 * static_cast<double>(random() % 4) / 3,
                     .duplicates = 0.2,
                     .delay_max = seed % 2 == 0 ? 300 : 15'000,
                     .start_within = seed % 5 == 0 ? 2 * kSecond : 0});
    constexpr size_t kPaths[] = {9000, 8960, 4096, 1472, 1400, 1280, 576};
    if (nodes > 1 && seed % 4 != 0) {
      const auto from = static_cast<uint32_t>(random() % nodes);
      net.set_limit(from, (from + 1 + static_cast<uint32_t>(random() % (nodes - 1))) % nodes,
                    kPaths[random() % 7]);
    }
    ASSERT_TRUE(net.run_until_finished(10 * kSecond)) << "seed " << seed << ": " << net.joins[0]->text();
    expect_agreement(net, net.expected_payload(8972, kLadder), 2);
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, JoinSwarm, testing::Values(1, 51, 101, 151, 201, 251));

TEST(Join, OneSeedIsOneTrace) {
  const auto trace = [](uint64_t seed) {
    JoinNetwork net({.seed = seed, .nodes = 6, .loss = 0.2, .duplicates = 0.1});
    std::vector<std::pair<Micros, Bytes>> sent;
    net.tap = [&](uint32_t, uint32_t, const Bytes& datagram) {
      sent.emplace_back(net.now, datagram);
      return true;
    };
    EXPECT_TRUE(net.run_until_finished(20 * kSecond));
    return sent;
  };
  EXPECT_EQ(trace(5), trace(5));
  EXPECT_NE(trace(5), trace(6));
}

TEST(Join, AFinishedNodeAnswersSlowerOnes) {
  JoinNetwork net({.nodes = 3});
  // Node 2 hears nothing of the second phase until the others have finished.
  bool open = false;
  net.tap = [&open](uint32_t, uint32_t to, const Bytes& datagram) {
    return open || to != 2 || hello_in(datagram).phase != 2;
  };
  net.run(5 * kSecond,
          [&net] { return net.is(0, Join::State::kFinished) && net.is(1, Join::State::kFinished); });
  ASSERT_EQ(net.joins[0]->state(), Join::State::kFinished);
  ASSERT_EQ(net.joins[2]->state(), Join::State::kJoining);
  net.run(20 * kSecond, [] { return false; });
  EXPECT_EQ(net.joins[2]->state(), Join::State::kJoining);
  EXPECT_EQ(net.joins[0]->next_timer(), kNever);
  open = true;
  EXPECT_TRUE(net.run_until_finished(21 * kSecond));
  expect_agreement(net, 8896, 2);
}

// --- who is missing ---

TEST(Join, AMissingNodeIsNamedAndAskedSparingly) {
  JoinNetwork net({.nodes = 4});
  net.run(0, [&net] { return net.joins[3] != nullptr; });
  net.stop(3);
  net.run(2 * kSecond, [] { return false; });
  const auto peers = net.joins[0]->peers();
  ASSERT_EQ(peers.size(), 3U);
  EXPECT_EQ(peers[0].state, Peer::kWaiting);
  EXPECT_EQ(peers[1].state, Peer::kWaiting);
  EXPECT_EQ(peers[2].node, 3U);
  EXPECT_EQ(peers[2].state, Peer::kSilent);
  const std::string text = net.joins[0]->text();
  EXPECT_NE(text.find("node 3 (no answer"), std::string::npos) << text;
  EXPECT_EQ(text.find("node 1"), std::string::npos) << text;
  const uint64_t before = net.sent;
  net.run(12 * kSecond, [] { return false; });
  // Three nodes ask the silent one, each about every 200 ms; the live ones need not be asked.
  EXPECT_GT(net.sent - before, 3U * 10 * 3);
  EXPECT_LT(net.sent - before, 3U * 10 * 7);
  net.restart(3);  // with another nonce than the view names
  net.run(net.now + kSecond, [] { return false; });
  EXPECT_EQ(net.joins[0]->state(), Join::State::kFailed);
}

TEST(Join, AThousandSilentNodesAreAskedSparingly) {
  JoinNetwork net({.nodes = 1024});
  net.run(0, [&net] { return net.joins[1023] != nullptr; });
  for (uint32_t node = 1; node < 1024; ++node) net.stop(node);
  const uint64_t before = net.sent;
  net.run(10 * kSecond, [] { return false; });
  EXPECT_GT(net.sent - before, 1023U * 8);
  EXPECT_LT(net.sent - before, 1023U * 16);
  const std::string text = net.joins[0]->text();
  EXPECT_NE(text.find("nodes 1, 2, 3, 4, 5, 6, 7, 8 and 1015 more (no answer"), std::string::npos) << text;
}

TEST(Join, SixtyFourNodes) {
  JoinNetwork net({.nodes = 64, .loss = 0.05});
  EXPECT_TRUE(net.run_until_finished(10 * kSecond));
  expect_agreement(net, 8896, 2);
}

// --- what must not work ---

TEST(Join, AnotherKeyIsCountedNamedAndNotAnswered) {
  JoinNetwork net(
      {.nodes = 3, .adjust = [](uint32_t node, JoinSettings& s) { s.key[0] = node == 2 ? 9 : 7; }});
  uint64_t from_2 = 0;
  net.tap = [&from_2](uint32_t from, uint32_t to, const Bytes& datagram) {
    EXPECT_TRUE((from != 2 && to != 2) || JoinNetwork::is_hello(datagram)) << "an answer to a wrong tag";
    if (from == 2 && to == 0) ++from_2;
    return true;
  };
  EXPECT_FALSE(net.run_until_finished(3 * kSecond));
  for (const auto& join : net.joins) EXPECT_EQ(join->state(), Join::State::kJoining);
  EXPECT_GT(net.drops[static_cast<size_t>(wire::Drop::kTag)], 20U);
  const JoinPeer peer = net.joins[0]->peers()[1];
  EXPECT_EQ(peer.node, 2U);
  EXPECT_EQ(peer.state, Peer::kStrange);
  EXPECT_EQ(peer.wrong_tags, from_2);
  EXPECT_NE(net.joins[0]->text().find("not tagged with this job's key"), std::string::npos)
      << net.joins[0]->text();
}

TEST(Join, AnyChangedBitIsDroppedAndNotAnswered) {
  JoinNetwork net({.nodes = 2});
  const Recorded recorded = record(net, 0, 1);
  JoinNetwork other({.seed = 2, .nodes = 2});
  other.run(0, [&other] { return other.joins[1] != nullptr; });
  for (const Bytes& good : {recorded.hellos.front(), recorded.acks.front()}) {
    for (size_t bit = 0; bit < good.size() * 8; ++bit) {
      Bytes bad = good;
      bad[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
      const uint64_t before = other.sent;
      const wire::Drop drop = other.deliver(0, 1, bad);
      ASSERT_TRUE(drop == wire::Drop::kTag || drop == wire::Drop::kMagic || drop == wire::Drop::kType ||
                  drop == wire::Drop::kJob || drop == wire::Drop::kEpoch || drop == wire::Drop::kSender ||
                  drop == wire::Drop::kSource || drop == wire::Drop::kNotMine)
          << wire::drop_name(drop) << " bit " << bit;
      ASSERT_EQ(other.sent, before) << bit;
    }
    for (size_t length = 0; length < good.size(); ++length) {
      const Bytes cut(good.begin(), good.begin() + static_cast<ptrdiff_t>(length));
      const uint64_t before = other.sent;
      ASSERT_NE(other.deliver(0, 1, cut), wire::Drop::kNone) << length;
      ASSERT_EQ(other.sent, before) << length;
    }
  }
  EXPECT_TRUE(other.run_until_finished(kSecond)) << "none of it did harm";
}

TEST(Join, ADatagramForAnotherNodeOrFromAnotherAddressIsDropped) {
  JoinNetwork net({.nodes = 3});
  const Recorded recorded = record(net, 0, 1);
  const Bytes& hello = recorded.hellos.front();
  EXPECT_EQ(net.deliver(0, 2, hello), wire::Drop::kNotMine);
  EXPECT_EQ(net.deliver(2, 1, hello), wire::Drop::kSource);
  EXPECT_EQ(net.joins[1]->on_packet(99, hello, net.now), wire::Drop::kSource);
  EXPECT_EQ(net.joins[0]->on_packet(0, hello, net.now), wire::Drop::kSource);
  EXPECT_EQ(net.deliver(0, 1, hello), wire::Drop::kNone) << "answered, also afterwards";
}

TEST(Join, HellosOfAnEarlierJoinProveNothing) {
  for (const bool learn : {false, true}) {
    // The same nodes and the same nonces except for node 1, which has been started again since.
    JoinNetwork before({.nodes = 3, .learn = learn});
    std::vector<std::pair<std::pair<uint32_t, uint32_t>, Bytes>> recorded;
    before.tap = [&recorded](uint32_t from, uint32_t to, const Bytes& datagram) {
      recorded.push_back({{from, to}, datagram});
      return true;
    };
    ASSERT_TRUE(before.run_until_finished(kSecond));

    JoinNetwork::Options options{.seed = 9, .nodes = 3, .learn = learn};
    options.adjust = [](uint32_t, JoinSettings& s) {
      for (uint32_t i = 0; i < 3; ++i) {
        if (s.join_nonces[i]) s.join_nonces[i] = nonce_of(i, 5);
      }
    };
    // Alone with an attacker who has recorded everything: nobody is there.
    JoinNetwork alone(options);
    alone.run(0, [&alone] { return alone.joins[2] != nullptr; });
    alone.stop(0);
    alone.stop(2);
    for (int round = 0; round < 20; ++round) {
      for (const auto& [pair, datagram] : recorded) {
        if (pair.second != 1) continue;
        const wire::Drop drop = alone.deliver(pair.first, 1, datagram);
        EXPECT_EQ(drop, JoinNetwork::is_hello(datagram) ? wire::Drop::kNone : wire::Drop::kReplay);
      }
    }
    EXPECT_EQ(alone.joins[1]->state(), Join::State::kJoining);
    for (const JoinPeer& peer : alone.joins[1]->peers()) EXPECT_EQ(peer.state, Peer::kUnproven);
    EXPECT_NE(alone.joins[1]->text().find("no answer to ours"), std::string::npos) << alone.joins[1]->text();

    // And in the middle of a real join: it finishes as if nothing had been sent.
    options.loss = 0.2;
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      options.seed = seed;
      JoinNetwork net(options);
      std::mt19937_64 random(seed);
      for (int i = 0; i < 2000; ++i) {
        const auto& [pair, datagram] = recorded[random() % recorded.size()];
        net.at(static_cast<Micros>(random() % 1'000'000),
               [&net, pair = pair, &datagram = datagram] { net.deliver(pair.first, pair.second, datagram); });
      }
      ASSERT_TRUE(net.run_until_finished(20 * kSecond)) << seed;
      expect_agreement(net, 8896, 2);
      for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(net.joins[0]->members()[i].join_nonce, nonce_of(i, 5));
      net.run(net.now + 2 * kSecond, [] { return false; });
      for (const auto& join : net.joins) {
        for (const JoinPeer& peer : join->peers()) EXPECT_FALSE(peer.restarted);
      }
    }
  }
}

// --- faults that are named with both values ---

struct Mismatch {
  const char* name;
  std::function<void(JoinSettings&)> change;  // of node 1
  Fault kind;
  uint64_t value_0, value_1;
  std::string words;
};

TEST(Join, DifferentSettingsAreNamedOnBothSides) {
  const Mismatch cases[] = {
      {"sealing", [](JoinSettings& s) { s.sealing = wire::Sealing::kNone; }, Fault::kSealing, 1, 0,
       "here auth, there none"},
      {"config", [](JoinSettings& s) { s.config_digest = 0xBAD; }, Fault::kConfig, 0xC0FFEE, 0xBAD,
       "here 0x0000000000c0ffee, there 0x0000000000000bad"},
      {"lanes", [](JoinSettings& s) { s.lanes = 3; }, Fault::kLanes, 2, 3, "here 2, there 3"},
  };
  for (const Mismatch& test : cases) {
    for (const double loss : {0.0, 0.3}) {
      JoinNetwork net({.nodes = 2, .loss = loss, .adjust = [&test](uint32_t node, JoinSettings& s) {
                         if (node == 1) test.change(s);
                       }});
      EXPECT_TRUE(net.run(5 * kSecond, [&net] { return net.all(Join::State::kFailed); })) << test.name;
      const JoinFault here = net.joins[0]->fault(), there = net.joins[1]->fault();
      EXPECT_EQ(here.kind, test.kind) << test.name;
      EXPECT_EQ(there.kind, test.kind) << test.name;
      EXPECT_EQ(here.node, 1U);
      EXPECT_EQ(there.node, 0U);
      EXPECT_EQ(here.ours, test.value_0);
      EXPECT_EQ(here.theirs, test.value_1);
      EXPECT_EQ(there.ours, test.value_1);
      EXPECT_EQ(there.theirs, test.value_0);
      EXPECT_NE(here.text().find("node 1"), std::string::npos);
      EXPECT_NE(here.text().find(test.words), std::string::npos) << here.text();
    }
  }
}

TEST(Join, AnotherVersionIsRefusedByName) {
  JoinNetwork net({.nodes = 2});
  net.tap = [](uint32_t from, uint32_t, Bytes& datagram) {
    if (from == 1) {
      datagram[1] = std::byte{2};
      tag_again(datagram);
    }
    return true;
  };
  net.run(kSecond, [&net] { return net.is(0, Join::State::kFailed); });
  ASSERT_EQ(net.joins[0]->state(), Join::State::kFailed);
  const JoinFault& fault = net.joins[0]->fault();
  EXPECT_EQ(fault.kind, Fault::kVersion);
  EXPECT_EQ(fault.ours, 1U);
  EXPECT_EQ(fault.theirs, 2U);
  EXPECT_NE(fault.text().find("here 1, there 2"), std::string::npos);
}

TEST(Join, APeerThatWasStartedAgainIsNamed) {
  JoinNetwork net({.nodes = 3, .adjust = [](uint32_t node, JoinSettings& s) {
                     if (node == 1) s.join_nonces[1] = nonce_of(1, 4);  // the view names start 0
                   }});
  net.run(kSecond, [] { return false; });
  for (const uint32_t node : {0, 2}) {
    ASSERT_EQ(net.joins[node]->state(), Join::State::kFailed);
    const JoinFault& fault = net.joins[node]->fault();
    EXPECT_EQ(fault.kind, Fault::kNonce);
    EXPECT_EQ(fault.node, 1U);
    EXPECT_NE(fault.ours, fault.theirs);
    EXPECT_NE(fault.text().find("node 1 was started again"), std::string::npos);
  }
}

TEST(Join, ARestartDuringTheJoinIsSeenWhenNoncesAreOfTheView) {
  JoinNetwork net({.nodes = 3, .delay_min = 5'000, .delay_max = 6'000});
  net.at(12'000, [&net] { net.restart(1); });  // after the first contact
  net.run(2 * kSecond, [] { return false; });
  EXPECT_EQ(net.joins[0]->state(), Join::State::kFailed);
  EXPECT_EQ(net.joins[0]->fault().kind, Fault::kNonce);
  EXPECT_EQ(net.joins[2]->fault().kind, Fault::kNonce);
}

TEST(Join, ARestartDuringTheJoinIsFollowedWhenNoncesAreLearned) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    JoinNetwork net(
        {.seed = seed, .nodes = 4, .learn = true, .loss = 0.2, .duplicates = 0.2, .delay_max = 4'000});
    // Node 3 is not there, so nobody can finish before the restart.
    net.run(0, [&net] { return net.joins[3] != nullptr; });
    net.stop(3);
    for (int i = 1; i <= 3; ++i) net.at(i * 70'000, [&net] { net.restart(1); });
    net.at(300'000, [&net] { net.restart(3); });
    ASSERT_TRUE(net.run_until_finished(20 * kSecond)) << seed << " " << net.joins[0]->text();
    expect_agreement(net, 8896, 2);
    EXPECT_EQ(net.joins[0]->members()[1].join_nonce, nonce_of(1, 3))
        << "the last start, not one of those before";
  }
}

TEST(Join, ARestartAfterTheJoinIsToldToBothSides) {
  for (const bool learn : {false, true}) {
    JoinNetwork net({.nodes = 3, .learn = learn});
    ASSERT_TRUE(net.run_until_finished(kSecond));
    net.restart(2);
    net.run(net.now + 2 * kSecond, [] { return false; });
    ASSERT_EQ(net.joins[2]->state(), Join::State::kFailed);
    EXPECT_EQ(net.joins[2]->fault().kind, Fault::kUnknownStart);
    EXPECT_NE(net.joins[2]->fault().text().find("earlier start of this node"), std::string::npos);
    for (const uint32_t node : {0, 1}) {
      EXPECT_EQ(net.joins[node]->state(), Join::State::kFinished) << "what was agreed on stays";
      const auto peers = net.joins[node]->peers();
      EXPECT_FALSE(peers[0].restarted);
      EXPECT_TRUE(peers[1].restarted);
    }
  }
}

TEST(Join, AnOlderViewWaitsAndANewerOneIsNamed) {
  uint64_t generation_of_1 = 2;
  JoinNetwork net({.nodes = 2, .adjust = [&generation_of_1](uint32_t node, JoinSettings& s) {
                     if (node == 1) s.generation = generation_of_1;
                   }});
  net.run(kSecond, [] { return false; });
  ASSERT_EQ(net.joins[1]->state(), Join::State::kFailed);
  EXPECT_EQ(net.joins[1]->fault().kind, Fault::kGeneration);
  EXPECT_EQ(net.joins[1]->fault().ours, 2U);
  EXPECT_EQ(net.joins[1]->fault().theirs, 3U);
  EXPECT_EQ(net.joins[1]->newest_generation(), 3U);
  ASSERT_EQ(net.joins[0]->state(), Join::State::kJoining);
  EXPECT_EQ(net.joins[0]->peers()[0].state, Peer::kBehind);
  EXPECT_NE(net.joins[0]->text().find("older view"), std::string::npos);
  // It reads the newer view and comes back.
  generation_of_1 = 3;
  net.start(1);
  EXPECT_TRUE(net.run_until_finished(net.now + kSecond));
  expect_agreement(net, 8896, 2);
  // A still newer one after the join is told to the caller, and changes nothing.
  generation_of_1 = 4;
  net.restart(1);
  net.run(net.now + kSecond, [] { return false; });
  EXPECT_EQ(net.joins[0]->state(), Join::State::kFinished);
  EXPECT_EQ(net.joins[0]->newest_generation(), 4U);
  EXPECT_EQ(net.joins[1]->state(), Join::State::kJoining) << "waits for node 0 to read its view";
}

TEST(Join, EveryNameAndTextIsThere) {
  for (int i = 0; i <= static_cast<int>(Peer::kReady); ++i)
    EXPECT_STRNE(state_name(static_cast<Peer>(i)), "unknown");
  for (int i = 0; i <= static_cast<int>(Fault::kPayload); ++i) {
    const std::string text = JoinFault{static_cast<Fault>(i), 5, 1, 2}.text();
    EXPECT_NE(text.find("node 5"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace sluice::exchange
