// Joining and waiting in a few words, for the tests of libsluice against the fake daemon.
#pragma once

#include <gtest/gtest.h>
#include <sluice.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace sluice::test {

inline constexpr int kPatienceMs = 20'000;  // for what must succeed; never reached when all is well

inline sluice_context* open_at(const std::string& path) {
  sluice_context* context = nullptr;
  EXPECT_EQ(sluice_open(path.c_str(), kPatienceMs, &context), SLUICE_SUCCESS) << sluice_last_error();
  return context;
}

inline sluice_join_options join_options(uint32_t rank, uint32_t world_size) {
  sluice_join_options options{};
  options.size = sizeof(options);
  options.job = "job";
  options.rank = rank;
  options.world_size = world_size;
  options.max_op_bytes = 8 << 20;
  options.arena_bytes = 64 << 20;
  options.timeout_ms = kPatienceMs;
  return options;
}

// One rank with a connection of its own.
struct Rank {
  sluice_context* context = nullptr;
  sluice_job* job = nullptr;
};

// All ranks of a job, by cards; each joins in a thread, as they wait for each other.
inline std::vector<Rank> join_all(const std::string& path, uint32_t world_size,
                                  uint64_t arena_bytes = 64 << 20) {
  std::vector<Rank> ranks(world_size);
  std::vector<sluice_card> cards(world_size);
  unsigned char key[32];
  EXPECT_EQ(sluice_key_generate(key), SLUICE_SUCCESS);
  for (uint32_t r = 0; r < world_size; ++r) {
    ranks[r].context = open_at(path);
    EXPECT_EQ(sluice_card_get(ranks[r].context, "job", r, world_size, kPatienceMs, &cards[r]), SLUICE_SUCCESS)
        << sluice_last_error();
  }
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < world_size; ++r) {
    threads.emplace_back([&, r] {
      auto options = join_options(r, world_size);
      options.arena_bytes = arena_bytes;
      options.cards = cards.data();
      options.key = key;
      EXPECT_EQ(sluice_join(ranks[r].context, &options, &ranks[r].job), SLUICE_SUCCESS)
          << sluice_last_error();
    });
  }
  for (auto& thread : threads) thread.join();
  return ranks;
}

inline void leave_all(std::vector<Rank>& ranks) {
  for (Rank& rank : ranks) {
    EXPECT_EQ(sluice_leave(rank.job, kPatienceMs), SLUICE_SUCCESS) << sluice_last_error();
    sluice_close(rank.context);
  }
  ranks.clear();
}

// A world of one rank: nobody else to wait for.
struct Alone {
  explicit Alone(const std::string& path, uint64_t arena_bytes = 64 << 20)
      : ranks(join_all(path, 1, arena_bytes)) {}
  ~Alone() {
    if (!ranks.empty()) leave_all(ranks);
  }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;
  // For tests in which the daemon is gone.
  int leave_lost() {
    const int error = sluice_leave(ranks[0].job, 1000);
    sluice_close(ranks[0].context);
    ranks.clear();
    return error;
  }
  sluice_job* job() const { return ranks[0].job; }
  std::vector<Rank> ranks;
};

template <typename T>
T* alloc(sluice_job* job, size_t count) {
  void* buffer = sluice_alloc(job, count * sizeof(T));
  EXPECT_NE(buffer, nullptr) << sluice_last_error();
  return static_cast<T*>(buffer);
}

inline sluice_report wait_for(sluice_job* job, sluice_op op) {
  sluice_report report{};
  report.size = sizeof(report);
  EXPECT_EQ(sluice_wait(job, op, kPatienceMs, &report), SLUICE_SUCCESS) << sluice_last_error();
  return report;
}

inline testing::AssertionResult says(const std::vector<std::string>& words) {
  const std::string text = sluice_last_error();
  for (const auto& word : words) {
    if (text.find(word) == std::string::npos) {
      return testing::AssertionFailure() << "'" << text << "' does not say '" << word << "'";
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace sluice::test
