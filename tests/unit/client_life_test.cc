// Joining and its errors, the end of the daemon, fork, and what is left behind.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sluice.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/ipc/card.h"
#include "base/ipc/channel.h"
#include "tests/unit/client_support.h"
#include "tests/unit/fake_daemon.h"
#include "tests/unit/ipc_support.h"

namespace sluice::test {
namespace {

class Life : public testing::Test {
 protected:
  FakeDaemon& daemon(const FakeOptions& options = {}) {
    daemon_.reset();
    daemon_ = std::make_unique<FakeDaemon>(path_, options);
    return *daemon_;
  }
  int join(sluice_context* context, const sluice_join_options& options) {
    sluice_job* job = reinterpret_cast<sluice_job*>(1);
    const int error = sluice_join(context, &options, &job);
    EXPECT_EQ(job, nullptr);
    return error;
  }
  TempDir folder_;
  const std::string path_ = folder_ / "s.sock";
  std::unique_ptr<FakeDaemon> daemon_;
  unsigned char key_[32] = {1, 2, 3};
};

// --- Joining ---------------------------------------------------------------------------------------------------------

TEST_F(Life, JoinByThePeersOfTheDaemon) {
  daemon();
  sluice_context* context = open_at(path_);
  const auto options = join_options(0, 1);  // no cards, no key
  sluice_job* job = nullptr;
  ASSERT_EQ(sluice_join(context, &options, &job), SLUICE_SUCCESS) << sluice_last_error();
  EXPECT_EQ(sluice_barrier(job, kPatienceMs), SLUICE_SUCCESS);
  EXPECT_EQ(sluice_leave(job, kPatienceMs), SLUICE_SUCCESS);
  EXPECT_EQ(daemon_->leaves(), 1);
  sluice_close(context);
}

TEST_F(Life, TwoJobsOnOneContext) {
  daemon();
  sluice_context* context = open_at(path_);
  std::vector<sluice_job*> jobs(2);
  for (size_t i = 0; i < 2; ++i) {
    auto options = join_options(0, 1);
    options.job = i == 0 ? "first" : "second";
    ASSERT_EQ(sluice_join(context, &options, &jobs[i]), SLUICE_SUCCESS) << sluice_last_error();
  }
  sluice_close(context);  // a joined job does not need it any more
  for (sluice_job* job : jobs) {
    EXPECT_EQ(sluice_barrier(job, kPatienceMs), SLUICE_SUCCESS);
    EXPECT_EQ(sluice_leave(job, kPatienceMs), SLUICE_SUCCESS);
  }
}

TEST_F(Life, WrongOptionsAreNamed) {
  daemon();
  sluice_context* context = open_at(path_);
  sluice_card card;
  ASSERT_EQ(sluice_card_get(context, "job", 0, 1, 1000, &card), SLUICE_SUCCESS);
  const std::string long_name(64, 'j');
  for (const char* name : {"", "a b", "a/b", long_name.c_str()}) {
    auto options = join_options(0, 1);
    options.job = name;
    EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID) << name;
    EXPECT_EQ(sluice_card_get(context, name, 0, 1, 1000, &card), SLUICE_ERROR_INVALID) << name;
  }
  auto options = join_options(1, 1);
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID);
  EXPECT_TRUE(says({"rank 1 of 1"}));
  options = join_options(0, 0);
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID);
  options = join_options(0, 65'536);
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID);
  options = join_options(0, 1);
  options.cards = &card;
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID);
  EXPECT_TRUE(says({"cards", "key"}));
  options = join_options(0, 1);
  options.key = key_;
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID);
  options = join_options(0, 1);
  options.timeout_ms = 0;
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID);
  options = join_options(0, 1);
  options.size = 0;
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID);
  options = join_options(0, 1);
  options.max_op_bytes = UINT64_MAX;
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID);
  options = join_options(0, 1);
  options.cards = &card;
  options.key = key_;
  options.local_ranks = 2;
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID);
  EXPECT_TRUE(says({"local_ranks"}));
  EXPECT_EQ(join(nullptr, options), SLUICE_ERROR_INVALID);
  sluice_close(context);
}

