// Whole daemons with carry-over on: contributions that come too late wait in their slots, travel with a later op, are
// taken back, or go with their rank, whose memory nobody touches afterwards.
#include <atomic>
#include <thread>

#include "lib/client/sluice.h"
#include "tests/unit/daemon_support.h"

namespace sluice::daemon::test {
namespace {

constexpr uint64_t kTag = 7;
constexpr uint32_t kCount = 8000;  // blocks on every node, also with the datagrams of loopback
constexpr uint32_t kHalves = 20'000;
constexpr uint64_t kSlot = 1 << 16;
const std::vector<std::string> kSettings = {"exchange.carry_over=true", "exchange.deadline=200ms",
                                            "exchange.linger=100ms"};

using Clients = std::vector<std::unique_ptr<RawClient>>;

// What rank r gives in op k: small integers, so that every order of summation is exact.
float value(uint32_t rank, uint32_t op, uint32_t i) {
  return static_cast<float>((i + 1) % 13 + 100 * (rank + 1) + 1000 * op);
}

// Each op has slots of its own: a contribution may stay the daemon's for longer than its op.
ipc::Descriptor call(uint32_t op, float scale = 1) {
  ipc::Descriptor d = descriptor(op, kCount);
  d.tag = kTag;
  d.op_class = static_cast<uint8_t>(OpClass::kConsistent);
  d.contribution = kSlot * op;
  d.result = (1 << 19) + kSlot * op;
  d.loss_scale = scale;
  return d;
}

void submit(RawClient* client, uint32_t rank, uint32_t op, float scale = 1) {
  auto* slot = reinterpret_cast<float*>(client->arena() + kSlot * op);
  for (uint32_t i = 0; i < kCount; ++i) slot[i] = value(rank, op, i) * scale;
  client->submit(call(op, scale));
}

const float* result(const RawClient& client, uint32_t op) {
  return reinterpret_cast<const float*>(client.arena() + (1 << 19) + kSlot * op);
}

// Completions of one op until `events` have come; the last one.
ipc::Completion wait_for(RawClient* client, uint32_t op, uint8_t events) {
  uint8_t seen = 0;
  ipc::Completion completion;
  while ((seen & events) != events) {
    if (!client->completion(&completion)) {
      ADD_FAILURE() << "op " << op << ": no completion";
      break;
    }
    if (completion.op_seq == op) seen |= completion.events;
  }
  return completion;
}

// The first ranks do op 0 without the others, which come when all is over: theirs are queued.
void leave_behind(Clients* clients, uint32_t in_time) {
  for (uint32_t rank = 0; rank < in_time; ++rank) submit((*clients)[rank].get(), rank, 0);
  for (uint32_t rank = 0; rank < in_time; ++rank)
    wait_for((*clients)[rank].get(), 0, kEventResult | kEventResolved);
  for (uint32_t rank = in_time; rank < clients->size(); ++rank) {
    submit((*clients)[rank].get(), rank, 0);
    const ipc::Completion completion = wait_for((*clients)[rank].get(), 0, kEventResult);
    EXPECT_EQ(completion.events, kEventResult) << "the contribution stays the daemon's";
    EXPECT_EQ(completion.status, static_cast<uint8_t>(Status::kOk));
  }
}

TEST(Carry, ALateContributionTravelsWithTheNextOp) {
  Nodes nodes(3, kSettings);
  Clients clients = join_all(nodes, "late", {0, 1, 2});
  leave_behind(&clients, 2);
  for (uint32_t i = 0; i < kCount; ++i)
    ASSERT_EQ(result(*clients[2], 0)[i], value(0, 0, i) + value(1, 0, i)) << i;
  for (uint32_t rank = 0; rank < 3; ++rank) submit(clients[rank].get(), rank, 1);
  bool early = false;
  for (uint8_t seen = 0; (seen & kEventResolved) == 0;) {  // of op 1, on the late rank
    ipc::Completion completion;
    ASSERT_TRUE(clients[2]->completion(&completion));
    early |= completion.op_seq == 0 && completion.events == kEventResolved;
    if (completion.op_seq == 1) seen |= completion.events;
  }
  if (!early) wait_for(clients[2].get(), 0, kEventResolved);
  for (uint32_t rank = 0; rank < 2; ++rank) wait_for(clients[rank].get(), 1, kEventResult | kEventResolved);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    for (uint32_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(result(*clients[rank], 1)[i],
                value(0, 1, i) + value(1, 1, i) + value(2, 1, i) + value(2, 0, i))
          << "rank " << rank << " element " << i;
    }
  }
}

TEST(Carry, IsTakenBackUnscaled) {
  Nodes nodes(3, kSettings);
  Clients clients = join_all(nodes, "take", {0, 1, 2});
  for (uint32_t rank = 0; rank < 2; ++rank) submit(clients[rank].get(), rank, 0, 8);
  for (uint32_t rank = 0; rank < 2; ++rank) wait_for(clients[rank].get(), 0, kEventResult | kEventResolved);
  submit(clients[2].get(), 2, 0, 8);
  wait_for(clients[2].get(), 0, kEventResult);
  ipc::Descriptor take = call(0);
  take.request = static_cast<uint32_t>(ipc::Request::kTakeCarry);
  take.op_seq = 77;
  take.cookie = 78;
  take.deadline_us = 5'000'000;
  clients[2]->submit(take);
  ipc::Completion completion;
  ASSERT_TRUE(clients[2]->completion(&completion));
  EXPECT_TRUE(completion.op_seq == 0 && completion.events == kEventResolved) << "first the slot comes back";
  ASSERT_TRUE(clients[2]->completion(&completion));
  EXPECT_EQ(completion.events, ipc::kEventCarry);
  EXPECT_TRUE(completion.op_seq == 77 && completion.cookie == 78);
  EXPECT_EQ(completion.status, static_cast<uint8_t>(Status::kOk));
  for (uint32_t i = 0; i < kCount; ++i) ASSERT_EQ(result(*clients[2], 0)[i], value(2, 0, i)) << i;
  // Nothing is left of it: a second take gives zeros, and so does one of a tag that never was.
  for (const uint64_t tag : {kTag, kTag + 1}) {
    take.tag = tag;
    clients[2]->submit(take);
    ASSERT_TRUE(clients[2]->completion(&completion));
    for (uint32_t i = 0; i < kCount; ++i) ASSERT_EQ(result(*clients[2], 0)[i], 0.0F) << i;
  }
}

TEST(Carry, ATakeThatCannotBeEndsByItsDeadline) {
  Nodes nodes(2, kSettings);
  Clients clients = join_all(nodes, "patience", {0, 1});
  submit(clients[0].get(), 0, 0);  // rank 1 does not come
  ipc::Descriptor take = call(1);
  take.request = static_cast<uint32_t>(ipc::Request::kTakeCarry);
  take.deadline_us = 50'000;
  clients[0]->submit(take);
  for (ipc::Completion completion;;) {
    ASSERT_TRUE(clients[0]->completion(&completion, 3));
    if (completion.events != ipc::kEventCarry) continue;
    EXPECT_EQ(completion.status, static_cast<uint8_t>(Status::kOpTimeout));
    break;
  }
}

TEST(Carry, OfARankThatLeftIsNeverRead) {
  Nodes nodes(3, kSettings);
  Clients clients = join_all(nodes, "left", {0, 1, 2, 2});
  leave_behind(&clients, 2);
  ASSERT_TRUE(clients[2]->say(ipc::MessageType::kLeave).ok());
  ASSERT_TRUE(clients[2]->receive(5'000).ok());
  // Its regions are unmapped: whoever read its slot now would end this process.
  ASSERT_TRUE(eventually([&] { return nodes[2].control_stats().arena_bytes == 1 << 20; }));
  clients[2]->die();
  for (uint32_t rank = 0; rank < 2; ++rank) submit(clients[rank].get(), rank, 1);
  wait_for(clients[0].get(), 1, kEventResult);
  uint32_t without = 0;
  for (uint32_t i = 0; i < kCount; ++i) {
    const float both = value(0, 1, i) + value(1, 1, i), sum = result(*clients[0], 1)[i];
    without += sum == both ? 1 : 0;  // where the owner closed before what rank 3 owes had come
    ASSERT_TRUE(sum == both || sum == both + value(3, 0, i)) << i << ": " << sum;
  }
  EXPECT_LT(without, kCount) << "rank 3 stayed, and what it owes travelled without a submit";
  const auto jobs = nodes.ask(2, {{"request", "jobs"}})["jobs"];
  ASSERT_EQ(jobs.size(), 1U);
  EXPECT_TRUE(eventually([&] {
    return nodes.ask(2, {{"request", "jobs"}})["jobs"][0].value("blocks_undecided", 0) == 4;
  })) << nodes.ask(2, {{"request", "jobs"}}).dump();
}

TEST(Carry, OfARankThatDiedGoesWithItsJob) {
  Nodes nodes(3, kSettings);
  Clients clients = join_all(nodes, "died", {0, 1, 2, 2});
  leave_behind(&clients, 2);
  clients[2]->die();
  submit(clients[0].get(), 0, 1);
  const ipc::Completion completion = wait_for(clients[0].get(), 1, kEventResult | kEventResolved);
  EXPECT_TRUE(is_error(static_cast<Status>(completion.status))) << clients[0]->report(1);
  const ipc::Completion resolved = wait_for(clients[3].get(), 0, kEventResolved);
  EXPECT_EQ(resolved.status, static_cast<uint8_t>(Status::kPeerLost)) << "its slot comes back all the same";
  clients.clear();
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(eventually([&] {
      return nodes[i].control_stats().jobs.empty() && nodes[i].control_stats().arena_bytes == 0;
    })) << i;
  }
}

TEST(Carry, LeavingWithOpenCallsEndsTheJob) {
  Nodes nodes(2, kSettings);
  Clients clients = join_all(nodes, "rude", {0, 0, 1});
  for (const size_t rank : {size_t{0}, size_t{1}}) {  // rank 2 does not come, so the op stays open
    ipc::Descriptor d = call(0);
    d.op_class = static_cast<uint8_t>(OpClass::kExact);
    clients[rank]->submit(d);
  }
  ASSERT_TRUE(clients[0]->say(ipc::MessageType::kLeave).ok());
  const ipc::Completion completion = wait_for(clients[1].get(), 0, kEventResult | kEventResolved);
  EXPECT_EQ(completion.status, static_cast<uint8_t>(Status::kPeerLost)) << clients[1]->report(0);
}

// --- Over libsluice ---------------------------------------------------------------------------------------------------

void must(int code, const char* what) {
  EXPECT_EQ(code, SLUICE_SUCCESS) << what << ": " << sluice_last_error();
}

// One op of f16 integers on every rank, to which the last rank comes when the others are through; then body(rank, job, op).
template <typename Body>
void with_a_late_rank(const char* name, Body body) {
  Nodes nodes(3, kSettings);
  sluice_context* contexts[3] = {};
  sluice_card cards[3];
  unsigned char key[32];
  must(sluice_key_generate(key), "key");
  for (uint32_t r = 0; r < 3; ++r) {
    must(sluice_open(nodes.socket(r).c_str(), 2000, &contexts[r]), "open");
    must(sluice_card_get(contexts[r], name, r, 3, 2000, &cards[r]), "card");
  }
  std::vector<std::thread> threads;
  std::atomic<int> through{0};
  for (uint32_t r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      sluice_join_options options{};
      options.size = sizeof options;
      options.job = name;
      options.rank = r;
      options.world_size = 3;
      options.max_op_bytes =
          1 << 16;  // less than the accumulators of 20,000 halves: flush makes its sum in parts
      options.arena_bytes = 1 << 20;
      options.timeout_ms = 15'000;
      options.cards = cards;
      options.key = key;
      sluice_job* job = nullptr;
      must(sluice_join(contexts[r], &options, &job), "join");
      if (job == nullptr) return;
      sluice_job_info info{};
      info.size = sizeof info;
      must(sluice_job_get_info(job, &info), "info");
      EXPECT_EQ(info.carry_over, 1U);
      auto* in = static_cast<uint16_t*>(sluice_alloc(job, 2 * kHalves));
      auto* out = static_cast<uint16_t*>(sluice_alloc(job, 2 * kHalves));
      for (uint32_t i = 0; i < kHalves; ++i) in[i] = 0x4400;  // 4.0
      sluice_op_options call{};
      call.size = sizeof call;
      call.op_class = SLUICE_CONSISTENT;
      call.tag = kTag;
      call.loss_scale = 2;
      if (r == 2) {
        EXPECT_TRUE(eventually([&] { return through == 2; }));
      }
      sluice_op op = 0;
      sluice_report report{};
      report.size = sizeof report;
      must(sluice_allreduce(job, in, out, kHalves, SLUICE_F16, SLUICE_SUM, &call, &op), "allreduce");
      must(sluice_wait_result(job, op, 10'000, &report), "wait_result");
      EXPECT_EQ(report.status, SLUICE_OK) << report.text;
      if (r < 2) {
        if ((report.events & SLUICE_EVENT_RESOLVED) == 0) must(sluice_wait(job, op, 10'000, nullptr), "wait");
        ++through;
      } else {
        EXPECT_EQ(report.events, SLUICE_EVENT_RESULT) << "its contribution waits";
      }
      body(r, job, op);
      must(sluice_barrier(job, 10'000), "barrier");  // nobody goes while another one still needs him
      must(sluice_leave(job, 5000), "leave");
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (sluice_context* context : contexts) sluice_close(context);
  EXPECT_EQ(nodes[0].control_stats().jobs_failed, 0U);
}

TEST(CarryOverLibsluice, FlushIsEqualOnAllRanksAndLeavesNothing) {
  with_a_late_rank("flush", [](uint32_t rank, sluice_job* job, sluice_op op) {
    std::vector<float> owed(kHalves, -1);
    must(sluice_flush(job, kTag, SLUICE_SUM, SLUICE_F16, kHalves, owed.data(), 10'000), "flush");
    for (uint32_t i = 0; i < kHalves; ++i) ASSERT_EQ(owed[i], 2.0F) << "4.0 at loss scale 2, from one rank";
    if (rank == 2) must(sluice_wait(job, op, 0, nullptr), "its slot came back");
    must(sluice_flush(job, kTag, SLUICE_SUM, SLUICE_F16, kHalves, owed.data(), 10'000), "flush");
    for (uint32_t i = 0; i < kHalves; ++i) ASSERT_EQ(owed[i], 0.0F) << "once";
    must(sluice_tag_retire(job, kTag, SLUICE_SUM, SLUICE_F16, kHalves, owed.data(), 10'000), "retire");
    EXPECT_EQ(sluice_flush(job, kTag, SLUICE_SUM, SLUICE_F16, 1 << 22, owed.data(), 0),
              SLUICE_ERROR_NO_MEMORY);
    EXPECT_EQ(sluice_flush(job, kTag, SLUICE_SUM, SLUICE_F16, kHalves, nullptr, 0), SLUICE_ERROR_INVALID);
    EXPECT_EQ(sluice_tag_retire(job, kTag, SLUICE_MEAN, SLUICE_I32, kHalves, nullptr, 0),
              SLUICE_ERROR_INVALID);
  });
}

TEST(CarryOverLibsluice, RetiringIsLocal) {
  with_a_late_rank("retire", [](uint32_t rank, sluice_job* job, sluice_op op) {
    if (rank != 2) return;
    std::vector<float> owed(kHalves, -1);
    must(sluice_tag_retire(job, kTag, SLUICE_SUM, SLUICE_F16, kHalves, owed.data(), 10'000), "retire");
    for (uint32_t i = 0; i < kHalves; ++i) ASSERT_EQ(owed[i], 2.0F);
    must(sluice_wait(job, op, 0, nullptr), "its slot came back");
    // Its result had no hole, so nothing waits for a later one.
    must(sluice_take_correction(job, kTag, SLUICE_SUM, SLUICE_F16, kHalves, owed.data(), 10'000), "take");
    for (uint32_t i = 0; i < kHalves; ++i) ASSERT_EQ(owed[i], 0.0F);
    EXPECT_EQ(sluice_take_correction(job, kTag, SLUICE_SUM, SLUICE_F16, kHalves, nullptr, 0),
              SLUICE_ERROR_INVALID);
    sluice_job_info info{};
    info.size = sizeof info;
    must(sluice_job_get_info(job, &info), "info");
    EXPECT_EQ(info.corrects, 0U);
    EXPECT_EQ(info.carry_over, 1U);
    EXPECT_STRNE(info.node_name, "");
    EXPECT_EQ(std::string(info.node_address).rfind("127.0.0.1:", 0), 0U);
  });
}

TEST(CarryOverLibsluice, LeavingDropsWhatWaits) {
  const Micros start = monotonic_micros();
  with_a_late_rank("leave", [](uint32_t, sluice_job*, sluice_op) {});
  EXPECT_LT(monotonic_micros() - start, 15'000'000);
}

// --- Deadlines that adapt ---------------------------------------------------------------------------------------------

TEST(DeadlineAuto, IsFoundAndShown) {
  Nodes nodes(2, {"exchange.deadline=auto", "exchange.warmup_ops=5", "exchange.hard_deadline_max=700ms"});
  Clients clients = join_all(nodes, "auto", {0, 1});
  const auto job = [&] { return nodes.ask(0, {{"request", "jobs"}})["jobs"][0]; };
  EXPECT_TRUE(job().value("deadline_adapts", false));
  EXPECT_EQ(job().value("deadline_us", 0), 700'000);
  EXPECT_TRUE(eventually([&] { return job().value("policy", 9U) == 0; })) << job().dump();
  // A pulse after 50 ops makes a record, which is in force 128 ops later.
  for (uint32_t op = 0; op < 260; ++op) {
    for (auto& client : clients) {
      ipc::Descriptor d = descriptor(op, 16);
      d.op_class = static_cast<uint8_t>(OpClass::kConsistent);
      client->submit(d);
    }
    for (auto& client : clients) {
      ASSERT_EQ(wait_for(client.get(), op, kEventResult | kEventResolved).status,
                static_cast<uint8_t>(Status::kOk));
    }
  }
  EXPECT_TRUE(eventually([&] { return job().value("policy", 0U) > 0; })) << job().dump();
  const auto deadlines = job()["deadlines"];
  ASSERT_EQ(deadlines.size(), 1U) << deadlines.dump();
  EXPECT_EQ(deadlines[0].value("bytes", 0), 4096);
  EXPECT_GE(deadlines[0].value("hard_us", 0), 10'000);
  EXPECT_LE(deadlines[0].value("hard_us", 0), 700'000);
  EXPECT_GE(deadlines[0].value("samples", 0), 5);
}

// Under heavy loss and a short bound: what is there is the sum, what is not is filled, and all of it is counted.
TEST(BestEffort, HolesAreFilledByRule) {
  for (const bool own : {true, false}) {
    Nodes nodes(2, {"exchange.deadline=5ms", own ? "exchange.fill=own" : "exchange.fill=zero",
                    "transport.faults.i_know=true", "transport.faults.loss=0.2"});
    Clients clients = join_all(nodes, "fill", {0, 1});
    constexpr uint32_t kMany = 60'000;
    uint64_t filled = 0;
    for (uint32_t op = 0; op < 20; ++op) {
      for (uint32_t rank = 0; rank < 2; ++rank) {
        ipc::Descriptor d = descriptor(op, kMany);
        d.op_class = static_cast<uint8_t>(OpClass::kBestEffort);
        auto* slot = reinterpret_cast<float*>(clients[rank]->arena());
        for (uint32_t i = 0; i < kMany; ++i) slot[i] = value(rank, op, i);
        clients[rank]->submit(d);
      }
      for (uint32_t rank = 0; rank < 2; ++rank) {
        const ipc::Completion completion = wait_for(clients[rank].get(), op, kEventResult | kEventResolved);
        const auto status = static_cast<Status>(completion.status);
        ASSERT_TRUE(status == Status::kOk || status == Status::kApproximated) << status_name(status);
        EXPECT_EQ(completion.blocks_filled, completion.blocks_expected - completion.blocks_received);
        EXPECT_EQ(completion.blocks_filled > 0, status == Status::kApproximated);
        filled += completion.blocks_filled;
        const auto* sum = reinterpret_cast<const float*>(clients[rank]->arena() + (1 << 19));
        for (uint32_t i = 0; i < kMany; ++i) {
          const float a = value(0, op, i), b = value(1, op, i);
          const float hole = own ? 2 * (rank == 0 ? a : b) : 0;
          const bool skipped = sum[i] == 0 && completion.blocks_skipped > 0;  // nobody's came by the bound
          ASSERT_TRUE(sum[i] == a + b || sum[i] == a || sum[i] == b || sum[i] == hole || skipped)
              << "op " << op << " element " << i << ": " << sum[i];
        }
      }
    }
    EXPECT_GT(filled, 0U) << "20 % loss and 5 ms: some blocks cannot come in time";
    EXPECT_EQ(nodes.ask(0, {{"request", "jobs"}})["jobs"][0].value("failed", true), false);
  }
}

}  // namespace
}  // namespace sluice::daemon::test
