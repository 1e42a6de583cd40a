// Scenarios drawn from seeds. SLUICE_SEEDS sets the number of seeds of the swarm; the other scenarios run a share of it.
// A seed that fails prints the command that runs it again.
#include "tests/simulation/swarm.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "tests/simulation/run.h"

namespace sluice::simulation {
namespace {

constexpr uint64_t kShards = 8;
constexpr uint64_t kTwiceEvery = 50;

uint64_t seeds() {
  const char* given = std::getenv("SLUICE_SEEDS");
  const uint64_t wanted = given == nullptr ? 0 : std::strtoull(given, nullptr, 10);
  return wanted == 0 ? kCiSeeds : wanted;
}

// What struck each seed, a file per process; struck_test.cc adds them up. Null: nobody wants to know.
class Log {
 public:
  explicit Log(const std::string& name) {
    const char* folder = std::getenv("SLUICE_STRUCK_DIR");
    if (folder == nullptr) return;
    file_ = std::fopen((std::string(folder) + "/" + name).c_str(), "w");
    EXPECT_NE(file_, nullptr) << folder << ": no such folder";
  }
  ~Log() {
    if (file_ == nullptr) return;
    std::fputs("end\n", file_);
    std::fclose(file_);
  }
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;
  void add(const std::string& line) {
    if (file_ != nullptr) std::fprintf(file_, "%s\n", line.c_str());
  }

 private:
  std::FILE* file_ = nullptr;
};

// Seeds first, first + step ... up to last.
void expect_clean(const std::string& scenario, uint64_t first, uint64_t last, uint64_t step,
                  const std::string& log_name) {
  uint64_t results = 0;
  Log log(log_name + ".log");
  for (uint64_t seed = first; seed <= last; seed += step) {
    const Options options = draw(scenario, seed);
    const RunResult result = run(options);
    for (const uint64_t count : result.facts.results) results += count;
    log.add(log_line(options, result));
    ASSERT_TRUE(result.ok()) << "seed " << seed << " of " << scenario << ": " << report(options, result);
    if (seed % kTwiceEvery == 0) {
      ASSERT_EQ(run(options).facts.hash, result.facts.hash)
          << "a second run went another way: " << replay_command(options);
    }
  }
  EXPECT_GT(results, 0U);
}

class SwarmTest : public testing::TestWithParam<uint64_t> {};

TEST_P(SwarmTest, KeepsItsPromises) {
  expect_clean("swarm", GetParam() + 1, seeds(), kShards, "swarm-" + std::to_string(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Shards, SwarmTest, testing::Range(uint64_t{0}, kShards),
                         [](const auto& param) { return std::to_string(param.param); });

// The scenarios that are not the swarm, with their share of its seeds in hundredths.
struct Share {
  const char* scenario;
  uint64_t percent;
};
void PrintTo(const Share& share, std::ostream* out) { *out << share.scenario; }

class ScenarioTest : public testing::TestWithParam<Share> {};

TEST_P(ScenarioTest, KeepsItsPromises) {
  const auto [scenario, percent] = GetParam();
  expect_clean(scenario, 1, std::max<uint64_t>(1, seeds() * percent / 100), 1, scenario);
}

INSTANTIATE_TEST_SUITE_P(All, ScenarioTest,
                         testing::Values(Share{"base", 10}, Share{"target", 6}, Share{"lanes", 10},
                                         Share{"crash", 12}, Share{"abort", 10}, Share{"mismatch", 15},
                                         Share{"calm", 8}, Share{"wide", 1}),
                         [](const auto& param) { return std::string(param.param.scenario); });

TEST(RegressionTest, SeedsThatOnceFoundABug) {
  const char* path = std::getenv("SLUICE_REGRESSION_SEEDS");
  ASSERT_NE(path, nullptr)
      << "SLUICE_REGRESSION_SEEDS names tests/simulation/regression_seeds.txt; ctest sets it";
  std::ifstream file(path);
  ASSERT_TRUE(file.good()) << path;
  std::string line;
  uint64_t count = 0;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string scenario;
    uint64_t seed = 0;
    ASSERT_TRUE(words >> scenario >> seed) << path << ": " << line;
    ASSERT_NE(find_scenario(scenario), nullptr) << path << ": " << line;
    expect_clean(scenario, seed, seed, 1, "regression");
    ++count;
  }
  EXPECT_GT(count, 0U);
}

}  // namespace
}  // namespace sluice::simulation
