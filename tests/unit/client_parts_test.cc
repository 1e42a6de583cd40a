// The parts of libsluice that need no daemon.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "lib/client/arena.h"
#include "lib/client/error_text.h"
#include "lib/client/fork_guard.h"
#include "lib/client/ops.h"
#include "tests/unit/ipc_support.h"

namespace sluice::client {
namespace {

constexpr uint64_t kGranule = ArenaAllocator::kGranule;

// What an arena should do, written down as plainly as possible: one flag per granule, searched from the front.
class ArenaModel {
 public:
  explicit ArenaModel(size_t granules) : taken_(granules, false) {}
  std::optional<uint64_t> allocate(uint64_t bytes) {
    const size_t wanted = std::max<size_t>((bytes + kGranule - 1) / kGranule, 1);
    size_t run = 0;
    for (size_t i = 0; i < taken_.size(); ++i) {
      run = taken_[i] ? 0 : run + 1;
      if (run < wanted) continue;
      const size_t first = i + 1 - wanted;
      std::fill(taken_.begin() + static_cast<std::ptrdiff_t>(first),
                taken_.begin() + static_cast<std::ptrdiff_t>(i + 1), true);
      slots_[first * kGranule] = wanted;
      return first * kGranule;
    }
    return std::nullopt;
  }
  void release(uint64_t offset) {
    const auto first = static_cast<std::ptrdiff_t>(offset / kGranule);
    std::fill(taken_.begin() + first, taken_.begin() + first + static_cast<std::ptrdiff_t>(slots_[offset]),
              false);
    slots_.erase(offset);
  }
  uint64_t free_bytes() const {
    return static_cast<uint64_t>(std::count(taken_.begin(), taken_.end(), false)) * kGranule;
  }
  uint64_t largest_free() const {
    uint64_t best = 0;
    uint64_t run = 0;
    for (const bool taken : taken_) {
      run = taken ? 0 : run + 1;
      best = std::max(best, run);
    }
    return best * kGranule;
  }

 private:
  std::vector<bool> taken_;
  std::map<uint64_t, size_t> slots_;
};

TEST(Arena, DoesWhatTheModelDoes) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    test::Random random(seed);
    const size_t granules = 1 + random.below(200);
    ArenaAllocator arena(granules * kGranule + random.below(kGranule));
    ArenaModel model(granules);
    std::vector<uint64_t> held;
    for (int i = 0; i < 3000; ++i) {
      if (held.empty() || random.below(100) < 55) {
        const uint64_t bytes =
            random.below(8) == 0 ? random.below(granules * kGranule * 2) : random.below(kGranule * 6);
        const auto expected = model.allocate(bytes);
        const auto got = arena.allocate(bytes);
        ASSERT_EQ(got, expected) << "seed " << seed << " step " << i << " bytes " << bytes;
        if (got) held.push_back(*got);
      } else {
        const size_t which = random.below(held.size());
        model.release(held[which]);
        ASSERT_TRUE(arena.release(held[which]));
        ASSERT_FALSE(arena.release(held[which])) << "twice";
        held[which] = held.back();
        held.pop_back();
      }
      ASSERT_EQ(arena.free_bytes(), model.free_bytes()) << "seed " << seed << " step " << i;
      ASSERT_EQ(arena.largest_free(), model.largest_free()) << "seed " << seed << " step " << i;
    }
    for (const uint64_t offset : held) ASSERT_TRUE(arena.release(offset));
    EXPECT_EQ(arena.largest_free(), granules * kGranule) << "everything must have merged again";
  }
}

TEST(Arena, Edges) {
  ArenaAllocator arena(1000);  // 15 granules
  EXPECT_EQ(arena.size(), 960U);
  EXPECT_FALSE(arena.allocate(961).has_value());
  EXPECT_FALSE(arena.allocate(UINT64_MAX).has_value()) << "rounding must not overflow";
  EXPECT_EQ(arena.allocate(960), 0U);
  EXPECT_FALSE(arena.allocate(0).has_value()) << "even nothing has an address of its own";
  EXPECT_FALSE(arena.release(64));
  EXPECT_TRUE(arena.release(0));
  EXPECT_EQ(arena.allocate(0), 0U);
  EXPECT_EQ(arena.allocate(1), 64U);
  ArenaAllocator none(63);
  EXPECT_FALSE(none.allocate(1).has_value());
}

