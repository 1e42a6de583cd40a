// /metrics, /healthz and /readyz of whole daemons, and the functions behind them.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>

#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "daemon/metrics/exposition.h"
#include "daemon/metrics/health.h"
#include "tests/unit/daemon_support.h"

namespace sluice::daemon::test {
namespace {

std::string http_get(const std::string& address, const std::string& request) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval limit{5, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) return "cannot connect";
  const std::string text = request + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  EXPECT_EQ(::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  std::string answer;
  char part[4096];
  ssize_t got = 0;
  while ((got = ::recv(fd.get(), part, sizeof part, 0)) > 0) answer.append(part, static_cast<size_t>(got));
  return answer;
}

std::map<std::string, double> series(const std::string& text) {
  std::map<std::string, double> out;
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    const size_t space = line.rfind(' ');
    if (line.starts_with("sluice_") || line.starts_with("process_"))
      out[line.substr(0, space)] = std::stod(line.substr(space + 1));
  }
  return out;
}

TEST(Metrics, OfARunningDaemon) {
  Nodes nodes(0, {"exchange.linger=0"});
  nodes.start({"metrics.listen=127.0.0.1:0"});
  nodes.start();
  const std::string address = nodes[0].metrics_address();
  ASSERT_FALSE(address.ends_with(":0")) << address;
  const auto fresh = series(http_get(address, "GET /metrics"));
  for (const char* zero : {"sluice_rounds_total{status=\"ok\"}", "sluice_rounds_total{status=\"op_timeout\"}",
                           "sluice_round_duration_seconds_count{class=\"consistent\"}",
                           "sluice_packets_dropped_total{reason=\"tag\"}", "sluice_peers{state=\"lost\"}",
                           "sluice_clients_lost_total", "sluice_socket_dropped_packets_total"}) {
    ASSERT_TRUE(fresh.contains(zero)) << zero;
    EXPECT_EQ(fresh.at(zero), 0) << zero;
  }
  EXPECT_EQ(fresh.at("sluice_config_last_reload_successful"), 1);
  EXPECT_GT(fresh.at("process_open_fds"), 3);

  auto clients = join_all(nodes, "counted", {0, 1});
  for (uint32_t op = 0; op < 5; ++op) {
    for (auto& client : clients) client->submit(descriptor(op));
    ipc::Completion completion;
    for (auto& client : clients) ASSERT_TRUE(client->completion(&completion));
  }
  const auto ok = [&] {
    return series(http_get(address, "GET /metrics"))["sluice_rounds_total{status=\"ok\"}"];
  };
  EXPECT_TRUE(eventually([&] { return ok() == 5; })) << ok();
  const std::string peer = "{job=\"counted\",peer=\"" + nodes[1].facts().endpoint_text + "\"}";
  const auto running = series(http_get(address, "GET /metrics"));
  EXPECT_EQ(running.at("sluice_peers{state=\"alive\"}"), 1);
  EXPECT_EQ(running.at("sluice_jobs{phase=\"running\"}"), 1);
  EXPECT_EQ(running.at("sluice_round_duration_seconds_count{class=\"exact\"}"), 5);
  ASSERT_TRUE(running.contains("sluice_peer_last_heard_timestamp_seconds" + peer));
  EXPECT_NEAR(running.at("sluice_peer_last_heard_timestamp_seconds" + peer),
              static_cast<double>(time(nullptr)), 5);
  EXPECT_EQ(running.at("sluice_job_failed{job=\"counted\"}"), 0);

  // Counters do not fall when the job ends; its own series go.
  clients.clear();
  ASSERT_TRUE(eventually([&] { return nodes[0].control_stats().jobs.empty(); }));
  ::usleep(250'000);  // two turns of publishing
  const auto after = series(http_get(address, "GET /metrics"));
  for (const auto& [name, value] : running) {
    if (name.find("_total") == std::string::npos && name.find("_count") == std::string::npos) continue;
    if (name.find("{job=") != std::string::npos) continue;
    ASSERT_TRUE(after.contains(name)) << name;
    EXPECT_GE(after.at(name), value) << name;
  }
  EXPECT_EQ(after.at("sluice_pool_used_bytes"), 0);
  for (const auto& [name, value] : after) EXPECT_EQ(name.find("job="), std::string::npos) << name;
}

TEST(Metrics, NamesKeepTheRules) {
  Nodes nodes(0);
  nodes.start({"metrics.listen=127.0.0.1:0"});
  std::istringstream lines(http_get(nodes[0].metrics_address(), "GET /metrics"));
  std::map<std::string, std::string> types;
  std::set<std::string> helped;
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string hash, what, name, rest;
    words >> hash >> what >> name >> rest;
    if (hash == "#" && what == "TYPE") types[name] = rest;
    if (hash == "#" && what == "HELP" && !rest.empty()) helped.insert(name);
  }
  ASSERT_GT(types.size(), 40U);
  // Base units only; what is not a number of things has one.
  const std::regex foreign(
      "(_ms|_us|_micros|_millis|_milliseconds|_microseconds|_gb|_mb|_kb|_gbs|_percent|_count|_avg|_min|_max)("
      "_|$)");
  for (const auto& [name, type] : types) {
    EXPECT_TRUE(helped.contains(name)) << name;
    EXPECT_TRUE(name.starts_with("sluice_") || name.starts_with("process_")) << name;
    EXPECT_EQ(type == "counter", name.ends_with("_total")) << name << " " << type;
    if (name.starts_with("process_")) continue;  // the names that every exporter uses
    EXPECT_FALSE(std::regex_search(name, foreign)) << name;
  }
}

TEST(Metrics, HealthOverHttp) {
  Nodes nodes(0);
  nodes.start({"metrics.listen=127.0.0.1:0"});
  const std::string address = nodes[0].metrics_address();
  for (const char* path : {"/healthz", "/readyz"}) {
    EXPECT_TRUE(http_get(address, std::string("GET ") + path).starts_with("HTTP/1.1 200 OK")) << path;
    EXPECT_TRUE(http_get(address, std::string("HEAD ") + path).starts_with("HTTP/1.1 200 OK")) << path;
  }
  EXPECT_TRUE(http_get(address, "GET /other").starts_with("HTTP/1.1 404"));
  EXPECT_TRUE(http_get(address, "POST /metrics").starts_with("HTTP/1.1 4") ||
              http_get(address, "POST /metrics").starts_with("HTTP/1.1 5"));
  auto second = nodes.try_start({"metrics.listen=" + address});
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.error().message.find("metrics.listen: cannot listen on " + address), std::string::npos)
      << second.error().message;
  EXPECT_NE(second.error().message.find("held by pid"), std::string::npos) << second.error().message;
}

