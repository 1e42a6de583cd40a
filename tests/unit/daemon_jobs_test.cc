// Whole daemons in one process: jobs come to be, carry exact sums over libsluice, and end in every way they can.
#include "lib/client/sluice.h"
#include "tests/unit/daemon_support.h"

namespace sluice::daemon::test {
namespace {

using namespace std::chrono_literals;

// One rank over the C interface, in a thread of its own.
struct Rank {
  std::string socket;
  uint32_t rank = 0, world = 0;
  std::string error;  // of the first call that failed

  bool check(int code, const char* what) {
    if (code == SLUICE_SUCCESS) return true;
    if (error.empty()) error = std::string(what) + ": " + sluice_last_error();
    return false;
  }
};

// Runs `body(rank, job)` for each rank with a joined job.
template <typename Body>
void run_ranks(Nodes& nodes, const std::string& name, const std::vector<uint32_t>& node_of_rank, Body body,
               bool with_cards = true) {
  const auto world = static_cast<uint32_t>(node_of_rank.size());
  std::vector<Rank> ranks(world);
  std::vector<sluice_context*> contexts(world, nullptr);
  std::vector<sluice_card> cards(world);
  unsigned char key[32];
  ASSERT_EQ(sluice_key_generate(key), SLUICE_SUCCESS);
  for (uint32_t r = 0; r < world; ++r) {
    ranks[r] = {nodes.socket(node_of_rank[r]), r, world, ""};
    ASSERT_TRUE(ranks[r].check(sluice_open(ranks[r].socket.c_str(), 2000, &contexts[r]), "open"))
        << ranks[r].error;
    if (!with_cards) continue;
    ASSERT_TRUE(ranks[r].check(sluice_card_get(contexts[r], name.c_str(), r, world, 2000, &cards[r]), "card"))
        << ranks[r].error;
  }
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      Rank& rank = ranks[r];
      sluice_join_options options{};
      options.size = sizeof options;
      options.job = name.c_str();
      options.rank = r;
      options.world_size = world;
      options.max_op_bytes = 8 << 20;
      options.arena_bytes = 17 << 20;
      options.timeout_ms = 15'000;
      options.cards = with_cards ? cards.data() : nullptr;
      options.key = with_cards ? key : nullptr;
      sluice_job* job = nullptr;
      if (!rank.check(sluice_join(contexts[r], &options, &job), "join")) return;
      body(&rank, job);
      rank.check(sluice_leave(job, 5000), "leave");
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint32_t r = 0; r < world; ++r) {
    EXPECT_EQ(ranks[r].error, "") << "rank " << r;
    sluice_close(contexts[r]);
  }
}

// Sums of small integers are exact in every type: the oracle.
template <typename T>
void sum_exactly(Rank* rank, sluice_job* job, uint64_t count, sluice_type type) {
  auto* in = static_cast<T*>(sluice_alloc(job, std::max<uint64_t>(count, 1) * sizeof(T)));
  auto* out = static_cast<T*>(sluice_alloc(job, std::max<uint64_t>(count, 1) * sizeof(T)));
  ASSERT_TRUE(in != nullptr && out != nullptr) << sluice_last_error();
  const auto value = [](uint64_t i, uint32_t r) {
    return static_cast<int64_t>((i * 2654435761U + r * 40503U) % 97);
  };
  for (uint64_t i = 0; i < count; ++i) in[i] = static_cast<T>(value(i, rank->rank));
  sluice_op op = 0;
  sluice_report report{};
  report.size = sizeof report;
  if (!rank->check(sluice_allreduce(job, in, out, count, type, SLUICE_SUM, nullptr, &op), "allreduce"))
    return;
  if (!rank->check(sluice_wait(job, op, 20'000, &report), "wait")) return;
  EXPECT_EQ(report.status, SLUICE_OK) << report.text;
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < count; ++i) {
    int64_t sum = 0;
    for (uint32_t r = 0; r < rank->world; ++r) sum += value(i, r);
    wrong += out[i] == static_cast<T>(sum) ? 0 : 1;
  }
  EXPECT_EQ(wrong, 0U) << "of " << count;
  sluice_free(job, in);
  sluice_free(job, out);
}

void sums(Rank* rank, sluice_job* job) {
  sluice_job_info info{};
  info.size = sizeof info;
  sluice_job_get_info(job, &info);
  const uint64_t block = (info.payload_bytes - 64) / sizeof(float);
  for (const uint64_t count : {uint64_t{0}, uint64_t{1}, block - 1, block, block + 1, uint64_t{1'000'007}}) {
    sum_exactly<float>(rank, job, count, SLUICE_F32);
    sum_exactly<int32_t>(rank, job, count, SLUICE_I32);
  }
}

TEST(Jobs, TwoDaemonsSumExactly) {
  Nodes nodes(2);
  run_ranks(nodes, "sum", {0, 1}, sums);
}

TEST(Jobs, OneNodeAlone) {
  Nodes nodes(1);
  run_ranks(nodes, "alone", {0}, sums);
}

TEST(Jobs, TwoRanksOnEachOfTwoNodes) {
  Nodes nodes(2);
  run_ranks(nodes, "four", {0, 0, 1, 1}, sums);
}

TEST(Jobs, TwoLanes) {
  // Lane 1 is at the next port, so the port cannot be left to the kernel: take one that is free now.
  const auto free_port = [] {
    Nodes probe(1);
    return probe[0].facts().endpoint.port;
  };
  Nodes nodes(0, {"lanes=2"});
  for (int i = 0; i < 2; ++i) {
    bool started = false;
    for (int tries = 0; tries < 20 && !started; ++tries) {
      const uint16_t port = free_port();
      ASSERT_NE(port, 0);
      if (port < 65'000) started = nodes.try_start({"transport.port=" + std::to_string(port)}).ok();
    }
    ASSERT_TRUE(started);
  }
  run_ranks(nodes, "lanes", {0, 1}, sums);
}

TEST(Jobs, ByPeersOfTheConfiguration) {
  Nodes first(2);  // only to learn two ports that are free
  const std::string a = first[0].facts().endpoint_text, b = first[1].facts().endpoint_text;
  first[0].stop("test");
  first[1].stop("test");
  Nodes nodes(0);
  const std::string key_file = nodes.folder() + "/key";
  FILE* file = fopen(key_file.c_str(), "w");
  fprintf(file, "%064d\n", 7);
  fclose(file);
  ::chmod(key_file.c_str(), 0400);
  const std::string yaml = "security: {key_file: " + key_file +
                           "}\npeers:\n  - jobs: [listed]\n    nodes: [{address: " + a +
                           ", ranks: 2}, {address: " + b + "}]\n";
  nodes.start({"transport.port=" + a.substr(a.rfind(':') + 1)}, yaml);
  nodes.start({"transport.port=" + b.substr(b.rfind(':') + 1)}, yaml);
  run_ranks(nodes, "listed", {0, 0, 1}, sums, false);
  // A second time, while the first job lingers.
  run_ranks(nodes, "listed", {0, 0, 1}, sums, false);

  RawClient stranger("unlisted", 0, 1);
  ASSERT_TRUE(stranger.hello(nodes.socket(0)).ok());
  stranger.send_join(nullptr);
  const auto refused = stranger.finish_join();
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("`peers:` has no entry"), std::string::npos)
      << refused.error().message;
}

TEST(Jobs, OneAfterAnotherAndTwoAtOnce) {
  Nodes nodes(2);
  for (int i = 0; i < 3; ++i)
    run_ranks(nodes, "again", {0, 1},
              [](Rank* r, sluice_job* j) { sum_exactly<float>(r, j, 1000, SLUICE_F32); });
  std::thread other([&] { run_ranks(nodes, "other", {0, 1}, sums); });
  run_ranks(nodes, "again", {0, 1}, sums);
  other.join();
}

// --- Death ------------------------------------------------------------------------------------------------------------

TEST(Death, OfARankEndsItsJobEverywhereAndNoOther) {
  Nodes nodes(2, {"exchange.linger=100ms"});
  auto doomed = join_all(nodes, "doomed", {0, 0, 1});
  auto well = join_all(nodes, "well", {0, 1});
  // Ranks 0 and 2 wait for rank 1, which dies instead.
  doomed[0]->submit(descriptor(0));
  doomed[2]->submit(descriptor(0));
  const Micros died = monotonic_micros();
  doomed[1]->die();
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    ipc::Completion completion;
    ASSERT_TRUE(doomed[rank]->completion(&completion, 5));
    EXPECT_TRUE(is_error(static_cast<Status>(completion.status)));
    EXPECT_EQ(completion.events, kEventResult | kEventResolved);
    const std::string text = doomed[rank]->report(0);
    EXPECT_NE(text.find(rank == 0 ? "rank 1" : "node 0"), std::string::npos) << text;
  }
  EXPECT_LT(monotonic_micros() - died, 500'000) << "a failure that is known is not waited for";

  for (uint32_t op = 0; op < 3; ++op) {
    for (uint32_t i = 0; i < 16; ++i) {
      for (auto& client : well) reinterpret_cast<float*>(client->arena())[i] = static_cast<float>(i + op);
    }
    for (auto& client : well) client->submit(descriptor(op));
    for (auto& client : well) {
      ipc::Completion completion;
      ASSERT_TRUE(client->completion(&completion));
      EXPECT_EQ(completion.status, static_cast<uint8_t>(Status::kOk));
      EXPECT_EQ(reinterpret_cast<float*>(client->arena() + (1 << 19))[3], 2.0F * static_cast<float>(3 + op));
    }
  }
  EXPECT_EQ(nodes[0].control_stats().clients_lost, 1U);
  EXPECT_EQ(nodes[0].control_stats().jobs_failed, 1U);
  EXPECT_EQ(nodes[1].control_stats().jobs_failed, 1U);

  doomed.clear();
  well.clear();
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(eventually([&] {
      return nodes[i].control_stats().jobs.empty() && nodes[i].control_stats().arena_bytes == 0;
    })) << i;
  }
}

TEST(Death, WhileJoiningIsToldToTheOthers) {
  Nodes nodes(1);
  RawClient a("j", 0, 3), b("j", 1, 3), c("j", 2, 3);
  for (RawClient* client : {&a, &b, &c}) ASSERT_TRUE(client->hello(nodes.socket(0)).ok());
  const ipc::View view = view_of({a.node()}, {0, 0, 0}, a.welcome);
  a.send_join(&view);
  b.send_join(&view);
  ASSERT_TRUE(eventually([&] { return nodes[0].control_stats().arena_bytes == 2 << 20; }));
  b.die();
  const auto refused = a.finish_join();
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("rank 1"), std::string::npos) << refused.error().message;
  EXPECT_NE(refused.error().message.find("while joining"), std::string::npos) << refused.error().message;
  EXPECT_FALSE(c.receive(5'000).ok());
  EXPECT_TRUE(eventually(
      [&] { return nodes[0].control_stats().jobs.empty() && nodes[0].control_stats().clients == 0; }));
}

TEST(Death, OfManyClientsLeavesNothingBehind) {
  Nodes nodes(1, {"exchange.linger=0"});
  const auto fds = [] {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
    return count;
  };
  join_all(nodes, "warm-up", {0}).clear();
  ASSERT_TRUE(eventually([&] { return nodes[0].control_stats().jobs.empty(); }));
  const size_t before = fds();
  for (int i = 0; i < 50; ++i) {
    auto clients = join_all(nodes, "j" + std::to_string(i), {0, 0});
    clients[0]->submit(descriptor(0));
    clients.clear();
  }
  EXPECT_TRUE(eventually(
      [&] { return nodes[0].control_stats().jobs.empty() && nodes[0].control_stats().arena_bytes == 0; }));
  EXPECT_TRUE(eventually([&] { return fds() <= before; })) << fds() << " instead of " << before;
}

TEST(Death, ByABadDescriptorIsExplained) {
  Nodes nodes(2);
  auto clients = join_all(nodes, "bad", {0, 1});
  ipc::Descriptor bad = descriptor(0);
  bad.result = 1 << 30;
  clients[0]->submit(bad);
  const auto& gone = clients[0]->control_page().gone;
  ASSERT_TRUE(eventually([&] { return gone.value.load(std::memory_order_acquire) != 0; }));
  EXPECT_EQ(gone.value.load(), static_cast<uint32_t>(Status::kInvalid));
  EXPECT_NE(std::string(gone.text).find("outside the arena"), std::string::npos) << gone.text;
  EXPECT_TRUE(eventually([&] { return !clients[0]->channel().alive(); }));
  clients[1]->submit(descriptor(0));
  ipc::Completion completion;
  ASSERT_TRUE(clients[1]->completion(&completion));
  EXPECT_TRUE(is_error(static_cast<Status>(completion.status)));
  // The daemon lives on.
  clients.clear();
  join_all(nodes, "good", {0, 1});
}

TEST(Death, AbortReachesEveryRank) {
  Nodes nodes(2);
  auto clients = join_all(nodes, "abort", {0, 0, 1});
  for (auto& client : clients) client->submit(descriptor(0));
  ipc::Completion completion;
  for (auto& client : clients) ASSERT_TRUE(client->completion(&completion));
  clients[1]->submit(descriptor(1));
  clients[2]->submit(descriptor(1));
  ASSERT_TRUE(clients[0]->say(ipc::MessageType::kAbort).ok());
  ASSERT_TRUE(clients[0]->say(ipc::MessageType::kAbort).ok());  // again, in vain
  for (const size_t rank : {size_t{1}, size_t{2}}) {
    ASSERT_TRUE(clients[rank]->completion(&completion));
    EXPECT_EQ(completion.status, static_cast<uint8_t>(Status::kAborted)) << clients[rank]->report(1);
  }
  EXPECT_NE(clients[1]->report(1).find("rank 0"), std::string::npos) << clients[1]->report(1);
}

TEST(Death, OfTheDaemonByOrderSaysGoodbye) {
  Nodes nodes(2);
  auto clients = join_all(nodes, "bye", {0, 1});
  clients[1]->submit(descriptor(0));
  const Micros start = monotonic_micros();
  nodes[0].stop("a test");
  EXPECT_LT(monotonic_micros() - start, 3'000'000);
  auto bye = clients[0]->channel().receive(1'000);
  ASSERT_TRUE(bye.ok()) << bye.error().message;
  EXPECT_EQ(bye->message.type, static_cast<uint32_t>(ipc::MessageType::kBye));
  EXPECT_NE(std::string(bye->message.text).find("n0 is stopping: a test"), std::string::npos)
      << bye->message.text;
  ipc::Completion completion;
  ASSERT_TRUE(clients[1]->completion(&completion, 5));
  EXPECT_EQ(completion.status, static_cast<uint8_t>(Status::kAborted));
  EXPECT_NE(clients[1]->report(0).find("DAEMON_LOST"), std::string::npos) << clients[1]->report(0);
  EXPECT_NE(clients[1]->report(0).find("node 0"), std::string::npos) << clients[1]->report(0);
  EXPECT_FALSE(std::filesystem::exists(nodes.socket(0)));
}

}  // namespace
}  // namespace sluice::daemon::test
