// The replay window against a model that remembers everything.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>

#include "transport/wire/seal.h"

namespace sluice::wire {
namespace {

class Model {
 public:
  bool accept(uint64_t counter) {
    if (counter == 0 || (newest_ >= ReplayWindow::kWidth && counter <= newest_ - ReplayWindow::kWidth))
      return false;
    if (!seen_.insert(counter).second) return false;
    newest_ = std::max(newest_, counter);
    return true;
  }
  uint64_t newest() const { return newest_; }

 private:
  std::set<uint64_t> seen_;
  uint64_t newest_ = 0;
};

TEST(WireReplay, InOrder) {
  ReplayWindow window;
  for (uint64_t counter = 1; counter < 50'000; ++counter) {
    ASSERT_TRUE(window.would_accept(counter));
    ASSERT_TRUE(window.accept(counter));
    ASSERT_FALSE(window.would_accept(counter));
    ASSERT_FALSE(window.accept(counter));
  }
}

TEST(WireReplay, ZeroIsNoCounter) {
  ReplayWindow window;
  EXPECT_FALSE(window.accept(0));
  EXPECT_TRUE(window.accept(1));
  EXPECT_FALSE(window.accept(0));
}

TEST(WireReplay, EdgesOfTheWindow) {
  for (const uint64_t newest :
       {uint64_t{1'000'000}, uint64_t{1'000'063}, uint64_t{1'000'064}, (uint64_t{1} << 32) + 5}) {
    ReplayWindow window;
    ASSERT_TRUE(window.accept(newest));
    EXPECT_TRUE(window.accept(newest - ReplayWindow::kWidth + 1)) << "the oldest that fits";
    EXPECT_FALSE(window.accept(newest - ReplayWindow::kWidth + 1));
    EXPECT_FALSE(window.accept(newest - ReplayWindow::kWidth)) << "one too old";
  }
}

TEST(WireReplay, EveryDistanceIsSeenOnce) {
  ReplayWindow window;
  const uint64_t newest = 100'000;
  ASSERT_TRUE(window.accept(newest));
  for (uint64_t back = 1; back < ReplayWindow::kWidth; ++back)
    ASSERT_TRUE(window.accept(newest - back)) << back;
  for (uint64_t back = 0; back < ReplayWindow::kWidth; ++back)
    ASSERT_FALSE(window.accept(newest - back)) << back;
}

TEST(WireReplay, AgreesWithTheModel) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    std::mt19937_64 random(seed);
    ReplayWindow window;
    Model model;
    // Forward jumps from one to beyond the whole window, with replays and stragglers of every age between.
    const uint64_t jump = uint64_t{1} << seed % 16;
    for (int step = 0; step < 20'000; ++step) {
      uint64_t counter;
      switch (random() % 4) {
        case 0:
          counter = model.newest() + 1;
          break;
        case 1:
          counter = model.newest() + random() % jump;
          break;
        case 2:
          counter = model.newest() - std::min(model.newest(), random() % 9000);
          break;
        default:
          counter = model.newest() - std::min(model.newest(), random() % 130);
          break;
      }
      const bool expected = model.accept(counter);
      ASSERT_EQ(window.would_accept(counter), expected) << "seed " << seed << " counter " << counter;
      ASSERT_EQ(window.accept(counter), expected) << "seed " << seed << " counter " << counter;
    }
  }
}

TEST(WireReplay, TheLastCounterEnds) {
  ReplayWindow window;
  EXPECT_TRUE(window.accept(UINT64_MAX - 1));
  EXPECT_TRUE(window.accept(UINT64_MAX));
  EXPECT_FALSE(window.accept(UINT64_MAX));
  EXPECT_FALSE(window.accept(5));
}

}  // namespace
}  // namespace sluice::wire
