// What a lane does not take, and says why: packets that do not fit the op, submits that do not fit the job, and how a job
// ends (docs/protocol.md, sections 2, 3, 8 and 15). Sealing is off, so that a test can write packets itself.
#include <gtest/gtest.h>

#include "tests/unit/exchange_support.h"
#include "transport/exchange/geometry.h"

namespace sluice::exchange {
namespace {

using wire::Drop;
using wire::Type;
using Floats = std::vector<float>;

constexpr size_t kCount = 6 * kBlock;  // two blocks of each of three nodes

struct Packets : testing::Test {
  Packets() { start({0, 1, 2}); }
  void start(std::vector<uint32_t> node_of_rank) {
    const Settings fresh = small_settings(std::move(node_of_rank));
    settings.node_of_rank = fresh.node_of_rank;
    settings.members = fresh.members;
    net = std::make_unique<LaneNet>(settings);
    silent();
  }
  // Nothing arrives but what the test injects.
  void silent() {
    net->lost = [](const wire::Header&, uint32_t, uint32_t) { return true; };
  }
  Call<float>& call(uint32_t node, uint32_t seq, OpClass op_class = OpClass::kConsistent,
                    size_t count = kCount) {
    calls.push_back(std::make_unique<Call<float>>(seq, Floats(count, 1), op_class));
    EXPECT_EQ(net->submit(node, *calls.back()), Status::kOk);
    return *calls.back();
  }
  // As node `from` would send it for op 0 of `call`, f32 sum.
  wire::Header of_op(uint32_t from, Type type, uint32_t shard, OpClass op_class = OpClass::kConsistent) {
    wire::Header h = net->header(from, type, 0);
    h.flags = static_cast<uint8_t>(static_cast<uint8_t>(op_class) << wire::kFlagClassShift);
    h.fingerprint = wire::fingerprint(ReduceKind::kSum, ElementType::kF32, ElementType::kF32, kCount, 7);
    h.shard = static_cast<uint16_t>(shard);
    h.total = 2;
    h.ranks = 1;
    return h;
  }
  wire::Header push(uint32_t from = 1) {
    wire::Header h = of_op(from, Type::kPush, 0);
    h.elements = kBlock;
    return h;
  }
  wire::Header pull(uint32_t from = 1) {
    wire::Header h = of_op(from, Type::kPull, from);
    h.elements = kBlock;
    h.flags |= wire::kFlagAllCounted;
    return h;
  }
  static std::vector<std::byte> block(size_t extra = 0, uint16_t count = 0, uint16_t sender = 0) {
    std::vector<std::byte> payload(kBlock * sizeof(float) + extra);
    if (extra >= 2) std::memcpy(payload.data() + kBlock * sizeof(float), &count, 2);
    for (size_t at = 2; at + 2 <= extra; at += 2)
      std::memcpy(payload.data() + kBlock * sizeof(float) + at, &sender, 2);
    return payload;
  }
  // Every op below `done` is over on nodes 1 and 2, they say, and so it is here.
  void retire(uint32_t done) {
    start({0, 1, 2});  // packets of a test have high counters: behind them a real one would be a replay
    for (uint32_t seq = 0; seq < done; ++seq) {
      for (uint32_t node = 0; node < 3; ++node) call(node, seq);
    }
    net->lost = nullptr;
    net->run(300'000);
    silent();
  }

  Settings settings = small_settings({0, 1, 2});
  std::unique_ptr<LaneNet> net;
  std::vector<std::unique_ptr<Call<float>>> calls;
};

TEST_F(Packets, OfOthersAreNotTaken) {
  wire::Header h = net->header(1, Type::kPing, 0);
  const auto ping = bytes_of(wire::Ping{});
  h.job ^= 1;
  EXPECT_EQ(net->inject(0, h, ping), Drop::kJob);
  h = net->header(1, Type::kPing, 0);
  h.epoch ^= 1;
  EXPECT_EQ(net->inject(0, h, ping), Drop::kEpoch);
  h = net->header(1, Type::kPing, 0);
  h.sender = 3;
  EXPECT_EQ(net->inject(0, h, ping), Drop::kSender);
  h.sender = 0;
  EXPECT_EQ(net->inject(0, h, ping), Drop::kSender);
  h = net->header(1, Type::kPing, 0);
  h.lane = 1;
  EXPECT_EQ(net->inject(0, h, ping), Drop::kNotMine);
  h.lane = 0;
  EXPECT_EQ(net->inject(0, h, ping), Drop::kNone);
  EXPECT_EQ(net->inject(0, h, ping), Drop::kReplay);
  h = net->header(1, Type::kPing, 0);
  h.shard = 1;  // for another node
  EXPECT_EQ(net->inject(0, h, ping), Drop::kNotMine);
  h.counter = net->header(1, Type::kPing, 0).counter;
  EXPECT_EQ(net->inject(0, h, {}), Drop::kSize);
  h = net->header(1, Type::kPong, 0);
  h.shard = 1;
  EXPECT_EQ(net->inject(0, h, ping), Drop::kNotMine);
  EXPECT_EQ(net->inject(0, net->header(1, Type::kPong, 0), {}), Drop::kSize);
  for (const Type type : {Type::kHello, Type::kHelloAck, Type::kFeedback, Type::kPush2, Type::kPull2})
    EXPECT_EQ(net->inject(0, net->header(1, type, 0)), Drop::kType) << type_name(type);
  EXPECT_EQ(net->lanes[0]->counters().drops[static_cast<size_t>(Drop::kReplay)], 1U);
}

TEST_F(Packets, AnnounceMustFit) {
  const auto body = bytes_of(wire::Announce{.flags = wire::kContributes | wire::kReceives});
  wire::Header h = of_op(1, Type::kAnnounce, 0);
  EXPECT_EQ(net->inject(0, h, {}), Drop::kSize);
  const auto again = [&](auto change) {
    wire::Header changed = of_op(1, Type::kAnnounce, 0);
    change(changed);
    return net->inject(0, changed, body);
  };
  EXPECT_EQ(again([](wire::Header& x) { x.op_seq = kWindow; }), Drop::kTooEarly);
  EXPECT_EQ(again([](wire::Header& x) { x.op_seq = wire::kDaemonOps | 2; }), Drop::kTooEarly);
  EXPECT_EQ(again([](wire::Header& x) { x.shard = 2; }), Drop::kNotMine);
  EXPECT_EQ(again([](wire::Header& x) { x.ranks = 0; }), Drop::kSize);
  EXPECT_EQ(again([](wire::Header& x) { x.ranks = 2; }), Drop::kSize);          // node 1 has one
  EXPECT_EQ(again([](wire::Header& x) { x.flags |= 7U << 5; }), Drop::kState);  // no such type
  EXPECT_EQ(again([](wire::Header& x) { x.flags |= wire::kFlagClassMask; }), Drop::kState);
  EXPECT_EQ(again([](wire::Header& x) { x.total = 100'000; }), Drop::kSize);  // larger than max_op_bytes
  EXPECT_TRUE(net->lanes[0]->idle());
  EXPECT_EQ(again([](wire::Header&) {}), Drop::kNone);
  EXPECT_FALSE(net->lanes[0]->idle());
  retire(1);
  EXPECT_EQ(again([](wire::Header&) {}), Drop::kRetired);
}

TEST_F(Packets, PushMustFit) {
  const auto with = [&](auto change, size_t bytes = kBlock * sizeof(float)) {
    wire::Header h = push();
    change(h);
    return net->inject(0, h, std::vector<std::byte>(bytes));
  };
  EXPECT_EQ(with([](wire::Header& h) { h.op_seq = kWindow; }), Drop::kTooEarly);
  EXPECT_EQ(with([](wire::Header& h) { h.shard = 1; }), Drop::kNotMine);
  EXPECT_EQ(with([](wire::Header& h) { h.block = 2; }), Drop::kBlock);
  EXPECT_EQ(with([](wire::Header& h) { h.ranks = 0; }), Drop::kSize);
  EXPECT_EQ(with([](wire::Header& h) { h.ranks = 2; }), Drop::kSize);
  EXPECT_EQ(with([](wire::Header& h) { h.policy = 1; }), Drop::kPolicy);
  EXPECT_EQ(with([](wire::Header& h) { h.elements = 0; }, 0), Drop::kSize);
  EXPECT_EQ(with([](wire::Header& h) { h.elements = kBlock + 1; }), Drop::kSize);
  EXPECT_EQ(with([](wire::Header& h) { h.elements = kBlock - 1; }, (kBlock - 1) * 4),
            Drop::kSize);  // not the last
  EXPECT_EQ(with([](wire::Header&) {}, 8), Drop::kSize);
  EXPECT_EQ(with([](wire::Header&) {}), Drop::kNone);
  EXPECT_EQ(with([](wire::Header&) {}), Drop::kDuplicate);
  // What other nodes think of the op decides as long as nobody called it here: two of them must agree.
  wire::Header other = push(2);
  other.fingerprint ^= 1;
  EXPECT_EQ(net->inject(0, other, block()), Drop::kMismatch);
  EXPECT_FALSE(net->lanes[0]->failed());
  net->run(100'000);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kMismatch);
  EXPECT_NE(std::string(net->lanes[0]->failure_text()).find("node 1 (rank 1) and node 2 (rank 2)"),
            std::string::npos)
      << net->lanes[0]->failure_text();
  EXPECT_EQ(with([](wire::Header&) {}), Drop::kClosed);
}

TEST_F(Packets, PushOfAnotherLane) {
  settings.lanes = 2;
  start({0, 1, 2});
  wire::Header h = push();
  h.block = 1;
  EXPECT_EQ(net->inject(0, h, block()), Drop::kNotMine);
  call(0, 0);
  wire::Header back = pull();
  back.block = 1;
  EXPECT_EQ(net->inject(0, back, block()), Drop::kNotMine);
}

TEST_F(Packets, PushThatComesLate) {
  call(0, 0);
  net->inject(0, push(2), block());  // half of the nodes
  net->run(6'000);                   // P
  EXPECT_EQ(net->inject(0, push(), block()), Drop::kLate);
  EXPECT_EQ(net->lanes[0]->peer(1).blocks_late, 1U);
}

TEST_F(Packets, PullMustFit) {
  EXPECT_EQ(net->inject(0, pull(), block()), Drop::kNotSubmitted);
  call(0, 0);
  const auto with = [&](auto change, std::vector<std::byte> payload) {
    wire::Header h = pull();
    change(h);
    return net->inject(0, h, payload);
  };
  const auto as_is = [](wire::Header&) {};
  const auto listed = [](wire::Header& h) { h.flags &= static_cast<uint8_t>(~wire::kFlagAllCounted); };
  EXPECT_EQ(with([](wire::Header& h) { h.op_seq = kWindow; }, block()), Drop::kTooEarly);
  EXPECT_EQ(with(
                [](wire::Header& h) {
                  h.op_seq = 5;
                  h.shard = 2;
                },
                block()),
            Drop::kNotSubmitted);
  EXPECT_EQ(with([](wire::Header& h) { h.shard = 2; }, block()), Drop::kNotMine);
  EXPECT_EQ(with([](wire::Header& h) { h.block = 2; }, block()), Drop::kBlock);
  EXPECT_EQ(with([](wire::Header& h) { h.total = 3; }, block()), Drop::kBlock);
  EXPECT_EQ(with([](wire::Header& h) { h.elements = 1; }, block()), Drop::kSize);
  EXPECT_EQ(with(as_is, block(2, 1)), Drop::kSize);      // a list nobody announced
  EXPECT_EQ(with(listed, block()), Drop::kSize);         // none where one should be
  EXPECT_EQ(with(listed, block(2, 0)), Drop::kSize);     // an empty one
  EXPECT_EQ(with(listed, block(4, 2)), Drop::kSize);     // too short
  EXPECT_EQ(with(listed, block(66, 32)), Drop::kSize);   // longer than the reserve
  EXPECT_EQ(with(listed, block(4, 1, 3)), Drop::kSize);  // no such node
  EXPECT_EQ(with([](wire::Header& h) { h.flags |= wire::kFlagSkip; }, block()), Drop::kSize);
  EXPECT_EQ(with(listed, block(4, 1, 2)), Drop::kNone);
  EXPECT_EQ(with(as_is, block()), Drop::kDuplicate);
  EXPECT_EQ(with(
                [](wire::Header& h) {
                  h.block = 1;
                  h.fingerprint ^= 1;
                },
                block()),
            Drop::kMismatch);
  EXPECT_EQ(with([](wire::Header& h) { h.block = 1; }, block()), Drop::kMismatch);  // nothing of it goes on
  net->run(100'000);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kMismatch);
  EXPECT_EQ(with(as_is, block()), Drop::kClosed);
}

TEST_F(Packets, RequestMustFit) {
  const auto with = [&](auto change, size_t bitmap = 1) {
    wire::Header h = of_op(1, Type::kRequest, 0);
    change(h);
    auto payload = bytes_of(wire::Request{});
    payload.resize(payload.size() + bitmap, std::byte{0xff});
    return net->inject(0, h, payload);
  };
  EXPECT_EQ(net->inject(0, of_op(1, Type::kRequest, 0), {}), Drop::kSize);
  EXPECT_EQ(with([](wire::Header& h) { h.op_seq = kWindow; }), Drop::kTooEarly);
  EXPECT_EQ(with([](wire::Header& h) { h.shard = 2; }), Drop::kNotMine);
  EXPECT_EQ(with([](wire::Header& h) { h.block = 4; }), Drop::kBlock);
  EXPECT_EQ(with([](wire::Header&) {}, 2000), Drop::kBlock);
  EXPECT_EQ(with([](wire::Header& h) { h.flags |= wire::kFlagClassMask; }), Drop::kState);
  // Pushes of an op that nobody called here are not ours to send.
  EXPECT_EQ(with([](wire::Header& h) { h.shard = 1; }), Drop::kNone);
  EXPECT_TRUE(net->lanes[0]->idle());
  EXPECT_EQ(with([](wire::Header&) {}), Drop::kNone);  // opens the op
  EXPECT_FALSE(net->lanes[0]->idle());
  retire(1);
  net->record = true;
  EXPECT_EQ(with([](wire::Header&) {}), Drop::kNone);
  ASSERT_FALSE(net->sent.empty());
  EXPECT_TRUE(is(net->sent.back(), Type::kGone));
}

TEST_F(Packets, RowsMustFit) {
  const auto body = bytes_of(wire::Request{});
  EXPECT_EQ(net->inject(0, of_op(1, Type::kRequestRow, 0), {}), Drop::kSize);
  EXPECT_EQ(net->inject(0, of_op(1, Type::kRequestRow, 2), body), Drop::kNotMine);
  EXPECT_EQ(net->inject(0, of_op(1, Type::kRequestRow, 0), body),
            Drop::kNone);  // not open, not closed: no answer
  wire::Header row = of_op(1, Type::kRow, 1);
  row.ranks = 1;
  EXPECT_EQ(net->inject(0, row, body), Drop::kNotMine);  // the row of another node
  row = of_op(1, Type::kRow, 2);
  row.ranks = 0;
  EXPECT_EQ(net->inject(0, row, body), Drop::kNotMine);  // not its shard
  row = of_op(1, Type::kRow, 1);
  row.ranks = 0;
  EXPECT_EQ(net->inject(0, row, {}), Drop::kSize);
  row.counter += 1'000;
  EXPECT_EQ(net->inject(0, row, body), Drop::kState);  // no such op
  call(0, 0);
  row.counter += 1'000;
  row.block = 4;
  EXPECT_EQ(net->inject(0, row, body), Drop::kState);
  net->inject(0, push(2), block());
  net->run(6'000);
  wire::Header ask = of_op(1, Type::kRequestRow, 0);
  ask.block = 8;  // beyond the shard
  EXPECT_EQ(net->inject(0, ask, body), Drop::kBlock);
  net->record = true;
  EXPECT_EQ(net->inject(0, of_op(1, Type::kRequestRow, 0), body), Drop::kNone);
  ASSERT_FALSE(net->sent.empty());
  EXPECT_TRUE(is(net->sent.back(), Type::kRow));
  EXPECT_EQ(net->sent.back().ranks, 1);
}

TEST_F(Packets, AskingForARowOfARetiredOpIsAnsweredGone) {
  retire(1);
  net->record = true;
  EXPECT_EQ(net->inject(0, of_op(1, Type::kRequestRow, 0), bytes_of(wire::Request{})), Drop::kNone);
  EXPECT_TRUE(is(net->sent.back(), Type::kGone));
  // One that is old here, too, means nothing.
  EXPECT_EQ(net->inject(0, net->header(1, Type::kGone, 0), {}), Drop::kSize);
  EXPECT_EQ(net->inject(0, net->header(1, Type::kGone, 0), bytes_of(wire::Gone{})), Drop::kNone);
  EXPECT_FALSE(net->lanes[0]->failed());
}

// The fates of blocks that a PULL leaves to a ROW.
TEST_F(Packets, ARowBringsFates) {
  call(0, 0);
  for (uint32_t from = 1; from < 3; ++from) {
    for (uint32_t b = 0; b < 2; ++b) {
      wire::Header push_of_it = push(from);
      push_of_it.block = b;
      EXPECT_EQ(net->inject(0, push_of_it, block()), Drop::kNone);
      wire::Header h = pull(from);
      h.block = b;
      if (from == 1) h.flags = static_cast<uint8_t>((h.flags & ~wire::kFlagAllCounted) | wire::kFlagRow);
      EXPECT_EQ(net->inject(0, h, block()), Drop::kNone);
      if (from == 1) {
        EXPECT_EQ(net->inject(0, h, block()), Drop::kDuplicate);
      }
    }
  }
  net->record = true;
  net->run(3'000);
  EXPECT_TRUE(net->has_event(0, 0, kEventResult));
  EXPECT_FALSE(net->has_event(0, 0, kEventResolved));
  EXPECT_TRUE(std::any_of(net->sent.begin(), net->sent.end(),
                          [](const wire::Header& h) { return is(h, Type::kRequestRow); }));
  wire::Header row = of_op(1, Type::kRow, 1);
  row.ranks = 0;
  auto body = bytes_of(wire::Request{});
  body.push_back(std::byte{2});  // the second block was counted
  EXPECT_EQ(net->inject(0, row, body), Drop::kNone);
  EXPECT_EQ(net->event(0, 0, kEventResolved).blocks_uncounted, 1U);
}

// --- the end of a job ---

struct Ends : Packets {
  std::vector<std::byte> abort_of(Status reason, std::vector<uint16_t> named, uint8_t type = 0,
                                  uint64_t elements = 5) {
    wire::Abort body;
    body.reason = static_cast<uint16_t>(reason);
    body.count = static_cast<uint16_t>(named.size());
    body.element_type = body.wire_type = type;
    body.elements = elements;
    body.tag = 7;
    auto bytes = bytes_of(body);
    for (const uint16_t node : named) {
      const auto more = bytes_of(node);
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    return bytes;
  }
  std::string text(uint32_t node = 0) const { return net->lanes[node]->failure_text(); }
};

TEST_F(Ends, AnAbortMustFit) {
  EXPECT_EQ(net->inject(0, net->header(1, Type::kAbort, 0), {}), Drop::kSize);
  auto body = abort_of(Status::kAborted, {2});
  body.push_back({});
  EXPECT_EQ(net->inject(0, net->header(1, Type::kAbort, 0), body), Drop::kSize);
  EXPECT_FALSE(net->lanes[0]->failed());
}

TEST_F(Ends, AnAbortNamesWhoAndWhy) {
  call(0, 0);
  EXPECT_EQ(net->inject(0, net->header(1, Type::kAbort, 0), abort_of(Status::kOpTimeout, {2})), Drop::kNone);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kAborted);
  EXPECT_EQ(text(), "ABORTED: node 1 (rank 1) ended the job (OP_TIMEOUT, because of node 2 (rank 2))");
  EXPECT_EQ(net->event(0, 0, kEventResolved).status, Status::kAborted);
  // A second one changes nothing.
  EXPECT_EQ(net->inject(0, net->header(2, Type::kAbort, 0), abort_of(Status::kPeerLost, {1})), Drop::kNone);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kAborted);
  // Later ops end at once, with the same words; the job is through.
  call(0, 1);
  net->run(1);
  EXPECT_EQ(net->event(0, 1, kEventResult).text, text());
  EXPECT_TRUE(net->lanes[0]->drained());
  EXPECT_TRUE(net->lanes[0]->idle());
}

TEST_F(Ends, ALossIsPassedOn) {
  EXPECT_EQ(net->inject(0, net->header(1, Type::kAbort, 0), abort_of(Status::kPeerLost, {2})), Drop::kNone);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kPeerLost);
  EXPECT_EQ(text(), "PEER_LOST: node 2 (rank 2) is gone, says node 1 (rank 1); the job must be joined anew");
}

TEST_F(Ends, AProcessThatDiedIsALossAndUnknownReasonsAreAborts) {
  EXPECT_EQ(net->inject(0, net->header(1, Type::kAbort, 0), abort_of(Status::kPeerLost, {1})), Drop::kNone);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kPeerLost);
  EXPECT_EQ(text(),
            "PEER_LOST: a process of node 1 (rank 1) is gone, says its daemon; the job must be joined anew");
  start({0, 1, 2});
  EXPECT_EQ(net->inject(0, net->header(1, Type::kAbort, 0), abort_of(static_cast<Status>(99), {})),
            Drop::kNone);
  EXPECT_EQ(text(), "ABORTED: node 1 (rank 1) ended the job (ABORTED)");
}

TEST_F(Ends, ManyRanksOfANodeAreNotAllNamed) {
  start({0, 1, 1, 1, 1, 1, 1});
  EXPECT_EQ(net->inject(0, net->header(1, Type::kAbort, 0), abort_of(Status::kAborted, {1})), Drop::kNone);
  EXPECT_NE(text().find("node 1 (rank 1,2,3,4 ...)"), std::string::npos) << text();
}

// A node that goes on has not heard: it is told again, not more often than it needs.
TEST_F(Ends, WhoGoesOnIsReminded) {
  net->lanes[0]->fail(net->now, Status::kAborted, "the client has gone");
  net->run(100'000);
  net->record = true;
  net->sent.clear();
  EXPECT_EQ(net->inject(0, net->header(1, Type::kPing, 0), bytes_of(wire::Ping{})), Drop::kNone);
  EXPECT_EQ(net->inject(0, of_op(1, Type::kAnnounce, 0), bytes_of(wire::Announce{})), Drop::kClosed);
  EXPECT_EQ(
      std::count_if(net->sent.begin(), net->sent.end(), [](const auto& h) { return is(h, Type::kAbort); }),
      1);
  EXPECT_EQ(net->inject(0, of_op(1, Type::kRequest, 0), bytes_of(wire::Request{})), Drop::kClosed);
  EXPECT_EQ(net->inject(0, of_op(1, Type::kRequestRow, 0), bytes_of(wire::Request{})), Drop::kClosed);
  wire::Header row = of_op(1, Type::kRow, 1);
  row.ranks = 0;
  EXPECT_EQ(net->inject(0, row, bytes_of(wire::Request{})), Drop::kState);
}

TEST_F(Ends, ASilentPeerIsLostAndNamed) {
  EXPECT_EQ(net->inject(0, net->header(1, Type::kPing, 0), bytes_of(wire::Ping{})), Drop::kNone);
  EXPECT_EQ(net->inject(0, net->header(2, Type::kPing, 0), bytes_of(wire::Ping{})), Drop::kNone);
  call(0, 0, OpClass::kExact);
  net->run(3'000'000);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kPeerLost);
  EXPECT_NE(text().find("nothing heard from node 1 (rank 1)"), std::string::npos) << text();
  EXPECT_TRUE(net->lanes[0]->peer(1).lost);
}

TEST_F(Ends, AnExactOpNamesWhoDidNotPush) {
  settings.op_timeout = 50'000;
  start({0, 1, 2});
  call(0, 0, OpClass::kExact);
  net->inject(0, of_op(2, Type::kAnnounce, 0, OpClass::kExact),
              bytes_of(wire::Announce{.flags = wire::kContributes}));
  for (uint32_t b = 0; b < 2; ++b) {
    wire::Header h = of_op(2, Type::kPush, 0, OpClass::kExact);
    h.block = b;
    h.elements = kBlock;
    EXPECT_EQ(net->inject(0, h, block()), Drop::kNone);
  }
  net->run(60'000);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kOpTimeout);
  EXPECT_NE(text().find("waiting for node 1 (rank 1). Look"), std::string::npos) << text();
  EXPECT_EQ(net->event(0, 0, kEventResult).status, Status::kOpTimeout);
}

TEST_F(Ends, AnOpThatNeverBeginsNamesWhoIsMissing) {
  settings.rank_timeout = 50'000;
  start({0, 1, 2});
  call(0, 0);
  net->run(60'000);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kRankTimeout);
  EXPECT_NE(text().find("node 1 (rank 1), node 2 (rank 2)"), std::string::npos) << text();
}

TEST_F(Ends, WaitingForTheSlowestNamesIt) {
  settings.rank_timeout = 50'000;
  settings.max_lag = 1;
  start({0, 1, 2});
  call(0, 0, OpClass::kExact);
  call(0, 1, OpClass::kExact);
  net->run(60'000);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kRankTimeout);
  EXPECT_NE(text().find("op 1 waited 50 ms to begin; node 0 (rank 0) still needs op 0"), std::string::npos)
      << text();
  EXPECT_EQ(net->event(0, 1, kEventResult).lag, net->event(0, 1, kEventResult).total);
}

// --- ranks that do not agree ---

TEST_F(Ends, TheOtherSidesWordsCompleteAMismatch) {
  call(0, 0);
  wire::Header h = net->header(1, Type::kAbort, 0);
  h.flags = static_cast<uint8_t>(OpClass::kExact) << wire::kFlagClassShift;
  EXPECT_EQ(net->inject(0, h, abort_of(Status::kMismatch, {0})), Drop::kNone);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kMismatch);
  EXPECT_EQ(text(),
            "MISMATCH: here op 0 (consistent sum f32, 2016 elements, tag 0000000000000007); node 1 (rank 1) "
            "was asked "
            "for exact sum f32, 5 elements, tag 0000000000000007");
}

TEST_F(Ends, AWitnessNamesTwoOthers) {
  EXPECT_EQ(net->inject(0, net->header(1, Type::kAbort, 3), abort_of(Status::kMismatch, {1, 2})),
            Drop::kNone);
  EXPECT_EQ(
      text(),
      "MISMATCH: op 3: node 1 (rank 1) and node 2 (rank 2) were asked for different things, says node 1 "
      "(rank 1)");
}

TEST_F(Ends, AMismatchElsewhereNamesTheShape) {
  wire::Header h = net->header(1, Type::kAbort, 3);
  EXPECT_EQ(net->inject(0, h, abort_of(Status::kMismatch, {2})), Drop::kNone);
  EXPECT_EQ(text(),
            "MISMATCH: op 3: node 1 (rank 1) was asked for exact sum f32, 5 elements, tag 0000000000000007; "
            "node 2 (rank 2) for something else");
  start({0, 1, 1});
  EXPECT_EQ(net->inject(0, net->header(1, Type::kAbort, 3), abort_of(Status::kMismatch, {1})), Drop::kNone);
  EXPECT_NE(text().find("another rank there for something else"), std::string::npos) << text();
}

// Who called the op himself and agrees with the sender waits a moment for the words of the third.
TEST_F(Ends, WhoAgreesWaitsForTheThird) {
  call(0, 0);
  wire::Header h = net->header(1, Type::kAbort, 0);
  h.flags = static_cast<uint8_t>(OpClass::kConsistent) << wire::kFlagClassShift;
  EXPECT_EQ(net->inject(0, h, abort_of(Status::kMismatch, {2}, 0, kCount)), Drop::kNone);
  EXPECT_FALSE(net->lanes[0]->failed());
  net->run(100'000);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kMismatch);
  EXPECT_NE(text().find("node 2 (rank 2) for something else"), std::string::npos) << text();
}

TEST_F(Ends, TwoRanksOfANodeThatDisagree) {
  start({0, 0, 1});
  call(0, 0);
  calls.push_back(std::make_unique<Call<float>>(0, Floats(10, 1), OpClass::kExact));
  calls.back()->submission.local_rank = 1;
  EXPECT_EQ(net->submit(0, *calls.back()), Status::kOk);
  net->run(10);
  EXPECT_EQ(net->lanes[0]->failure(), Status::kMismatch);
  EXPECT_EQ(text(),
            "MISMATCH: op 0: one rank of this node called consistent sum f32, 2016 elements, tag "
            "0000000000000007; another one exact sum f32, 10 elements, tag 0000000000000007");
}

TEST_F(Ends, TwoNodesThatDisagree) {
  net->lost = nullptr;
  call(0, 0);
  call(1, 0, OpClass::kConsistent, kCount - 1);
  call(2, 0);
  net->run(100'000);
  for (uint32_t node = 0; node < 3; ++node) {
    EXPECT_EQ(net->lanes[node]->failure(), Status::kMismatch) << text(node);
    EXPECT_EQ(text(node).rfind("MISMATCH: ", 0), 0U) << text(node);
  }
  EXPECT_NE(text(1).find("2015 elements"), std::string::npos) << text(1);
  EXPECT_NE(text(1).find("2016 elements"), std::string::npos) << text(1);
}

// --- submits ---

TEST_F(Packets, SubmitsMustFit) {
  Call<float> good(0, Floats(10, 1), OpClass::kExact);
  const auto with = [&](auto change) {
    Submission s = good.submission;
    change(s);
    return net->lanes[0]->submit(net->now, s);
  };
  EXPECT_EQ(with([](Submission& s) { s.local_rank = 1; }), Status::kInvalid);
  EXPECT_EQ(with([](Submission& s) { s.op_seq = 1; }), Status::kInvalid);
  EXPECT_EQ(with([](Submission& s) { s.op_class = static_cast<OpClass>(3); }), Status::kInvalid);
  EXPECT_EQ(with([](Submission& s) { s.type = static_cast<ElementType>(7); }), Status::kInvalid);
  EXPECT_EQ(with([](Submission& s) {
              s.type = ElementType::kI32;
              s.kind = ReduceKind::kMean;
            }),
            Status::kInvalid);
  EXPECT_EQ(with([](Submission& s) { s.count = 1 << 20; }), Status::kNoMemory);
  EXPECT_EQ(with([](Submission&) {}), Status::kOk);
  // 256 may wait for admission.
  for (uint32_t seq = 1; seq < 300; ++seq) {
    const Status status = with([&](Submission& s) { s.op_seq = seq; });
    EXPECT_EQ(status, seq < 256 + 32 ? Status::kOk : Status::kInvalid) << seq;
    if (status != Status::kOk) break;
  }
}

TEST(Traces, TellWhatAnOpWentThrough) {
  LaneNet net(small_settings({0, 1}));
  Call<float> a(0, Floats(kCount, 1), OpClass::kConsistent), b(0, Floats(kCount, 1), OpClass::kConsistent);
  ASSERT_EQ(net.submit(0, a), Status::kOk);
  ASSERT_EQ(net.submit(1, b), Status::kOk);
  net.run(300'000);
  EXPECT_TRUE(net.lanes[0]->met());
  EXPECT_GT(net.lanes[0]->peer(1).rtt, 0);
  Trace trace;
  ASSERT_TRUE(net.lanes[0]->poll_trace(&trace));
  EXPECT_EQ(trace.status, Status::kOk);
  EXPECT_EQ(trace.bytes, kCount * sizeof(float));
  EXPECT_LE(trace.submitted, trace.admitted);
  EXPECT_LE(trace.first_push, trace.push_sent);
  EXPECT_LE(trace.closed, trace.result);
  EXPECT_FALSE(net.lanes[0]->poll_trace(&trace));
  EXPECT_TRUE(net.lanes[0]->drained());
}

}  // namespace
}  // namespace sluice::exchange
