// The C interface against the fake daemon: joining, collective calls, reports, errors.
#include <gtest/gtest.h>
#include <sluice.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <sluice.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/client_support.h"
#include "tests/unit/fake_daemon.h"
#include "tests/unit/ipc_support.h"

extern "C" int c11_round_trip(const char* socket_path);

namespace sluice::test {
namespace {

class Client : public testing::Test {
 protected:
  FakeDaemon& daemon(const FakeOptions& options = {}) {
    daemon_ = std::make_unique<FakeDaemon>(path_, options);
    return *daemon_;
  }
  TempDir folder_;
  const std::string path_ = folder_ / "s.sock";
  std::unique_ptr<FakeDaemon> daemon_;
};

TEST_F(Client, VersionAndNames) {
  EXPECT_EQ(std::string(sluice_version()), std::to_string(SLUICE_VERSION_MAJOR) + "." +
                                               std::to_string(SLUICE_VERSION_MINOR) + "." +
                                               std::to_string(SLUICE_VERSION_PATCH));
  EXPECT_STREQ(sluice_error_name(SLUICE_SUCCESS), "SUCCESS");
  for (int error = SLUICE_ERROR_FAILED; error < 0; ++error)
    EXPECT_STRNE(sluice_error_name(error), "UNKNOWN") << error;
  EXPECT_STREQ(sluice_error_name(-999), "UNKNOWN");
  EXPECT_STREQ(sluice_status_name(SLUICE_OP_TIMEOUT), "OP_TIMEOUT");
  EXPECT_STREQ(sluice_status_name(-1), "UNKNOWN");
  EXPECT_STREQ(sluice_status_name(256), "UNKNOWN");
}

TEST_F(Client, OpenNamesThePathThatNobodyServes) {
  sluice_context* context = reinterpret_cast<sluice_context*>(1);
  EXPECT_EQ(sluice_open(path_.c_str(), 100, &context), SLUICE_ERROR_UNREACHABLE);
  EXPECT_EQ(context, nullptr);
  EXPECT_TRUE(says({path_, "is sluiced running"}));
  EXPECT_EQ(sluice_open((folder_ / std::string(200, 'x')).c_str(), 100, &context), SLUICE_ERROR_INVALID);
  EXPECT_EQ(sluice_open(path_.c_str(), 100, nullptr), SLUICE_ERROR_INVALID);
  EXPECT_EQ(sluice_open(path_.c_str(), -1, &context), SLUICE_ERROR_INVALID);
  sluice_close(nullptr);
  ASSERT_EQ(::setenv("SLUICE_SOCKET", (folder_ / "by-environment").c_str(), 1), 0);
  EXPECT_EQ(sluice_open(nullptr, 100, &context), SLUICE_ERROR_UNREACHABLE);
  EXPECT_TRUE(says({"by-environment"}));
  ::unsetenv("SLUICE_SOCKET");
}

TEST_F(Client, FromC11) {
  daemon();
  EXPECT_EQ(c11_round_trip(path_.c_str()), 0) << sluice_last_error();
}

// Two ranks as processes of their own, with a folder as rendezvous.
TEST_F(Client, TheExampleProgram) {
  daemon();
  const auto start = [&](int rank, const std::string& more) {
    const std::string command =
        "SLUICE_SOCKET=" + path_ + " " SLUICE_EXAMPLE " " + std::to_string(rank) + more + " 2>&1";
    return std::unique_ptr<FILE, int (*)(FILE*)>(::popen(command.c_str(), "r"), ::pclose);
  };
  const auto said = [](FILE* pipe) {
    char line[512] = {};
    return std::string(std::fgets(line, sizeof(line), pipe) != nullptr ? line : "");
  };
  {
    const std::string folder = " 2 " + (folder_ / "");
    const auto first = start(0, folder);
    const auto second = start(1, folder);
    EXPECT_EQ(said(first.get()), "rank 0: OK, mean 0.5 \n");
    EXPECT_EQ(said(second.get()), "rank 1: OK, mean 0.5 \n");
  }
  EXPECT_EQ(said(start(0, " 1").get()), "rank 0: OK, mean 0 \n") << "by `peers:`";
}

template <typename T>
void sums_exactly(sluice_job* job, sluice_type type) {
  const uint64_t block = 1408 / sizeof(T);
  for (const uint64_t count :
       {uint64_t{0}, uint64_t{1}, block - 1, block, block + 1, 7 * block + 3, uint64_t{100'003}}) {
    T* in = alloc<T>(job, count);
    T* out = alloc<T>(job, count);
    for (uint64_t i = 0; i < count; ++i) in[i] = static_cast<T>(i % 251 + 1);
    for (uint64_t i = 0; i < count; ++i) out[i] = T{};
    sluice_op op = 0;
    ASSERT_EQ(sluice_allreduce(job, in, out, count, type, SLUICE_SUM, nullptr, &op), SLUICE_SUCCESS)
        << sluice_last_error();
    EXPECT_NE(op, 0U);
    const auto report = wait_for(job, op);
    EXPECT_EQ(report.status, SLUICE_OK);
    EXPECT_EQ(report.blocks_expected, (count + block - 1) / block);
    EXPECT_EQ(report.blocks_received, report.blocks_expected);
    EXPECT_EQ(std::memcmp(in, out, count * sizeof(T)), 0) << count;
    sluice_free(job, in);
    sluice_free(job, out);
  }
}

TEST_F(Client, SumsOfEveryTypeAndCount) {
  daemon();
  const Alone alone(path_);
  sums_exactly<float>(alone.job(), SLUICE_F32);
  sums_exactly<double>(alone.job(), SLUICE_F64);
  sums_exactly<int32_t>(alone.job(), SLUICE_I32);
  sums_exactly<int64_t>(alone.job(), SLUICE_I64);
  sums_exactly<uint8_t>(alone.job(), SLUICE_U8);
}

TEST_F(Client, EveryNumberOfLanes) {
  for (uint32_t lanes = 1; lanes <= ipc::kMaxLanes; lanes += 5) {
    FakeOptions options;
    options.lanes = lanes;
    daemon(options);
    {
      const Alone alone(path_);
      sluice_job_info info{};
      info.size = sizeof(info);
      ASSERT_EQ(sluice_job_get_info(alone.job(), &info), SLUICE_SUCCESS);
      EXPECT_EQ(info.lanes, lanes);
      EXPECT_EQ(info.payload_bytes, 1408U);
      EXPECT_EQ(info.nodes, 1U);
      EXPECT_EQ(info.world_size, 1U);
      EXPECT_EQ(info.arena_bytes, uint64_t{64 << 20});
      EXPECT_EQ(info.max_op_bytes, uint64_t{8 << 20});
      sums_exactly<float>(alone.job(), SLUICE_F32);
    }
    daemon_.reset();
  }
}

// Runs `body(rank)` in one thread per rank.
template <typename Body>
void on_every(const std::vector<Rank>& ranks, Body body) {
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < ranks.size(); ++r) threads.emplace_back([&, r] { body(r, ranks[r].job); });
  for (auto& thread : threads) thread.join();
}

TEST_F(Client, ThreeRanksSumAndMean) {
  daemon();
  auto ranks = join_all(path_, 3);
  on_every(ranks, [](uint32_t rank, sluice_job* job) {
    constexpr uint64_t kCount = 10'007;
    float* in = alloc<float>(job, kCount);
    float* out = alloc<float>(job, kCount);
    for (uint64_t i = 0; i < kCount; ++i) in[i] = static_cast<float>(3 * (i % 100) * (rank + 1));
    for (const auto kind : {SLUICE_SUM, SLUICE_MEAN}) {
      sluice_op op = 0;
      ASSERT_EQ(sluice_allreduce(job, in, out, kCount, SLUICE_F32, kind, nullptr, &op), SLUICE_SUCCESS);
      EXPECT_EQ(wait_for(job, op).status, SLUICE_OK);
      uint64_t wrong = 0;
      for (uint64_t i = 0; i < kCount; ++i) {
        wrong += out[i] != static_cast<float>((kind == SLUICE_SUM ? 18 : 6) * (i % 100)) ? 1 : 0;
      }
      EXPECT_EQ(wrong, 0U);
    }
  });
  leave_all(ranks);
}

TEST_F(Client, BroadcastFromEveryRoot) {
  daemon();
  auto ranks = join_all(path_, 3);
  on_every(ranks, [](uint32_t rank, sluice_job* job) {
    for (uint32_t root = 0; root < 3; ++root) {
      for (const uint64_t bytes :
           {uint64_t{0}, uint64_t{1}, uint64_t{8}, uint64_t{1409}, uint64_t{100'000}}) {
        auto* buffer = alloc<uint8_t>(job, bytes);
        for (uint64_t i = 0; i < bytes; ++i) buffer[i] = static_cast<uint8_t>(i * 7 + rank * 100);
        sluice_op op = 0;
        ASSERT_EQ(sluice_broadcast(job, buffer, bytes, root, &op), SLUICE_SUCCESS) << sluice_last_error();
        EXPECT_EQ(wait_for(job, op).status, SLUICE_OK);
        uint64_t wrong = 0;
        for (uint64_t i = 0; i < bytes; ++i)
          wrong += buffer[i] != static_cast<uint8_t>(i * 7 + root * 100) ? 1 : 0;
        EXPECT_EQ(wrong, 0U) << "root " << root << " bytes " << bytes;
        sluice_free(job, buffer);
      }
    }
    EXPECT_EQ(sluice_broadcast(job, nullptr, 0, 3, nullptr), SLUICE_ERROR_INVALID);
  });
  leave_all(ranks);
}

TEST_F(Client, AllGatherKeepsEveryByte) {
  daemon();
  auto ranks = join_all(path_, 3);
  on_every(ranks, [](uint32_t rank, sluice_job* job) {
    for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{8}, uint64_t{5000}}) {
      std::vector<uint8_t> mine(bytes);
      for (uint64_t i = 0; i < bytes; ++i) mine[i] = static_cast<uint8_t>(i ^ (rank * 85 + 1));
      auto* all = alloc<uint8_t>(job, 3 * bytes);
      std::memset(all, 0xEE, 3 * bytes);
      sluice_op op = 0;
      ASSERT_EQ(sluice_all_gather(job, mine.data(), all, bytes, &op), SLUICE_SUCCESS) << sluice_last_error();
      std::fill(mine.begin(), mine.end(), 0);  // it was read already
      EXPECT_EQ(wait_for(job, op).status, SLUICE_OK);
      uint64_t wrong = 0;
      for (uint64_t r = 0; r < 3; ++r) {
        for (uint64_t i = 0; i < bytes; ++i) {
          wrong += all[r * bytes + i] != static_cast<uint8_t>(i ^ (r * 85 + 1)) ? 1 : 0;
        }
      }
      EXPECT_EQ(wrong, 0U) << bytes;
      sluice_free(job, all);
    }
  });
  leave_all(ranks);
}

TEST_F(Client, TemporariesComeBack) {
  daemon();
  const Alone alone(path_, 1 << 20);
  auto* buffer = alloc<uint8_t>(alone.job(), 500'000);
  for (int i = 0; i < 200; ++i) {  // 100 MB of temporaries through an arena of 1 MiB
    sluice_op op = 0;
    ASSERT_EQ(sluice_broadcast(alone.job(), buffer, 500'000, 0, &op), SLUICE_SUCCESS) << sluice_last_error();
    wait_for(alone.job(), op);
  }
  sluice_op op = 0;
  auto* rest = alloc<uint8_t>(alone.job(), 100'000);
  EXPECT_EQ(sluice_broadcast(alone.job(), buffer, 500'000, 0, &op), SLUICE_ERROR_NO_MEMORY);
  EXPECT_TRUE(says({"500000", "arena_bytes"}));
  sluice_free(alone.job(), rest);
}

TEST_F(Client, BarrierEndsOnlyWhenAllHaveCome) {
  daemon();
  auto ranks = join_all(path_, 3);
  std::atomic<int> arrived{0};
  for (int round = 1; round <= 50; ++round) {
    on_every(ranks, [&](uint32_t, sluice_job* job) {
      ++arrived;
      EXPECT_EQ(sluice_barrier(job, kPatienceMs), SLUICE_SUCCESS) << sluice_last_error();
      EXPECT_GE(arrived.load(), 3 * round);
    });
  }
  leave_all(ranks);
}

TEST_F(Client, BarrierWorksWithAFullArena) {
  daemon();
  const Alone alone(path_, 4096);
  while (sluice_alloc(alone.job(), 64) != nullptr) {
  }
  EXPECT_TRUE(says({"4096", "arena_bytes"}));
  for (int i = 0; i < 200; ++i) ASSERT_EQ(sluice_barrier(alone.job(), kPatienceMs), SLUICE_SUCCESS);
}

TEST_F(Client, ABarrierThatTimesOutGoesOnWithoutItsCaller) {
  daemon();
  auto ranks = join_all(path_, 2);
  EXPECT_EQ(sluice_barrier(ranks[0].job, 50), SLUICE_ERROR_TIMEOUT);
  EXPECT_EQ(sluice_barrier(ranks[1].job, kPatienceMs), SLUICE_SUCCESS) << "rank 0 had come";
  // Its slot is given back by itself: more calls than slots.
  for (int i = 0; i < 130; ++i) {
    on_every(ranks, [](uint32_t, sluice_job* job) {
      ASSERT_EQ(sluice_barrier(job, kPatienceMs), SLUICE_SUCCESS) << sluice_last_error();
    });
  }
  leave_all(ranks);
}

TEST_F(Client, SixtyFourOpenCallsAndNoMore) {
  auto& fake = daemon();
  const Alone alone(path_);
  auto* in = alloc<float>(alone.job(), 64);
  std::vector<float*> out;
  std::vector<sluice_op> ops(64);
  fake.hold();
  for (auto& op : ops) {
    out.push_back(alloc<float>(alone.job(), 64));
    ASSERT_EQ(sluice_allreduce(alone.job(), in, out.back(), 64, SLUICE_F32, SLUICE_SUM, nullptr, &op),
              SLUICE_SUCCESS);
  }
  sluice_op more = 0;
  EXPECT_EQ(sluice_allreduce(alone.job(), in, out[0], 64, SLUICE_F32, SLUICE_SUM, nullptr, &more),
            SLUICE_ERROR_FULL);
  EXPECT_TRUE(says({"64", "op 1 "}));
  EXPECT_EQ(sluice_wait(alone.job(), ops[0], 0, nullptr), SLUICE_ERROR_TIMEOUT);
  EXPECT_EQ(sluice_wait(alone.job(), ops[0], 30, nullptr), SLUICE_ERROR_TIMEOUT);
  fake.let_go();
  for (size_t i = ops.size(); i-- > 0;) wait_for(alone.job(), ops[i]);  // in any order
  ASSERT_EQ(sluice_allreduce(alone.job(), in, out[0], 64, SLUICE_F32, SLUICE_SUM, nullptr, &more),
            SLUICE_SUCCESS);
  wait_for(alone.job(), more);
  EXPECT_EQ(sluice_wait(alone.job(), more, 0, nullptr), SLUICE_ERROR_INVALID) << "waited for already";
  EXPECT_EQ(sluice_wait(alone.job(), 0, 0, nullptr), SLUICE_ERROR_INVALID);
  EXPECT_EQ(sluice_wait(alone.job(), 12345, 0, nullptr), SLUICE_ERROR_INVALID);
}

TEST_F(Client, ResultBeforeResolved) {
  FakeOptions options;
  options.split_events = true;
  auto& fake = daemon(options);
  const Alone alone(path_);
  auto* in = alloc<float>(alone.job(), 1000);
  auto* out = alloc<float>(alone.job(), 1000);
  in[999] = 5;
  sluice_op op = 0;
  ASSERT_EQ(sluice_allreduce(alone.job(), in, out, 1000, SLUICE_F32, SLUICE_SUM, nullptr, &op),
            SLUICE_SUCCESS);
  sluice_report report{};
  report.size = sizeof(report);
  ASSERT_EQ(sluice_wait_result(alone.job(), op, kPatienceMs, &report), SLUICE_SUCCESS);
  EXPECT_EQ(report.events, SLUICE_EVENT_RESULT);
  EXPECT_EQ(out[999], 5);
  EXPECT_EQ(sluice_wait(alone.job(), op, 30, &report), SLUICE_ERROR_TIMEOUT);
  fake.release_resolved();
  report = wait_for(alone.job(), op);
  EXPECT_EQ(report.events, SLUICE_EVENT_RESULT | SLUICE_EVENT_RESOLVED);
  EXPECT_EQ(report.blocks_expected, 3U) << "each lane counted once";
  EXPECT_GE(report.total_us, 1000U);
}

TEST_F(Client, IncompleteResultsListWhatIsMissing) {
  FakeOptions options;
  options.incomplete_op = 1;
  daemon(options);
  const Alone alone(path_);
  auto* in = alloc<float>(alone.job(), 1000);
  auto* out = alloc<float>(alone.job(), 1000);
  std::fill(in, in + 1000, 2.0F);
  for (const auto expected : {SLUICE_OK, SLUICE_INCOMPLETE, SLUICE_OK}) {
    sluice_op op = 0;
    ASSERT_EQ(sluice_allreduce(alone.job(), in, out, 1000, SLUICE_F32, SLUICE_SUM, nullptr, &op),
              SLUICE_SUCCESS);
    const auto report = wait_for(alone.job(), op);
    EXPECT_EQ(report.status, expected);
    EXPECT_EQ(report.missing_count, expected == SLUICE_INCOMPLETE ? 1U : 0U);
    if (expected != SLUICE_INCOMPLETE) continue;
    EXPECT_EQ(report.missing[0].first, 0U);
    EXPECT_EQ(report.missing[0].count, 352U);
    EXPECT_EQ(report.blocks_received, report.blocks_expected - 1);
    EXPECT_NE(std::string(report.text).find("missing"), std::string::npos);
    EXPECT_EQ(out[0], 0.0F);
    EXPECT_EQ(out[352], 2.0F);
  }
}

TEST_F(Client, MismatchNamesBothSides) {
  daemon();
  auto ranks = join_all(path_, 2);
  on_every(ranks, [](uint32_t rank, sluice_job* job) {
    auto* in = alloc<float>(job, 100);
    auto* out = alloc<float>(job, 100);
    sluice_op op = 0;
    ASSERT_EQ(sluice_allreduce(job, in, out, 90 + rank, SLUICE_F32, SLUICE_SUM, nullptr, &op),
              SLUICE_SUCCESS);
    const auto report = wait_for(job, op);
    EXPECT_EQ(report.status, SLUICE_MISMATCH);
    const std::string text = report.text;
    EXPECT_NE(text.find("90 x f32"), std::string::npos) << text;
    EXPECT_NE(text.find("91 x f32"), std::string::npos) << text;
  });
  leave_all(ranks);
}

TEST_F(Client, AbortEndsOpenOpsEverywhereAndTwiceIsFine) {
  auto& fake = daemon();
  auto ranks = join_all(path_, 2);
  fake.hold();
  std::atomic<int> submitted{0};
  on_every(ranks, [&](uint32_t rank, sluice_job* job) {
    auto* in = alloc<float>(job, 100);
    auto* out = alloc<float>(job, 100);
    sluice_op op = 0;
    ASSERT_EQ(sluice_allreduce(job, in, out, 100, SLUICE_F32, SLUICE_SUM, nullptr, &op), SLUICE_SUCCESS);
    ++submitted;
    if (rank == 1) {
      while (fake.descriptors_read() < 4) std::this_thread::yield();  // two ranks, two lanes
      EXPECT_EQ(sluice_abort(job), SLUICE_SUCCESS);
      EXPECT_EQ(sluice_abort(job), SLUICE_SUCCESS);
    }
    const auto report = wait_for(job, op);
    EXPECT_EQ(report.status, SLUICE_ABORTED);
    EXPECT_NE(std::string(report.text).find("abort"), std::string::npos);
  });
  leave_all(ranks);
}

TEST_F(Client, ManyThreadsWaitForDifferentOps) {
  daemon();
  const Alone alone(path_);
  constexpr int kThreads = 8;
  constexpr int kOps = 300;
  std::vector<std::thread> threads;
  std::atomic<uint64_t> wrong{0};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      auto* in = alloc<int32_t>(alone.job(), 500);
      auto* out = alloc<int32_t>(alone.job(), 500);
      for (int i = 0; i < kOps; ++i) {
        in[0] = in[499] = t * 1'000'000 + i;
        sluice_op op = 0;
        int error = SLUICE_ERROR_FULL;
        while ((error = sluice_allreduce(alone.job(), in, out, 500, SLUICE_I32, SLUICE_SUM, nullptr, &op)) ==
               SLUICE_ERROR_FULL) {
          std::this_thread::yield();
        }
        ASSERT_EQ(error, SLUICE_SUCCESS) << sluice_last_error();
        const auto report = wait_for(alone.job(), op);
        if (report.status != SLUICE_OK || out[0] != in[0] || out[499] != in[499]) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0U);
}

TEST_F(Client, BadCallsAreRefusedBeforeTheyReachTheDaemon) {
  auto& fake = daemon();
  const Alone alone(path_);
  sluice_job* job = alone.job();
  auto* in = alloc<float>(job, 1000);
  auto* out = alloc<float>(job, 1000);
  std::vector<float> heap(1000);
  sluice_op op = 0;
  const auto allreduce = [&](const void* from, void* to, uint64_t count, int type = SLUICE_F32,
                             int kind = SLUICE_SUM) {
    return sluice_allreduce(job, from, to, count, static_cast<sluice_type>(type),
                            static_cast<sluice_kind>(kind), nullptr, &op);
  };
  EXPECT_EQ(allreduce(heap.data(), out, 10), SLUICE_ERROR_INVALID);
  EXPECT_TRUE(says({"contribution", "sluice_alloc"}));
  EXPECT_EQ(allreduce(in, heap.data(), 10), SLUICE_ERROR_INVALID);
  EXPECT_TRUE(says({"result"}));
  EXPECT_EQ(allreduce(in + 1, out, 10), SLUICE_ERROR_INVALID) << "not aligned";
  EXPECT_EQ(allreduce(nullptr, out, 10), SLUICE_ERROR_INVALID);
  EXPECT_EQ(allreduce(in, in + 16, 100), SLUICE_ERROR_INVALID);
  EXPECT_TRUE(says({"overlap"}));
  EXPECT_EQ(allreduce(in, out, 10, 7), SLUICE_ERROR_INVALID);
  EXPECT_EQ(allreduce(in, out, 10, SLUICE_F32, 2), SLUICE_ERROR_INVALID);
  sluice_op_options options{};
  options.size = sizeof(options);
  const int no_class = 3;
  std::memcpy(&options.op_class, &no_class, sizeof(no_class));
  EXPECT_EQ(sluice_allreduce(job, in, out, 10, SLUICE_F32, SLUICE_SUM, &options, &op), SLUICE_ERROR_INVALID);
  EXPECT_TRUE(says({"class 3"}));
  EXPECT_EQ(allreduce(in, out, 10, SLUICE_I32, SLUICE_MEAN), SLUICE_ERROR_INVALID);
  EXPECT_TRUE(says({"floating-point"}));
  EXPECT_EQ(allreduce(in, out, (8 << 20) / 4 + 1), SLUICE_ERROR_NO_MEMORY);
  EXPECT_TRUE(says({"2097153", "8388608", "max_op_bytes"}));
  EXPECT_EQ(allreduce(in, out, UINT64_MAX / 2), SLUICE_ERROR_NO_MEMORY) << "no overflow";
  EXPECT_EQ(sluice_all_gather(job, in, out, UINT64_MAX / 2, &op), SLUICE_ERROR_NO_MEMORY);
  EXPECT_EQ(sluice_all_gather(job, nullptr, out, 8, &op), SLUICE_ERROR_INVALID);
  EXPECT_EQ(sluice_broadcast(job, heap.data(), 8, 0, &op), SLUICE_ERROR_INVALID);
  EXPECT_EQ(sluice_broadcast(job, in, 8, 1, &op), SLUICE_ERROR_INVALID);
  EXPECT_EQ(sluice_allreduce(nullptr, in, out, 1, SLUICE_F32, SLUICE_SUM, nullptr, &op),
            SLUICE_ERROR_INVALID);
  EXPECT_EQ(sluice_allreduce(job, in, out, 1, SLUICE_F32, SLUICE_SUM, nullptr, nullptr),
            SLUICE_ERROR_INVALID);
  EXPECT_EQ(sluice_wait(job, 1, -1, nullptr), SLUICE_ERROR_INVALID);
  EXPECT_EQ(op, 0U);
  EXPECT_EQ(fake.descriptors_read(), 0);
  // The end of the arena: the last byte may be used, not one more.
  sluice_job_info info{};
  info.size = sizeof(info);
  ASSERT_EQ(sluice_job_get_info(job, &info), SLUICE_SUCCESS);
  auto* last = reinterpret_cast<char*>(in) + info.arena_bytes - 64;  // `in` is the first slot
  EXPECT_EQ(allreduce(in, last, 17), SLUICE_ERROR_INVALID);
  ASSERT_EQ(allreduce(in, last, 16), SLUICE_SUCCESS);
  wait_for(job, op);
}

TEST_F(Client, FreeingWhatIsNotOursIsNoticed) {
  daemon();
  const Alone alone(path_);
  auto* buffer = static_cast<char*>(sluice_alloc(alone.job(), 1000));
  int local = 0;
  for (void* wrong :
       {static_cast<void*>(&local), static_cast<void*>(buffer + 64), static_cast<void*>(buffer + 1)}) {
    sluice_free(alone.job(), wrong);
    EXPECT_TRUE(says({"not a buffer of sluice_alloc"}));
  }
  sluice_free(alone.job(), buffer);
  sluice_free(alone.job(), buffer);
  EXPECT_TRUE(says({"freed already"}));
  sluice_free(alone.job(), nullptr);
}

TEST_F(Client, OlderAndNewerStructuresFit) {
  daemon();
  const Alone alone(path_);
  sluice_job* job = alone.job();
  auto* in = alloc<float>(job, 100);
  auto* out = alloc<float>(job, 100);
  sluice_op op = 0;

  // An older program: options end behind `tag`, the report behind `tag`.
  sluice_op_options old{};
  old.size = offsetof(sluice_op_options, deadline_us);
  old.tag = 9;
  old.deadline_us = 0xFFFFFFFF;  // what lies behind an old structure is not read
  old.loss_scale = -1;
  ASSERT_EQ(sluice_allreduce(job, in, out, 100, SLUICE_F32, SLUICE_SUM, &old, &op), SLUICE_SUCCESS);
  sluice_report report;
  std::memset(&report, 0xAB, sizeof(report));
  report.size = offsetof(sluice_report, op_seq);
  ASSERT_EQ(sluice_wait(job, op, kPatienceMs, &report), SLUICE_SUCCESS);
  EXPECT_EQ(report.size, offsetof(sluice_report, op_seq));
  EXPECT_EQ(report.status, SLUICE_OK);
  EXPECT_EQ(report.tag, 9U);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&report);
  for (size_t i = offsetof(sluice_report, op_seq); i < sizeof(report); ++i) ASSERT_EQ(bytes[i], 0xAB) << i;

  // A newer program: longer structures whose end this release does not know.
  struct {
    sluice_op_options options;
    uint64_t more;
  } newer{};
  newer.options.size = sizeof(newer);
  ASSERT_EQ(sluice_allreduce(job, in, out, 100, SLUICE_F32, SLUICE_SUM, &newer.options, &op), SLUICE_SUCCESS);
  struct {
    sluice_report report;
    uint64_t more;
  } newer_report{};
  newer_report.report.size = sizeof(newer_report);
  newer_report.more = 77;
  ASSERT_EQ(sluice_wait(job, op, kPatienceMs, &newer_report.report), SLUICE_SUCCESS);
  EXPECT_EQ(newer_report.more, 0U);
  newer.more = 1;
  EXPECT_EQ(sluice_allreduce(job, in, out, 100, SLUICE_F32, SLUICE_SUM, &newer.options, &op),
            SLUICE_ERROR_INVALID)
      << "it asks for something that this release cannot give";
  EXPECT_TRUE(says({"size"}));

  sluice_op_options unset{};
  EXPECT_EQ(sluice_allreduce(job, in, out, 100, SLUICE_F32, SLUICE_SUM, &unset, &op), SLUICE_ERROR_INVALID);
  sluice_job_info info{};
  EXPECT_EQ(sluice_job_get_info(job, &info), SLUICE_ERROR_INVALID);
  info.size = offsetof(sluice_job_info, nodes);
  info.nodes = 1234;
  EXPECT_EQ(sluice_job_get_info(job, &info), SLUICE_SUCCESS);
  EXPECT_EQ(info.world_size, 1U);
  EXPECT_EQ(info.nodes, 1234U);
}

TEST_F(Client, TheCxxWrapper) {
  daemon();
  sluice::Context context(path_.c_str());
  const sluice_card card = context.card("cxx", 0, 1);
  unsigned char key[32];
  ASSERT_EQ(sluice_key_generate(key), SLUICE_SUCCESS);
  auto options = sluice::join_options("cxx", 0, 1);
  options.cards = &card;
  options.key = key;
  options.max_op_bytes = 1 << 20;
  sluice::Job job(context, options);
  {
    auto in = job.buffer<float>(1000);
    auto out = job.buffer<float>(1000);
    std::iota(in.begin(), in.end(), 0.0F);
    EXPECT_EQ(job.allreduce(in, out).wait(kPatienceMs).status, SLUICE_OK);
    EXPECT_TRUE(std::equal(in.begin(), in.end(), out.begin()));
    EXPECT_EQ(job.allreduce(in, out, 10, SLUICE_MEAN).wait(kPatienceMs).status, SLUICE_OK);
    EXPECT_EQ(job.broadcast(in, 0).wait(kPatienceMs).status, SLUICE_OK);
    EXPECT_EQ(in[999], 999.0F);
    const float mine[] = {1, 2, 3};
    EXPECT_EQ(job.all_gather(std::span<const float>(mine), out).wait(kPatienceMs).status, SLUICE_OK);
    EXPECT_EQ(out[2], 3.0F);
    job.barrier(kPatienceMs);
    EXPECT_THROW(job.allreduce(in, out, 1001, SLUICE_SUM), std::out_of_range);
    try {
      job.buffer<double>(size_t{1} << 40);
      FAIL() << "an arena of that size";
    } catch (const sluice::Failure& failure) {
      EXPECT_EQ(failure.error(), SLUICE_ERROR_NO_MEMORY);
      EXPECT_NE(std::string(failure.what()).find("arena_bytes"), std::string::npos);
    }
    job.leave(kPatienceMs);  // before its buffers: they must not touch what is gone
  }
  EXPECT_THROW(sluice::Context("/nowhere/s.sock", 10), sluice::Failure);
}

}  // namespace
}  // namespace sluice::test
