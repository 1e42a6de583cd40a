// How sluicectl lays out answers, and what it makes of answers that lack things.
#include <gtest/gtest.h>

#include "tools/sluicectl/daemon_client.h"
#include "tools/sluicectl/tables.h"

namespace sluice::ctl {
namespace {

using nlohmann::json;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Tables, AlignNumbersRightAndTextLeft) {
  EXPECT_EQ(table({"NAME", "COUNT", "STATE"}, {{"a", "7", "ok"}, {"longer", "12345678", "-"}}),
            "NAME       COUNT  STATE\n"
            "a              7  ok\n"
            "longer  12345678  -\n");
  EXPECT_EQ(table({"NAME", "COUNT"}, {}), "NAME  COUNT\n") << "the heading stays when there is nothing";
}

json job() {
  return {{"name", "j"},
          {"phase", "running"},
          {"nodes", 2},
          {"ranks", 4},
          {"clients", {{{"rank", 3}}, {{"rank", 1}}}},
          {"open_ops", 1},
          {"ops", {{"OK", 10}, {"INCOMPLETE", 2}, {"OP_TIMEOUT", 1}}},
          {"bytes_sent", 3 << 20}};
}

TEST(Tables, Jobs) {
  EXPECT_EQ(jobs_text({{"jobs", {job()}}}, {}),
            "JOB  PHASE    NODES  RANKS  HERE  OPEN  OK  NOT_OK    SENT  RECEIVED  REPAIRED  SKIPPED\n"
            "j    running      2      4   1,3     1  10       3  3.0MiB        0B         0        0\n");
  json failed = job();
  failed["failed"] = true;
  failed["failure_text"] = "rank 2 died";
  const std::string text = jobs_text({{"jobs", {failed}}}, {});
  EXPECT_TRUE(has(text, "j    failed ") && has(text, "\nj: rank 2 died\n")) << text;
}

TEST(Tables, DeadlinesAndCarryOverWhereThereIsSomethingToSay) {
  json bounded = job();
  bounded["deadline_adapts"] = true;
  bounded["policy"] = 3;
  bounded["deadlines"] = {{{"bytes", 4096}, {"hard_us", 12'000}, {"samples", 64}},
                          {{"bytes", 1 << 20}, {"hard_us", 0}, {"samples", 7}}};
  bounded["blocks_carried"] = 20;
  bounded["carry_blocks"] = 4;
  bounded["contributions_queued"] = 2;
  bounded["blocks_filled"] = 9;
  bounded["blocks_corrected"] = 4;
  const std::string text = jobs_text({{"jobs", {bounded}}}, {});
  EXPECT_TRUE(has(text, "\nj: deadline auto, policy 3: 4.0KiB 12.0ms, 1.0MiB warming up (7 ops)\n")) << text;
  EXPECT_TRUE(has(text,
                  "\nj: carry-over: 20 blocks carried (4 owed now), 2 contributions queued (0 now), "
                  "0 blocks discarded, 0 undecided\n"))
      << text;
  EXPECT_TRUE(has(text, "\nj: 9 blocks of results filled by rule\n")) << text;
  EXPECT_TRUE(has(text, "\nj: 4 blocks of results corrected by holes of earlier ones\n")) << text;
}

TEST(Tables, StatusSaysWhatIsWrongInColourOnlyWhenAsked) {
  const json answer = {{"version", "1"},
                       {"node", "n"},
                       {"up_us", 3'725'000'000},
                       {"health", {"node 1 is lost"}},
                       {"jobs", {job()}}};
  EXPECT_TRUE(has(status_text(answer, {.color = false}), "health    node 1 is lost\n"));
  EXPECT_TRUE(has(status_text(answer, {.color = true}), "health    \033[31mnode 1 is lost\033[0m\n"));
  EXPECT_TRUE(has(status_text(answer, {}), "up 1h02m\n"));
  EXPECT_TRUE(has(status_text({{"version", "1"}}, {}), "health    ok\n"));
}

TEST(Tables, PeersAndTrace) {
  const json peers = {{"peers",
                       {{{"job", "j"},
                         {"node", 1},
                         {"name", "gpu-2"},
                         {"address", "10.0.0.2:9470"},
                         {"waited_us", 4'812'000},
                         {"ranks", {2, 3}},
                         {"state", "suspect"},
                         {"last_heard_us", 312'000},
                         {"rtt_us", 85}}}}};
  const std::string text = peers_text(peers, {});
  EXPECT_TRUE(has(text, "10.0.0.2:9470") && has(text, "2,3") && has(text, "312.0ms") && has(text, "85us") &&
              has(text, "gpu-2") && has(text, "WAITED_FOR") && has(text, "4812.0ms") && has(text, "silent"))
      << text;
  const json op = {{"lane", 0},
                   {"op_seq", 5},
                   {"class", "exact"},
                   {"status", "OK"},
                   {"bytes", 4096},
                   {"submitted_us", 1000},
                   {"admitted_us", 1000},
                   {"quorum_us", 1200},
                   {"first_push_us", 1300},
                   {"push_sent_us", 1900},
                   {"closed_us", 900},
                   {"pull_sent_us", 0},
                   {"waited_for", 2},
                   {"result_us", 2500}};
  const json trace = {{"trace", {{{"job", "j"}, {"node", 0}, {"ops", {op}}}}}};
  const std::string lines = trace_text(trace, {});
  EXPECT_TRUE(has(lines, "1500us") && has(lines, "300us") && has(lines, "node 2")) << lines;
  const json chrome = chrome_trace(trace);
  ASSERT_EQ(chrome["traceEvents"].size(), 2U) << "an op and its push; its shard was not pulled";
  EXPECT_EQ(chrome["traceEvents"][0]["dur"], 1500);
  EXPECT_EQ(chrome["traceEvents"][1]["ts"], 1300);
}

// A daemon of another release may leave out what this one knows.
TEST(Tables, SurviveAnswersThatLackThings) {
  for (const json& answer :
       {json::object(), json({{"jobs", {json::object()}}}), json({{"peers", {json::object()}}}),
        json({{"trace", {json::object()}}}), json({{"trace", {{{"ops", {json::object()}}}}}}),
        json({{"keys", {json::object()}}}), json({{"health", {1}}}), json({{"ops", 5}})}) {
    status_text(answer, {});
    jobs_text(answer, {});
    peers_text(answer, {});
    trace_text(answer, {});
    config_text(answer, {});
    chrome_trace(answer);
  }
}

TEST(Client, NamesTheSocketAndWhatToDo) {
  const auto answer = ask("/nonexistent/sluice.sock", {{"request", "status"}});
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, kExitUnreachable);
  EXPECT_TRUE(has(answer.error().message, "/nonexistent/sluice.sock") &&
              has(answer.error().message, "systemctl status sluiced"))
      << answer.error().message;
}

}  // namespace
}  // namespace sluice::ctl
