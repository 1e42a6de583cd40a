// What a daemon refuses, and that it says why: joins, configurations, reloads.
#include <sys/stat.h>

#include "daemon/control/settings.h"
#include "tests/unit/daemon_support.h"

namespace sluice::daemon::test {
namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The text with which a JOIN of one rank alone is refused after `change` was made to client and view.
template <typename Change>
std::string refusal(Nodes& nodes, Change change) {
  RawClient client("j", 0, 1);
  const auto greeted = client.hello(nodes.socket(0));
  if (!greeted.ok()) return greeted.error().message;
  ipc::View view = view_of({client.node()}, {0}, client.welcome);
  uint64_t arena = 1 << 20;
  change(&client, &view, &arena);
  client.send_join(&view, arena);
  const auto joined = client.finish_join();
  return joined.ok() ? "joined" : joined.error().message;
}

TEST(Refusals, OfJoinsThatDoNotFit) {
  Nodes nodes(
      1, {"memory.arena_max=4MiB", "memory.arena_total=6MiB", "memory.op_max=1MiB", "exchange.linger=0"});
  EXPECT_EQ(refusal(nodes, [](RawClient*, ipc::View*, uint64_t*) {}), "joined");
  EXPECT_TRUE(has(refusal(nodes, [](RawClient* c, ipc::View*, uint64_t*) { c->welcome.join_nonce[0] ^= 1; }),
                  "join nonce"));
  EXPECT_TRUE(has(refusal(nodes, [](RawClient*, ipc::View* v, uint64_t*) { v->nodes[0].join_nonce[0] ^= 1; }),
                  "of another join"));
  EXPECT_TRUE(
      has(refusal(nodes, [](RawClient*, ipc::View* v, uint64_t*) { v->nodes[0].endpoint = "127.0.0.1:1"; }),
          "the view has this node at 127.0.0.1:1, it is at 127.0.0.1:"));
  EXPECT_TRUE(
      has(refusal(nodes, [](RawClient*, ipc::View* v, uint64_t*) { v->nodes[0].endpoint = "nowhere"; }),
          "'nowhere'"));
  EXPECT_TRUE(
      has(refusal(nodes, [](RawClient*, ipc::View* v, uint64_t*) { v->lanes = 4; }), "4 lanes, this node 1"));
  EXPECT_TRUE(has(refusal(nodes,
                          [](RawClient*, ipc::View* v, uint64_t*) {
                            v->node_of_rank = {0, 0};
                          }),
                  "the view has 2 ranks"));
  EXPECT_TRUE(
      has(refusal(nodes, [](RawClient*, ipc::View*, uint64_t* a) { *a = 5 << 20; }), "memory.arena_max"));
  EXPECT_TRUE(has(refusal(nodes, [](RawClient*, ipc::View*, uint64_t* a) { *a = 0; }), "memory.arena_max"));
  EXPECT_TRUE(has(refusal(nodes, [](RawClient* c, ipc::View*, uint64_t*) { c->max_op_bytes = 2 << 20; }),
                  "memory.op_max"));
  {
    RawClient holder("holder", 0, 1);
    ASSERT_TRUE(holder.hello(nodes.socket(0)).ok());
    const ipc::View view = view_of({holder.node()}, {0}, holder.welcome);
    holder.send_join(&view, 4 << 20);
    ASSERT_TRUE(holder.finish_join().ok());
    EXPECT_TRUE(
        has(refusal(nodes, [](RawClient*, ipc::View*, uint64_t* a) { *a = 4 << 20; }), "memory.arena_total"));
    RawClient second("holder", 0, 1);
    const auto refused = second.hello(nodes.socket(0));
    ASSERT_FALSE(refused.ok());
    EXPECT_TRUE(has(refused.error().message, "job 'holder' is running here with rank 0 (pid"))
        << refused.error().message;
  }
  EXPECT_EQ(refusal(nodes, [](RawClient*, ipc::View*, uint64_t*) {}), "joined");
}

TEST(Refusals, OfAPoolThatIsTooSmallNameTheSum) {
  Nodes nodes(1, {"memory.job_pool=1MiB"});
  const std::string text =
      refusal(nodes, [](RawClient* c, ipc::View*, uint64_t*) { c->max_op_bytes = 1ULL << 30; });
  EXPECT_TRUE(has(text, "ops of 1GiB need a pool of ") && has(text, "memory.job_pool is 1MiB")) << text;
}

TEST(Refusals, OfRanksThatDoNotAgree) {
  Nodes nodes(1);
  const auto second = [&](auto change) {
    RawClient a("pair", 0, 2), b("pair", 1, 2);
    EXPECT_TRUE(a.hello(nodes.socket(0)).ok() && b.hello(nodes.socket(0)).ok());
    const ipc::View view = view_of({a.node()}, {0, 0}, a.welcome);
    EXPECT_EQ(std::memcmp(a.welcome.join_nonce, b.welcome.join_nonce, 16), 0)
        << "ranks of a node share the join";
    a.send_join(&view);
    EXPECT_TRUE(eventually([&] { return nodes[0].control_stats().arena_bytes == 1 << 20; }));
    ipc::View other = view;
    change(&b, &other);
    b.send_join(&other);
    const auto joined = b.finish_join();
    return joined.ok() ? "joined" : joined.error().message;
  };
  EXPECT_EQ(second([](RawClient*, ipc::View*) {}), "joined");
  EXPECT_TRUE(has(second([](RawClient* c, ipc::View*) { c->key_byte = 8; }), "another view or key"));
  EXPECT_TRUE(
      has(second([](RawClient*, ipc::View* v) { v->generation = 1; }), "the card is for generation 0"));
  EXPECT_TRUE(has(second([](RawClient* c, ipc::View*) { c->max_op_bytes = 1 << 17; }),
                  "max_op_bytes or deadline differ"));
}

TEST(Refusals, OfTheSameRankTwice) {
  Nodes nodes(1);
  RawClient a("twice", 0, 2), b("twice", 0, 2);
  ASSERT_TRUE(a.hello(nodes.socket(0)).ok() && b.hello(nodes.socket(0)).ok());
  const ipc::View view = view_of({a.node()}, {0, 0}, a.welcome);
  a.send_join(&view);
  ASSERT_TRUE(eventually([&] { return nodes[0].control_stats().arena_bytes == 1 << 20; }));
  b.send_join(&view);
  const auto refused = b.finish_join();
  ASSERT_FALSE(refused.ok());
  EXPECT_TRUE(has(refused.error().message, "rank 0 has joined already (pid ")) << refused.error().message;
}

TEST(Refusals, AfterATimeOutNameWhoIsMissing) {
  Nodes nodes(2);
  {
    RawClient a("late", 0, 2);
    ASSERT_TRUE(a.hello(nodes.socket(0)).ok());
    const ipc::View view = view_of({a.node()}, {0, 0}, a.welcome);
    a.send_join(&view, 1 << 20, 300);
    const auto refused = a.finish_join();
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, static_cast<int>(Status::kTimeout));
    EXPECT_TRUE(has(refused.error().message, "no JOIN on node n0 from rank 1")) << refused.error().message;
  }
  {
    RawClient a("gone", 0, 2), b("gone", 1, 2);
    ASSERT_TRUE(a.hello(nodes.socket(0)).ok() && b.hello(nodes.socket(1)).ok());
    const ipc::View view = view_of({a.node(), b.node()}, {0, 1}, a.welcome);
    a.send_join(&view, 1 << 20, 500);
    const auto refused = a.finish_join();
    ASSERT_FALSE(refused.ok());
    EXPECT_TRUE(has(refused.error().message, "missing " + nodes[1].facts().endpoint_text + " (silent)"))
        << refused.error().message;
  }
  EXPECT_TRUE(eventually([&] { return nodes[0].control_stats().joins_failed == 2; }));
  EXPECT_TRUE(eventually([&] { return nodes[0].control_stats().jobs.empty(); }));
}