TEST_F(Life, WrongCardsNameTheRank) {
  daemon();
  sluice_context* context = open_at(path_);
  std::vector<sluice_card> cards(2);
  ASSERT_EQ(sluice_card_get(context, "job", 0, 2, 1000, &cards[0]), SLUICE_SUCCESS) << sluice_last_error();
  cards[1] = cards[0];
  auto options = join_options(0, 2);
  options.cards = cards.data();
  options.key = key_;
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID);
  EXPECT_TRUE(says({"card of rank 1", "rank order"}));
  cards[1].bytes[20] ^= 1;
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID);
  EXPECT_TRUE(says({"card of rank 1", "checksum"}));

  // A good set of cards, but on a context that did not make this rank's card.
  sluice_context* other = open_at(path_);
  ASSERT_EQ(sluice_card_get(context, "job", 0, 1, 1000, &cards[0]), SLUICE_SUCCESS);
  options = join_options(0, 1);
  options.cards = cards.data();
  options.key = key_;
  EXPECT_EQ(join(other, options), SLUICE_ERROR_INVALID);
  EXPECT_TRUE(says({"rank 0 (this rank)", "sluice_card_get"}));
  sluice_job* job = nullptr;
  ASSERT_EQ(sluice_join(context, &options, &job), SLUICE_SUCCESS) << sluice_last_error();
  EXPECT_EQ(sluice_leave(job, kPatienceMs), SLUICE_SUCCESS);
  EXPECT_EQ(join(context, options), SLUICE_ERROR_INVALID) << "a card is good for one join";
  sluice_close(other);
  sluice_close(context);
}

TEST_F(Life, RefusalsCarryTheDaemonsWords) {
  FakeOptions options;
  options.refuse_join = "job 'job' belongs to uid 1000";
  daemon(options);
  sluice_context* context = open_at(path_);
  EXPECT_EQ(join(context, join_options(0, 1)), SLUICE_ERROR_REFUSED);
  EXPECT_TRUE(says({"sluice_join", "refused", "belongs to uid 1000"}));
  sluice_close(context);
}

TEST_F(Life, AnotherAbiIsRefusedWithBothVersions) {
  FakeOptions options;
  options.abi_version = 7;
  daemon(options);
  sluice_context* context = open_at(path_);
  sluice_card card;
  EXPECT_EQ(sluice_card_get(context, "job", 0, 1, 1000, &card), SLUICE_ERROR_ABI);
  EXPECT_TRUE(says({"version " + std::to_string(ipc::kAbiVersion), "version 7", "same release"}));
  sluice_close(context);
}

TEST_F(Life, AMissingRankIsNamedInTime) {
  daemon();
  sluice_context* context = open_at(path_);
  auto options = join_options(0, 3);
  options.timeout_ms = 200;
  const Micros before = monotonic_micros();
  EXPECT_EQ(join(context, options), SLUICE_ERROR_TIMEOUT);
  EXPECT_LT(monotonic_micros() - before, 10 * kMicrosPerSecond);
  EXPECT_TRUE(says({"rank 1", "rank 2"}));
  sluice_close(context);
}

TEST_F(Life, ASilentDaemonDoesNotHoldTheClient) {
  FakeOptions options;
  options.silent = true;
  daemon(options);
  sluice_context* context = open_at(path_);
  sluice_card card;
  const Micros before = monotonic_micros();
  EXPECT_EQ(sluice_card_get(context, "job", 0, 1, 100, &card), SLUICE_ERROR_TIMEOUT);
  EXPECT_LT(monotonic_micros() - before, 5 * kMicrosPerSecond);
  EXPECT_TRUE(says({path_, "rank 0"}));
  sluice_close(context);
}

// --- The end of the daemon -------------------------------------------------------------------------------------------