TEST(Arena, FourThreads) {
  constexpr size_t kBytes = 1 << 16;
  ArenaAllocator arena(kBytes);
  std::vector<int> owner(kBytes / kGranule, -1);  // plain: ThreadSanitizer sees two owners of one granule
  std::vector<std::thread> threads;
  std::atomic<int> clashes{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      test::Random random(static_cast<uint64_t>(t) + 1);
      for (int i = 0; i < 5000; ++i) {
        const uint64_t granules = 1 + random.below(10);
        const auto offset = arena.allocate(granules * kGranule);
        if (!offset) continue;
        for (uint64_t g = 0; g < granules; ++g) {
          int& mine = owner[*offset / kGranule + g];
          if (mine != -1) ++clashes;
          mine = t;
        }
        for (uint64_t g = 0; g < granules; ++g) owner[*offset / kGranule + g] = -1;
        if (!arena.release(*offset)) ++clashes;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(clashes, 0);
  EXPECT_EQ(arena.largest_free(), kBytes);
}

// --- Ops -------------------------------------------------------------------------------------------------------------

ipc::Completion completion(uint32_t lane, uint32_t op_seq, uint32_t events, Status status = Status::kOk) {
  ipc::Completion c;
  c.lane = static_cast<uint16_t>(lane);
  c.op_seq = op_seq;
  c.events = static_cast<uint8_t>(events);
  c.status = static_cast<uint8_t>(status);
  return c;
}

sluice_report report_of(const OpTable& table, const OpTable::Op& op) {
  sluice_report report{};
  report.size = sizeof(report);
  table.fill(op, &report);
  return report;
}

constexpr uint32_t kBoth = kEventResult | kEventResolved;

TEST(Ops, LanesAreAddedUp) {
  OpTable table(3);
  auto* op = table.open(5, 77);
  ASSERT_NE(op, nullptr);
  for (uint32_t lane = 0; lane < 3; ++lane) {
    EXPECT_EQ(table.events(*op), 0U) << "lane " << lane << " is still missing";
    auto c = completion(lane, 5, kBoth);
    c.blocks_expected = 10;
    c.blocks_received = 10 - lane;
    c.blocks_skipped = 1;
    c.blocks_uncounted = 2;
    c.repaired = 3;
    c.bytes_sent = uint64_t{5} << 32;
    c.total_us = 100 * (3 - lane);
    c.wait_us = 10 * lane;
    c.lag_us = lane;
    c.push_us = 7;
    c.late_nodes = static_cast<uint16_t>(lane);
    c.worst_node = static_cast<uint16_t>(lane == 0 ? UINT16_MAX : lane);
    ASSERT_TRUE(table.apply(lane, c, nullptr));
  }
  EXPECT_EQ(table.events(*op), kBoth);
  const auto report = report_of(table, *op);
  EXPECT_EQ(report.status, SLUICE_OK);
  EXPECT_EQ(report.tag, 77U);
  EXPECT_EQ(report.op_seq, 5U);
  EXPECT_EQ(report.blocks_expected, 30U);
  EXPECT_EQ(report.blocks_received, 27U);
  EXPECT_EQ(report.blocks_skipped, 3U);
  EXPECT_EQ(report.blocks_uncounted, 6U);
  EXPECT_EQ(report.blocks_repaired, 9U);
  EXPECT_EQ(report.bytes_sent, uint64_t{15} << 32);
  EXPECT_EQ(report.total_us, 300U);
  EXPECT_EQ(report.wait_us, 20U);
  EXPECT_EQ(report.lag_us, 2U);
  EXPECT_EQ(report.push_us, 7U);
  EXPECT_EQ(report.late_nodes, 2U);
  EXPECT_EQ(report.worst_node, 2U) << "of the lane that waited longest";
  EXPECT_STREQ(report.text, "");
}

TEST(Ops, TwoEventsOfALaneAreNotCountedTwice) {
  OpTable table(2);
  auto* op = table.open(0, 0);
  for (uint32_t lane = 0; lane < 2; ++lane) {
    auto c = completion(lane, 0, kEventResult, lane == 0 ? Status::kIncomplete : Status::kOk);
    c.blocks_expected = 4;
    c.blocks_received = 3;
    ASSERT_TRUE(table.apply(lane, c, nullptr));
  }
  EXPECT_EQ(table.events(*op), uint32_t{kEventResult});
  auto c = completion(0, 0, kEventResolved);
  c.blocks_expected = 4;
  c.blocks_received = 4;
  ASSERT_TRUE(table.apply(0, c, nullptr));
  EXPECT_EQ(table.events(*op), uint32_t{kEventResult}) << "lane 1 is not resolved";
  ASSERT_TRUE(table.apply(1, completion(1, 0, kEventResolved), nullptr));
  EXPECT_EQ(table.events(*op), kBoth);
  const auto report = report_of(table, *op);
  EXPECT_EQ(report.blocks_expected, 8U) << "a RESOLVED alone takes nothing away";
  EXPECT_EQ(report.blocks_received, 7U);
  EXPECT_EQ(report.status, SLUICE_INCOMPLETE) << "what was once wrong stays in the report";
}

TEST(Ops, TheCauseIsWorseThanItsConsequences) {
  EXPECT_EQ(worse(Status::kAborted, Status::kMismatch), Status::kMismatch);
  EXPECT_EQ(worse(Status::kMismatch, Status::kAborted), Status::kMismatch);
  EXPECT_EQ(worse(Status::kApproximated, Status::kAborted), Status::kAborted);
  EXPECT_EQ(worse(Status::kOk, Status::kIncomplete), Status::kIncomplete);
  EXPECT_EQ(worse(Status::kViewChanged, Status::kPeerLost), Status::kPeerLost);
  EXPECT_EQ(worse(Status::kOpTimeout, Status::kPeerLost), Status::kOpTimeout)
      << "of two causes the first one heard";
}

TEST(Ops, TextAndRangesOfAllLanes) {
  OpTable table(2);
  auto* op = table.open(9, 0);
  for (uint32_t lane = 0; lane < 2; ++lane) {
    ipc::Report report;
    report.op_seq = 9;
    report.ranges = 10;
    report.ranges_total = 100 + lane;
    for (uint32_t i = 0; i < 10; ++i) report.range[i] = {1000 * lane + i, 5, lane};
    std::snprintf(report.text, sizeof(report.text), "%s", lane == 0 ? "" : "node 4 was late");
    ASSERT_TRUE(table.apply(lane, completion(lane, 9, kBoth, Status::kIncomplete), &report));
  }
  const auto report = report_of(table, *op);
  EXPECT_STREQ(report.text, "node 4 was late");
  EXPECT_EQ(report.missing_total, 201U);
  EXPECT_EQ(report.missing_count, 16U);
  EXPECT_EQ(report.missing[9].first, 9U);
  EXPECT_EQ(report.missing[10].first, 1000U);
  EXPECT_EQ(report.missing[10].owner, 1U);
}

TEST(Ops, WindowOfSlots) {
  OpTable table(1);
  for (uint64_t k = 0; k < ipc::kWindow; ++k) ASSERT_NE(table.open(k, 0), nullptr);
  EXPECT_EQ(table.open(ipc::kWindow, 0), nullptr) << "op 0 still holds the slot";
  auto* first = table.find(OpTable::handle_of(0));
  ASSERT_NE(first, nullptr);
  table.forget(first);
  EXPECT_EQ(table.find(OpTable::handle_of(0)), nullptr);
  ASSERT_NE(table.open(ipc::kWindow, 0), nullptr);
  EXPECT_EQ(table.find(OpTable::handle_of(0)), nullptr) << "the slot is another op's now";
  EXPECT_NE(table.find(OpTable::handle_of(ipc::kWindow)), nullptr);
  EXPECT_EQ(table.find(0), nullptr);
  EXPECT_FALSE(table.all_resolved());
}

TEST(Ops, ImpossibleCompletionsAreABrokenDaemon) {
  OpTable table(2);
  table.open(0, 0);
  EXPECT_FALSE(table.apply(0, completion(1, 0, kBoth), nullptr)) << "says another lane";
  EXPECT_FALSE(table.apply(2, completion(2, 0, kBoth), nullptr)) << "there is no lane 2";
  EXPECT_FALSE(table.apply(0, completion(0, 0, 0), nullptr)) << "no event";
  EXPECT_FALSE(table.apply(0, completion(0, 0, 4), nullptr)) << "an event that there is not";
  EXPECT_FALSE(table.apply(0, completion(0, 1, kBoth), nullptr)) << "never submitted";
  EXPECT_TRUE(table.apply(0, completion(0, 0, kBoth), nullptr));
  EXPECT_TRUE(table.apply(1, completion(1, 0, kBoth), nullptr));
  table.forget(table.find(OpTable::handle_of(0)));
  EXPECT_TRUE(table.apply(0, completion(0, 0, kEventResolved), nullptr)) << "late, and of no interest";
}

TEST(Ops, TheLossOfTheDaemonEndsWhatIsOpenAndNothingElse) {
  OpTable table(1);
  auto* done = table.open(0, 0);
  auto* half = table.open(1, 0);
  auto* open = table.open(2, 0);
  table.apply(0, completion(0, 0, kBoth), nullptr);
  table.apply(0, completion(0, 1, kEventResult), nullptr);
  table.fail_all("it died");
  EXPECT_TRUE(table.all_resolved());
  EXPECT_EQ(table.status(*done), Status::kOk);
  EXPECT_EQ(table.status(*half), Status::kDaemonLost);
  EXPECT_EQ(table.status(*open), Status::kDaemonLost);
  EXPECT_EQ(table.events(*open), kBoth);
  EXPECT_STREQ(report_of(table, *open).text, "it died");
  EXPECT_EQ(table.apply(0, completion(0, 2, kBoth), nullptr), true);
  EXPECT_EQ(table.status(*open), Status::kDaemonLost) << "a verdict stays";
}

// --- Error text and fork ---------------------------------------------------------------------------------------------

TEST(ErrorText, BelongsToItsThreadAndIsCut) {
  EXPECT_EQ(fail(SLUICE_ERROR_FULL, "mine"), SLUICE_ERROR_FULL);
  std::thread other([] {
    EXPECT_STREQ(last_error(), "");
    fail(SLUICE_ERROR_INVALID, std::string(5000, 'x'));
    EXPECT_EQ(std::strlen(last_error()), 1023U);
  });
  other.join();
  EXPECT_STREQ(last_error(), "mine");
  fail(SLUICE_ERROR_FULL, std::string_view(last_error()).substr(1));
  EXPECT_STREQ(last_error(), "ine");
}

TEST(ForkGuard, KnowsItsProcess) {
  const ForkGuard guard;
  EXPECT_FALSE(guard.forked());
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(guard.forked() && !ForkGuard().forked() ? 0 : 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace sluice::client