// --- The functions behind ---------------------------------------------------------------------------------------------

ControlStats one_job(JobPhase phase = JobPhase::kRunning) {
  ControlStats control;
  JobFacts job;
  job.id = 7;
  job.name = "j";
  job.phase = phase;
  job.deadline = 1'000'000;
  job.pull_patience = 4;
  for (int node = 0; node < 5; ++node) job.nodes.push_back("10.0.0." + std::to_string(node + 1) + ":9470");
  control.jobs.push_back(job);
  return control;
}

Snapshot one_lane(uint64_t loops, uint64_t open, uint64_t ended) {
  Snapshot snapshot;
  snapshot.lanes.resize(1);
  snapshot.lanes[0].loops = loops;
  JobStats job;
  job.job_id = 7;
  job.counters.open_ops = open;
  job.counters.ops[0] = ended;
  job.peers.resize(5);
  for (uint32_t node = 0; node < 5; ++node) job.peers[node].blocks_late = 10 * node;
  snapshot.lanes[0].jobs.push_back(job);
  return snapshot;
}

TEST(Health, ALoopThatDoesNotTurnIsNotAlive) {
  Health health;
  const ControlStats control = one_job();
  EXPECT_TRUE(health.look(0, 1, one_lane(1, 0, 0), control).ready());
  EXPECT_TRUE(health.look(4'000'000, 2, one_lane(1, 0, 0), control).alive());
  const Health::Verdict verdict = health.look(6'000'000, 3, one_lane(1, 0, 0), control);
  EXPECT_FALSE(verdict.alive());
  ASSERT_EQ(verdict.stuck.size(), 1U);
  EXPECT_EQ(verdict.stuck[0], "lane 0 has not turned for 6 s");
  EXPECT_TRUE(health.look(7'000'000, 4, one_lane(2, 0, 0), control).alive());
  EXPECT_FALSE(health.look(13'000'000, 4, one_lane(3, 0, 0), control).alive());
}

TEST(Health, AnOverdueRoundIsNotReady) {
  Health health;
  const ControlStats control = one_job();
  uint64_t turn = 0;
  const auto look = [&](Micros now, uint64_t open, uint64_t ended) {
    ++turn;
    return health.look(now, turn, one_lane(turn, open, ended), control);
  };
  EXPECT_TRUE(look(0, 0, 10).ready());
  EXPECT_TRUE(look(100'000'000, 1, 10).ready()) << "idle time before a round does not count";
  EXPECT_TRUE(look(104'000'000, 1, 10).ready());
  const Health::Verdict verdict = look(105'500'000, 1, 10);  // 1 s x (1 + patience 4) = 5 s
  EXPECT_TRUE(verdict.alive());
  ASSERT_EQ(verdict.waiting.size(), 1U);
  EXPECT_EQ(verdict.waiting[0], "job 'j' has 1 rounds open and none ended for 5 s");
  EXPECT_TRUE(look(106'000'000, 1, 11).ready()) << "it moves again";
  ControlStats stopping = control;
  stopping.stopping = true;
  EXPECT_FALSE(health.look(106'000'001, 99, one_lane(99, 0, 11), stopping).ready());
}

TEST(Exposition, PeersAreCapped) {
  const ControlStats control = one_job();
  const Snapshot snapshot = one_lane(1, 0, 0);
  const NodeFacts facts;
  for (const uint32_t cap : {0U, 2U, 100U}) {
    std::ostringstream text;
    prometheus::TextSerializer().Serialize(text, metric_families({snapshot, control, facts, cap, 1, 0, 0}));
    const auto found = series(text.str());
    uint64_t own = 0;
    double late = 0;
    for (const auto& [name, value] : found) {
      if (!name.starts_with("sluice_peer_late_blocks_total")) continue;
      late += value;
      own += name.find("other") == std::string::npos ? 1 : 0;
    }
    EXPECT_EQ(own, std::min(cap, 4U)) << "self is no peer";
    EXPECT_EQ(late, 100) << "no block is lost to the cap";
    EXPECT_EQ(found.contains("sluice_peer_late_blocks_total{job=\"j\",peer=\"other\"}"), cap < 4);
    EXPECT_EQ(found.at("sluice_peers{state=\"alive\"}"), 4) << "the cap is on series, not on what is counted";
  }
}

}  // namespace
}  // namespace sluice::daemon::test