// Submits ops that the daemon holds, runs `end`, and expects all of them to end with DAEMON_LOST, also for those who
// already sleep in sluice_wait.
template <typename End>
void expect_lost(FakeDaemon& fake, Alone& alone, End end, const std::string& word) {
  sluice_job* job = alone.job();
  auto* in = alloc<float>(job, 1000);
  in[0] = 42;
  fake.hold();
  constexpr size_t kOps = 5;
  std::vector<sluice_op> ops(kOps);
  for (auto& op : ops) {
    auto* out = alloc<float>(job, 1000);
    ASSERT_EQ(sluice_allreduce(job, in, out, 1000, SLUICE_F32, SLUICE_SUM, nullptr, &op), SLUICE_SUCCESS);
  }
  std::vector<std::thread> waiters;
  std::atomic<int> lost{0};
  for (size_t i = 0; i + 1 < kOps; ++i) {
    waiters.emplace_back([&, i] {
      const auto report = wait_for(job, ops[i]);
      EXPECT_EQ(report.status, SLUICE_DAEMON_LOST);
      EXPECT_EQ(report.events, SLUICE_EVENT_RESULT | SLUICE_EVENT_RESOLVED);
      EXPECT_NE(std::string(report.text).find(word), std::string::npos) << report.text;
      ++lost;
    });
  }
  while (fake.descriptors_read() < static_cast<int>(2 * kOps)) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const Micros before = monotonic_micros();
  end();
  for (auto& waiter : waiters) waiter.join();
  EXPECT_EQ(lost, static_cast<int>(kOps - 1));
  EXPECT_LT(monotonic_micros() - before, 2 * kMicrosPerSecond) << "slices are 100 ms";
  EXPECT_EQ(wait_for(job, ops.back()).status, SLUICE_DAEMON_LOST) << "also for who comes later";

  sluice_op op = 0;
  auto* out = alloc<float>(job, 1000);
  EXPECT_EQ(sluice_allreduce(job, in, out, 1000, SLUICE_F32, SLUICE_SUM, nullptr, &op),
            SLUICE_ERROR_DAEMON_LOST);
  EXPECT_TRUE(says({word, "join again"}));
  EXPECT_EQ(sluice_barrier(job, 1000), SLUICE_ERROR_DAEMON_LOST);
  EXPECT_EQ(in[0], 42) << "buffers stay until leave";
  EXPECT_EQ(alone.leave_lost(), SLUICE_ERROR_DAEMON_LOST);
}

TEST_F(Life, ADaemonThatDiesEndsEveryOpenOp) {
  auto& fake = daemon();
  Alone alone(path_);
  expect_lost(
      fake, alone, [&] { fake.die(); }, "died");
}

TEST_F(Life, TheWayBackAfterADaemonWasLost) {
  for (int round = 0; round < 3; ++round) {
    auto& fake = daemon();
    Alone alone(path_);
    ASSERT_EQ(sluice_barrier(alone.job(), kPatienceMs), SLUICE_SUCCESS);
    fake.die();
    EXPECT_EQ(sluice_barrier(alone.job(), kPatienceMs), SLUICE_ERROR_DAEMON_LOST);
    EXPECT_EQ(sluice_abort(alone.job()), SLUICE_ERROR_DAEMON_LOST) << "and no SIGPIPE";
    EXPECT_EQ(alone.leave_lost(), SLUICE_ERROR_DAEMON_LOST);
  }
}

TEST_F(Life, AContextOutlivesItsDaemon) {
  daemon();
  sluice_context* context = open_at(path_);
  daemon();  // restarted; the connection that sluice_open made is dead
  auto options = join_options(0, 1);
  sluice_job* job = nullptr;
  ASSERT_EQ(sluice_join(context, &options, &job), SLUICE_SUCCESS) << sluice_last_error();
  EXPECT_EQ(sluice_leave(job, kPatienceMs), SLUICE_SUCCESS);
  daemon_.reset();
  EXPECT_EQ(join(context, options), SLUICE_ERROR_UNREACHABLE);
  sluice_close(context);
}

TEST_F(Life, WhoIsLetGoIsToldWhy) {
  auto& fake = daemon();
  Alone alone(path_);
  expect_lost(
      fake, alone, [&] { fake.evict(); }, "an operator drained this node");
}

TEST_F(Life, AGoodbyeIsTheEndToo) {
  auto& fake = daemon();
  Alone alone(path_);
  expect_lost(
      fake, alone, [&] { fake.shut_down(); }, "it is being upgraded");
}

TEST_F(Life, PollingWithoutWaitingNoticesTheEnd) {
  auto& fake = daemon();
  Alone alone(path_);
  auto* in = alloc<float>(alone.job(), 10);
  auto* out = alloc<float>(alone.job(), 10);
  fake.hold();
  sluice_op op = 0;
  ASSERT_EQ(sluice_allreduce(alone.job(), in, out, 10, SLUICE_F32, SLUICE_SUM, nullptr, &op), SLUICE_SUCCESS);
  EXPECT_EQ(sluice_wait(alone.job(), op, 0, nullptr), SLUICE_ERROR_TIMEOUT);
  fake.die();
  sluice_report report{};
  report.size = sizeof(report);
  const Micros end = monotonic_micros() + 10 * kMicrosPerSecond;
  int error = SLUICE_ERROR_TIMEOUT;
  while (error == SLUICE_ERROR_TIMEOUT && monotonic_micros() < end) {
    error = sluice_wait(alone.job(), op, 0, &report);
    std::this_thread::yield();
  }
  EXPECT_EQ(error, SLUICE_SUCCESS);
  EXPECT_EQ(report.status, SLUICE_DAEMON_LOST);
  EXPECT_EQ(alone.leave_lost(), SLUICE_ERROR_DAEMON_LOST);
}