// Joins a job of two nodes whose daemons differ; the text of the refusal of rank 0.
std::string two_that_differ(Nodes& nodes, uint8_t other_key = 7) {
  RawClient a("differ", 0, 2), b("differ", 1, 2);
  EXPECT_TRUE(a.hello(nodes.socket(0)).ok() && b.hello(nodes.socket(1)).ok());
  const ipc::View view = view_of({a.node(), b.node()}, {0, 1}, a.welcome);
  b.key_byte = other_key;
  a.send_join(&view, 1 << 20, 2'000);
  b.send_join(&view, 1 << 20, 2'000);
  const auto refused = a.finish_join();
  return refused.ok() ? "joined" : refused.error().message;
}

TEST(Refusals, OfNodesThatDifferNameBothSides) {
  {
    Nodes nodes(1);
    nodes.start({"security.sealing=none"});
    const std::string text = two_that_differ(nodes);
    EXPECT_TRUE(has(text, "here auth, there none") && has(text, nodes[1].facts().endpoint_text)) << text;
  }
  {
    Nodes nodes(1);
    nodes.start({"exchange.deadline=300ms"});
    const std::string text = two_that_differ(nodes);
    EXPECT_TRUE(has(text, "other settings") && has(text, "deadline=5s")) << text;
  }
  {
    Nodes nodes(2);
    const std::string text = two_that_differ(nodes, 9);
    EXPECT_TRUE(has(text, "(strange)")) << text;
  }
}

TEST(Refusals, OfMoreClientsAndJobsThanAllowed) {
  Nodes nodes(1, {"memory.clients_max=2", "memory.jobs_max=1"});
  RawClient a("a", 0, 1), b("b", 0, 1), c("c", 0, 1);
  ASSERT_TRUE(a.hello(nodes.socket(0)).ok());
  const auto job = b.hello(nodes.socket(0));
  ASSERT_FALSE(job.ok());
  EXPECT_TRUE(has(job.error().message, "memory.jobs_max")) << job.error().message;
  RawClient d("a", 0, 1);
  ASSERT_TRUE(d.hello(nodes.socket(0)).ok());
  const auto client = c.hello(nodes.socket(0));
  ASSERT_FALSE(client.ok());
  EXPECT_TRUE(has(client.error().message, "memory.clients_max")) << client.error().message;
}

// --- Starting ---------------------------------------------------------------------------------------------------------

TEST(Starting, NamesTheKeyAtFault) {
  Nodes nodes(1);
  const auto error = [&](const std::vector<std::string>& more) {
    const auto started = nodes.try_start(more);
    EXPECT_FALSE(started.ok());
    return started.ok() ? Error{0, ""} : started.error();
  };
  const std::string taken = nodes[0].facts().endpoint_text;
  const Error port = error({"transport.port=" + taken.substr(taken.rfind(':') + 1)});
  EXPECT_EQ(port.code, kExitFailure);
  EXPECT_TRUE(has(port.message, "transport.port: ") && has(port.message, taken) &&
              has(port.message, "held by pid " + std::to_string(::getpid())))
      << port.message;
  const Error socket = error({"socket.path=" + nodes.socket(0)});
  EXPECT_TRUE(has(socket.message, "socket.path: ") && has(socket.message, nodes.socket(0))) << socket.message;
  EXPECT_EQ(error({"transport.bind=203.0.113.7"}).code, kExitConfig);
  EXPECT_TRUE(has(error({"transport.bind=nosuch0"}).message, "lo"))
      << "a wrong interface lists the available ones";
  EXPECT_TRUE(has(error({"socket.group=no-such-group"}).message, "no group 'no-such-group'"));
  EXPECT_EQ(error({"metrics.listen=here"}).code, kExitConfig);
  EXPECT_TRUE(has(error({"security.key_file=/nonexistent"}).message, "security.key_file: cannot open"));
  EXPECT_EQ(error({"lanes=2"}).code, kExitConfig) << "port 0 with two lanes";
}

TEST(Starting, KeyFiles) {
  Nodes nodes(0);
  const std::string path = nodes.folder() + "/key";
  const auto write = [&](const std::string& text, mode_t mode) {
    ::unlink(path.c_str());
    FILE* file = fopen(path.c_str(), "w");
    fwrite(text.data(), 1, text.size(), file);
    fclose(file);
    ::chmod(path.c_str(), mode);
  };
  write("000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F\n", 0400);
  auto key = load_key(path);
  ASSERT_TRUE(key.ok()) << key.error().message;
  for (uint8_t i = 0; i < 32; ++i) EXPECT_EQ((*key)[i], i);
  write(std::string(32, 'x'), 0600);
  ASSERT_TRUE(load_key(path).ok());
  EXPECT_EQ((*load_key(path))[31], 'x');
  write(std::string(32, 'x'), 0640);
  EXPECT_TRUE(has(load_key(path).error().message, "chmod 0400"));
  for (const std::string& bad : {std::string(), std::string(31, 'x'), std::string(33, 'x'),
                                 std::string(64, 'g'), std::string(100, 'a')}) {
    write(bad, 0400);
    EXPECT_FALSE(load_key(path).ok()) << bad.size();
  }
  EXPECT_FALSE(load_key(nodes.folder()).ok());
}

TEST(Reload, AppliesWhatItCanAndSaysWhatItCannot) {
  Nodes nodes(1);
  auto done = nodes[0].reload(nodes.load(0, {"exchange.deadline=300ms", "lanes=1", "transport.gso=false"}));
  ASSERT_TRUE(done.ok()) << done.error().message;
  EXPECT_EQ(*done,
            "changed exchange.deadline: 5s -> 300ms; NOT applied, these need a restart: transport.gso: true "
            "-> false");
  const auto value = [&](const std::string& name) {
    const nlohmann::json answer = nodes.ask(0, {{"request", "config"}});
    for (const auto& key : answer["keys"]) {
      if (key["name"] == name) return key["value"].get<std::string>();
    }
    return std::string("?");
  };
  EXPECT_TRUE(eventually([&] { return value("exchange.deadline") == "300ms"; }));
  EXPECT_EQ(value("transport.gso"), "true") << "what is shown is what is in force";
  EXPECT_TRUE(nodes[0].control_stats().reload_ok);

  auto bad = nodes[0].reload(nodes.load(0, {"exchange.deadline=never"}));
  ASSERT_FALSE(bad.ok());
  EXPECT_TRUE(has(bad.error().message, "exchange.deadline: 'never'")) << bad.error().message;
  EXPECT_TRUE(eventually([&] { return !nodes[0].control_stats().reload_ok; }));
  EXPECT_EQ(value("exchange.deadline"), "300ms") << "the old one stays in force";
  EXPECT_TRUE(has(nodes[0].status_line(), "FAILED"));
  auto unchanged = nodes[0].reload(nodes.load(0, {"exchange.deadline=300ms"}));
  ASSERT_TRUE(unchanged.ok());
  EXPECT_EQ(*unchanged, "nothing changed");
  EXPECT_TRUE(eventually([&] { return nodes[0].control_stats().reload_ok; }));
}

TEST(Admin, AnswersInJson) {
  Nodes nodes(2);
  auto clients = join_all(nodes, "seen", {0, 1});
  for (auto& client : clients) client->submit(descriptor(0));
  ipc::Completion completion;
  for (auto& client : clients) ASSERT_TRUE(client->completion(&completion));
  ASSERT_TRUE(eventually([&] { return nodes.ask(0, {{"request", "status"}})["ops"].value("OK", 0) == 1; }));
  const auto status = nodes.ask(0, {{"request", "status"}});
  EXPECT_EQ(status["endpoint"], nodes[0].facts().endpoint_text);
  EXPECT_EQ(status["jobs"][0]["name"], "seen");
  EXPECT_EQ(status["jobs"][0]["clients"][0]["pid"], ::getpid());
  EXPECT_GT(status["jobs"][0]["pool_bytes"].get<uint64_t>(), 255U << 20);
  EXPECT_TRUE(status["health"].empty()) << status["health"].dump();
  const auto peers = nodes.ask(0, {{"request", "peers"}, {"job", "seen"}});
  ASSERT_EQ(peers["peers"].size(), 1U);
  EXPECT_EQ(peers["peers"][0]["address"], nodes[1].facts().endpoint_text);
  EXPECT_EQ(peers["peers"][0]["state"], "alive");
  EXPECT_EQ(peers["peers"][0]["ranks"], nlohmann::json({1}));
  const auto trace = nodes.ask(0, {{"request", "trace"}, {"job", "seen"}, {"last", 1}});
  ASSERT_EQ(trace["trace"][0]["ops"].size(), 1U) << trace.dump();
  const auto& op = trace["trace"][0]["ops"][0];
  EXPECT_EQ(op["class"], "exact");
  EXPECT_EQ(op["bytes"], 64);
  EXPECT_GE(op["result_us"].get<int64_t>(), op["submitted_us"].get<int64_t>());
  EXPECT_TRUE(has(nodes.ask(0, {{"request", "jobs"}, {"job", "none"}})["error"], "no job 'none'"));
  EXPECT_TRUE(has(nodes.ask(0, {{"request", "everything"}})["error"], "unknown request"));
  EXPECT_TRUE(has(nodes.ask(0, nlohmann::json::array())["error"], "not a JSON object"));
  for (auto& client : clients) ASSERT_TRUE(client->say(ipc::MessageType::kLeave).ok());
  EXPECT_TRUE(eventually([&] {
    const auto jobs = nodes.ask(0, {{"request", "jobs"}});
    return !jobs["jobs"].empty() && jobs["jobs"][0]["phase"] == "lingering";
  })) << "a job that was left goes on answering its peers";
}

}  // namespace
}  // namespace sluice::daemon::test
