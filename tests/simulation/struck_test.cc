// Over all seeds that have run: nothing of the fault menu and no reason of a drop is left out.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/simulation/faults.h"
#include "tests/simulation/run.h"
#include "tests/simulation/swarm.h"

namespace sluice::simulation {
namespace {

constexpr uint64_t kLeastRuns = 20;

TEST(Struck, SaysWhatItReads) {
  Options options;
  RunFacts facts;
  facts.network.lost = 3;
  facts.crashes = 1;
  facts.drops[static_cast<size_t>(wire::Drop::kTag)] = 7;
  const Struck one(options, facts);
  EXPECT_EQ(one.text(), "lost=3 crash=1 drop.tag=7");
  Struck sum;
  EXPECT_TRUE(sum.add(one.text()));
  EXPECT_TRUE(sum.add(one.text()));
  EXPECT_TRUE(sum.add(""));
  EXPECT_EQ(sum.runs_with(Fault::kLost), 2U);
  EXPECT_EQ(sum.runs_with(Fault::kReplayed), 0U);
  EXPECT_EQ(sum.drops(wire::Drop::kTag), 14U);
  for (const char* wrong : {"lost", "lost=", "lost=x", "lost=0", "found=1", "drop.lost=1"}) {
    EXPECT_FALSE(Struck().add(wrong)) << wrong;
  }
}

TEST(Struck, EveryFaultAndEveryReason) {
  const char* folder = std::getenv("SLUICE_STRUCK_DIR");
  if (folder == nullptr) GTEST_SKIP() << "needs the logs of simulation_swarm_test: run it by ctest";
  Struck sum;
  uint64_t seeds = 0, runs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path());
    std::string line, last;
    for (; std::getline(file, line); last = line) {
      if (line == "end") continue;
      const size_t colon = line.find(": ");
      ASSERT_NE(colon, std::string::npos) << entry.path() << ": " << line;
      ASSERT_TRUE(sum.add(std::string_view(line).substr(colon + 2))) << entry.path() << ": " << line;
      ++runs;
      seeds += line.rfind("swarm ", 0) == 0 ? 1 : 0;
    }
    EXPECT_EQ(last, "end") << entry.path() << " is not complete";
  }
  if (seeds < kCiSeeds) {
    GTEST_SKIP() << "needs " << kCiSeeds << " seeds of the swarm, SLUICE_SEEDS allowed " << seeds;
  }
  std::printf("%llu runs\n", static_cast<unsigned long long>(runs));
  for (size_t i = 0; i < kFaults; ++i) {
    const auto fault = static_cast<Fault>(i);
    std::printf("  %-20s in %6llu runs\n", fault_name(fault),
                static_cast<unsigned long long>(sum.runs_with(fault)));
    EXPECT_GE(sum.runs_with(fault), kLeastRuns) << fault_name(fault);
  }
  for (size_t i = 1; i < kDrops; ++i) {
    const auto reason = static_cast<wire::Drop>(i);
    std::printf("  drop %-15s %8llu times\n", wire::drop_name(reason),
                static_cast<unsigned long long>(sum.drops(reason)));
    EXPECT_GE(sum.drops(reason), 1U) << wire::drop_name(reason);
  }
}

}  // namespace
}  // namespace sluice::simulation