TEST_F(Life, WhatTheDaemonFinishedBeforeItDiedIsFinished) {
  auto& fake = daemon();
  Alone alone(path_);
  auto* in = alloc<float>(alone.job(), 10);
  auto* out = alloc<float>(alone.job(), 10);
  sluice_op op = 0;
  ASSERT_EQ(sluice_allreduce(alone.job(), in, out, 10, SLUICE_F32, SLUICE_SUM, nullptr, &op), SLUICE_SUCCESS);
  while (fake.descriptors_read() < 2) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  fake.die();
  EXPECT_EQ(wait_for(alone.job(), op).status, SLUICE_OK);
  EXPECT_EQ(sluice_barrier(alone.job(), kPatienceMs), SLUICE_ERROR_DAEMON_LOST);
  EXPECT_EQ(alone.leave_lost(), SLUICE_ERROR_DAEMON_LOST);
}

TEST_F(Life, ABrokenDaemonIsALostOne) {
  const char* words[] = {"", "completion ring", "impossible completion", "impossible completion"};
  for (int how = 1; how <= 3; ++how) {
    auto& fake = daemon();
    Alone alone(path_);
    fake.misbehave(how);
    EXPECT_EQ(sluice_barrier(alone.job(), kPatienceMs), SLUICE_ERROR_DAEMON_LOST) << how;
    EXPECT_TRUE(says({words[how]})) << how;
    EXPECT_EQ(alone.leave_lost(), SLUICE_ERROR_DAEMON_LOST);
  }
}

TEST_F(Life, ALostRankEndsTheOpsOfTheOthersAndNotTheirJob) {
  daemon();
  auto ranks = join_all(path_, 2);
  auto* in = alloc<float>(ranks[0].job, 10);
  auto* out = alloc<float>(ranks[0].job, 10);
  sluice_op op = 0;
  ASSERT_EQ(sluice_allreduce(ranks[0].job, in, out, 10, SLUICE_F32, SLUICE_SUM, nullptr, &op),
            SLUICE_SUCCESS);
  ASSERT_EQ(sluice_allreduce(ranks[1].job, nullptr, nullptr, 0, SLUICE_U8, SLUICE_SUM, nullptr, &op),
            SLUICE_SUCCESS);
  EXPECT_EQ(wait_for(ranks[0].job, op).status, SLUICE_MISMATCH);
  ASSERT_EQ(sluice_allreduce(ranks[0].job, in, out, 10, SLUICE_F32, SLUICE_SUM, nullptr, &op),
            SLUICE_SUCCESS);
  EXPECT_EQ(sluice_leave(ranks[1].job, 50), SLUICE_SUCCESS);
  sluice_close(ranks[1].context);
  EXPECT_EQ(sluice_leave(ranks[0].job, 100), SLUICE_ERROR_TIMEOUT) << "its last op can never end";
  EXPECT_TRUE(says({"still open", "rank 0"}));
  sluice_close(ranks[0].context);
}

// --- Fork ------------------------------------------------------------------------------------------------------------

TEST_F(Life, AForkedChildGetsErrorsAndHarmsNothing) {
  auto& fake = daemon();
  Alone alone(path_);
  sluice_job* job = alone.job();
  auto* in = alloc<float>(job, 1000);
  auto* out = alloc<float>(job, 1000);
  fake.hold();
  sluice_op op = 0;
  ASSERT_EQ(sluice_allreduce(job, in, out, 1000, SLUICE_F32, SLUICE_SUM, nullptr, &op), SLUICE_SUCCESS);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int step = 1;
    const auto expect_forked = [&](int error) {
      if (error != SLUICE_ERROR_FORKED ||
          std::string(sluice_last_error()).find("parent") == std::string::npos) {
        ::_exit(step);
      }
      ++step;
    };
    sluice_op mine = 0;
    sluice_card card;
    sluice_job* other = nullptr;
    sluice_job_info info{};
    info.size = sizeof(info);
    const auto options = join_options(0, 1);
    expect_forked(sluice_allreduce(job, in, out, 1, SLUICE_F32, SLUICE_SUM, nullptr, &mine));
    expect_forked(sluice_broadcast(job, in, 1, 0, &mine));
    expect_forked(sluice_all_gather(job, in, out, 1, &mine));
    expect_forked(sluice_barrier(job, 1000));
    expect_forked(sluice_wait(job, op, 1000, nullptr));
    expect_forked(sluice_wait_result(job, op, 1000, nullptr));
    expect_forked(sluice_abort(job));
    expect_forked(sluice_job_get_info(job, &info));
    expect_forked(sluice_card_get(alone.ranks[0].context, "job", 0, 1, 1000, &card));
    expect_forked(sluice_join(alone.ranks[0].context, &options, &other));
    if (sluice_alloc(job, 64) != nullptr) ::_exit(100);
    sluice_free(job, in);
    expect_forked(sluice_leave(job, 1000));
    sluice_close(alone.ranks[0].context);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "the step that failed";
  fake.let_go();
  EXPECT_EQ(wait_for(job, op).status, SLUICE_OK) << "the parent goes on";
  EXPECT_EQ(sluice_barrier(job, kPatienceMs), SLUICE_SUCCESS);
  EXPECT_EQ(fake.leaves(), 0);
}

// --- What is left behind ---------------------------------------------------------------------------------------------

size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  size_t count = 0;
  while (std::getline(maps, line)) count += line.find("memfd:") != std::string::npos ? 1 : 0;
  return count;
}

TEST_F(Life, AThousandJoinsAndLeavesLeakNothing) {
  auto& fake = daemon();
  const auto cycle = [&] {
    sluice_context* context = open_at(path_);
    auto options = join_options(0, 1);
    options.max_op_bytes = 4096;
    options.arena_bytes = 16'384;
    sluice_job* job = nullptr;
    ASSERT_EQ(sluice_join(context, &options, &job), SLUICE_SUCCESS) << sluice_last_error();
    ASSERT_EQ(sluice_barrier(job, kPatienceMs), SLUICE_SUCCESS);
    ASSERT_EQ(sluice_leave(job, kPatienceMs), SLUICE_SUCCESS);
    sluice_close(context);
  };
  const auto settled = [&] {  // the daemon lies in this process: its side has to be gone as well
    const Micros end = monotonic_micros() + 10 * kMicrosPerSecond;
    while (fake.clients() > 0 && monotonic_micros() < end) std::this_thread::yield();
    return fake.clients() == 0;
  };
  cycle();
  ASSERT_TRUE(settled());
  const int fds = open_fds();
  const size_t maps = mappings();
  for (int i = 0; i < 1000; ++i) {
    cycle();
    if (HasFatalFailure()) return;
  }
  ASSERT_TRUE(settled());
  EXPECT_EQ(open_fds(), fds);
  EXPECT_EQ(mappings(), maps);
  EXPECT_EQ(fake.leaves(), 1001);
}

TEST_F(Life, FailedJoinsAndLostDaemonsLeakNothing) {
  const int fds = open_fds();
  const size_t maps = mappings();
  for (int i = 0; i < 20; ++i) {
    FakeOptions options;
    options.refuse_join = i % 2 == 0 ? "no" : "";
    auto& fake = daemon(options);
    sluice_context* context = open_at(path_);
    sluice_card card;
    ASSERT_EQ(sluice_card_get(context, "job", 0, 1, 1000, &card), SLUICE_SUCCESS);  // never used
    const auto join_now = join_options(0, 1);
    sluice_job* job = nullptr;
    const int error = sluice_join(context, &join_now, &job);
    EXPECT_EQ(error, i % 2 == 0 ? SLUICE_ERROR_REFUSED : SLUICE_SUCCESS);
    fake.die();
    if (job != nullptr) sluice_leave(job, 100);
    sluice_close(context);
    daemon_.reset();
  }
  EXPECT_EQ(open_fds(), fds);
  EXPECT_EQ(mappings(), maps);
}

TEST_F(Life, TheClientCannotWriteWhatTheDaemonOwns) {
  // The memory itself, seen through /proc: the control page is mapped read-only and cannot be made writable.
  daemon();
  const Alone alone(path_);
  ASSERT_EQ(sluice_barrier(alone.job(), kPatienceMs), SLUICE_SUCCESS);
  std::ifstream maps("/proc/self/maps");
  std::string line;
  int read_only = 0;
  while (std::getline(maps, line)) {
    if (line.find("memfd:fake-control") != std::string::npos && line.find(" r--s ") != std::string::npos)
      ++read_only;
  }
  EXPECT_EQ(read_only, 1);
}

}  // namespace
}  // namespace sluice::test
