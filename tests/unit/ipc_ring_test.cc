#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/ipc/doorbell.h"
#include "base/ipc/ring.h"
#include "base/mapping.h"
#include "base/unique_fd.h"
#include "tests/unit/ipc_support.h"

namespace sluice::ipc {
namespace {

// Both pages in ordinary memory: one mapping, so that ThreadSanitizer sees both sides.
struct Pages {
  std::unique_ptr<ControlPage> control = std::make_unique<ControlPage>();
  std::unique_ptr<SubmitPage> submit = std::make_unique<SubmitPage>();
};

Descriptor numbered(uint64_t n) {
  Descriptor d;
  d.op_seq = static_cast<uint32_t>(n);
  d.count = n * 3;
  d.contribution = ~n;
  d.cookie = n ^ 0x5555'5555'5555'5555ULL;
  return d;
}

bool is_numbered(const Descriptor& d, uint64_t n) {
  const Descriptor wanted = numbered(n);
  return std::memcmp(&d, &wanted, sizeof(d)) == 0;
}

TEST(Ring, EveryFillLevelAtEveryOffset) {
  Pages pages;
  auto writer = descriptor_writer(*pages.submit, *pages.control, 3);
  auto reader = descriptor_reader(*pages.control, *pages.submit, 3);
  uint64_t in = 0;
  uint64_t out = 0;
  Descriptor d;
  for (uint32_t offset = 0; offset < kRingEntries; ++offset) {
    for (uint32_t fill = 0; fill <= kRingEntries; ++fill) {
      ASSERT_EQ(writer.free_slots(), kRingEntries);
      for (uint32_t i = 0; i < fill; ++i) ASSERT_EQ(writer.push(numbered(in++)), RingState::kOk);
      ASSERT_EQ(writer.free_slots(), kRingEntries - fill);
      if (fill == kRingEntries) {
        ASSERT_EQ(writer.push(numbered(in)), RingState::kFull);
      }
      for (uint32_t i = 0; i < fill; ++i) {
        ASSERT_EQ(reader.peek(&d), RingState::kOk);
        ASSERT_TRUE(is_numbered(d, out)) << "offset " << offset << " fill " << fill << " entry " << i;
        ASSERT_EQ(reader.peek(&d), RingState::kOk);  // still there
        reader.advance();
        ++out;
      }
      ASSERT_EQ(reader.peek(&d), RingState::kEmpty);
    }
    ASSERT_EQ(writer.push(numbered(in++)), RingState::kOk);  // the next offset
    ASSERT_EQ(reader.pop(&d), RingState::kOk);
    ++out;
  }
  EXPECT_EQ(writer.written(), in);
  EXPECT_EQ(reader.read(), out);
}

TEST(Ring, LanesAndDirectionsShareNothing) {
  Pages pages;
  for (uint32_t lane = 0; lane < kMaxLanes; ++lane) {
    auto down = descriptor_writer(*pages.submit, *pages.control, lane);
    auto up = completion_writer(*pages.control, *pages.submit, lane);
    Completion c;
    c.op_seq = 1000 + lane;
    ASSERT_EQ(down.push(numbered(lane)), RingState::kOk);
    ASSERT_EQ(up.push(c), RingState::kOk);
  }
  for (uint32_t lane = 0; lane < kMaxLanes; ++lane) {
    auto down = descriptor_reader(*pages.control, *pages.submit, lane);
    auto up = completion_reader(*pages.submit, *pages.control, lane);
    Descriptor d;
    Completion c;
    ASSERT_EQ(down.pop(&d), RingState::kOk);
    EXPECT_TRUE(is_numbered(d, lane));
    ASSERT_EQ(up.pop(&c), RingState::kOk);
    EXPECT_EQ(c.op_seq, 1000 + lane);
    EXPECT_EQ(down.pop(&d), RingState::kEmpty);
    EXPECT_EQ(up.pop(&c), RingState::kEmpty);
  }
}

TEST(Ring, ReaderRefusesImpossibleTail) {
  for (const uint64_t tail : {uint64_t{kRingEntries} + 1, uint64_t{1} << 32, UINT64_MAX, uint64_t{1} << 63}) {
    Pages pages;
    auto reader = descriptor_reader(*pages.control, *pages.submit, 0);
    pages.submit->submit_tail[0].value = tail;
    Descriptor d = numbered(7);
    EXPECT_EQ(reader.look(), RingState::kBroken) << tail;
    EXPECT_EQ(reader.pop(&d), RingState::kBroken) << tail;
    EXPECT_TRUE(is_numbered(d, 7)) << "nothing may be read";
    EXPECT_EQ(pages.control->submit_head[0].value, 0U);
  }
}

TEST(Ring, WriterRefusesImpossibleHead) {
  Pages pages;
  auto writer = completion_writer(*pages.control, *pages.submit, 0);
  for (uint32_t i = 0; i < kRingEntries; ++i) ASSERT_EQ(writer.push({}), RingState::kOk);
  for (const uint64_t head : {uint64_t{kRingEntries} + 1, UINT64_MAX, uint64_t{1} << 40}) {
    pages.submit->complete_head[0].value = head;
    EXPECT_EQ(writer.push({}), RingState::kBroken) << head;
    EXPECT_EQ(writer.free_slots(), 0U) << head;
    EXPECT_EQ(pages.control->complete_tail[0].value, kRingEntries) << "nothing may be written";
  }
  pages.submit->complete_head[0].value = 1;  // honest again
  EXPECT_EQ(writer.push({}), RingState::kOk);
  EXPECT_EQ(writer.push({}), RingState::kFull);
}

TEST(Ring, AnIndexThatGoesBackwardsHidesEntriesAndNoMore) {
  Pages pages;
  auto writer = descriptor_writer(*pages.submit, *pages.control, 0);
  auto reader = descriptor_reader(*pages.control, *pages.submit, 0);
  for (uint64_t i = 0; i < 10; ++i) ASSERT_EQ(writer.push(numbered(i)), RingState::kOk);
  pages.submit->submit_tail[0].value = 4;
  Descriptor d;
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(reader.pop(&d), RingState::kOk);
    EXPECT_TRUE(is_numbered(d, i));
  }
  EXPECT_EQ(reader.pop(&d), RingState::kEmpty);
  pages.submit->submit_tail[0].value = 3;  // behind the reader: 2^64 - 1 apart
  EXPECT_EQ(reader.pop(&d), RingState::kBroken);
}

TEST(Ring, TwoThreadsKeepOrderAndContent) {
  constexpr uint64_t kEntries = 400'000;
  Pages pages;
  std::thread producer([&] {
    auto writer = descriptor_writer(*pages.submit, *pages.control, 1);
    for (uint64_t i = 0; i < kEntries; ++i) {
      const Descriptor d = numbered(i);
      while (writer.push(d) == RingState::kFull) std::this_thread::yield();
    }
  });
  auto reader = descriptor_reader(*pages.control, *pages.submit, 1);
  uint64_t wrong = 0;
  Descriptor d;
  for (uint64_t i = 0; i < kEntries;) {
    const RingState state = reader.pop(&d);
    if (state == RingState::kEmpty) {
      std::this_thread::yield();
      continue;
    }
    if (state != RingState::kOk || !is_numbered(d, i)) ++wrong;
    ++i;
  }
  producer.join();
  EXPECT_EQ(wrong, 0U);
}

TEST(Ring, PayloadWrittenBeforePushIsSeenAfterPop) {
  // What the arena relies on. Plain memory on purpose: ThreadSanitizer reports a missing release or acquire.
  constexpr uint64_t kRounds = 100'000;
  Pages pages;
  std::vector<uint64_t> payload(kRingEntries, 0);
  std::thread producer([&] {
    auto down = descriptor_writer(*pages.submit, *pages.control, 0);
    auto up = completion_reader(*pages.submit, *pages.control, 0);
    Completion c;
    for (uint64_t i = 0; i < kRounds; ++i) {
      if (i >= kRingEntries) {  // the slot is free when the completion of its last use is here
        while (up.pop(&c) != RingState::kOk) std::this_thread::yield();
      }
      payload[i % kRingEntries] = i * 7;
      while (down.push(numbered(i)) != RingState::kOk) std::this_thread::yield();
    }
  });
  auto down = descriptor_reader(*pages.control, *pages.submit, 0);
  auto up = completion_writer(*pages.control, *pages.submit, 0);
  uint64_t wrong = 0;
  Descriptor d;
  for (uint64_t i = 0; i < kRounds; ++i) {
    while (down.pop(&d) != RingState::kOk) std::this_thread::yield();
    if (payload[i % kRingEntries] != i * 7) ++wrong;
    Completion c;
    while (up.push(c) == RingState::kFull) std::this_thread::yield();
  }
  producer.join();
  EXPECT_EQ(wrong, 0U);
}

Report report_filled_with(uint32_t op_seq, char letter) {
  Report report;
  report.op_seq = op_seq;
  report.ranges = kReportRanges;
  report.ranges_total = static_cast<uint32_t>(letter);
  std::memset(report.text, letter, sizeof(report.text) - 1);
  for (MissingRange& range : report.range) range = {static_cast<uint64_t>(letter), 1, 2};
  return report;
}

TEST(Report, BelongsToOneOpOnly) {
  Pages pages;
  Report report;
  EXPECT_FALSE(read_report(*pages.control, 0, 0, &report)) << "never written";
  write_report(*pages.control, 0, report_filled_with(5, 'a'));
  ASSERT_TRUE(read_report(*pages.control, 0, 5, &report));
  EXPECT_EQ(std::string(report.text), std::string(kReportText - 1, 'a'));
  EXPECT_EQ(report.ranges, kReportRanges);
  EXPECT_EQ(report.range[kReportRanges - 1].first, uint64_t{'a'});
  EXPECT_FALSE(read_report(*pages.control, 0, 5 + kWindow, &report)) << "the same slot, a later op";
  EXPECT_FALSE(read_report(*pages.control, 1, 5, &report)) << "another lane";
}

TEST(Report, HostileContentIsCutToSize) {
  Pages pages;
  Report report = report_filled_with(9, 'x');
  std::memset(report.text, 'x', sizeof(report.text));  // no terminator
  report.ranges = UINT32_MAX;
  write_report(*pages.control, 0, report);
  Report seen;
  ASSERT_TRUE(read_report(*pages.control, 0, 9, &seen));
  EXPECT_EQ(std::strlen(seen.text), kReportText - 1);
  EXPECT_EQ(seen.ranges, kReportRanges);
}

TEST(Report, AWriterThatDiedInsideDoesNotHoldTheReader) {
  Pages pages;
  write_report(*pages.control, 0, report_filled_with(1, 'x'));
  pages.control->report[0][1].version |= 1;
  Report seen;
  EXPECT_FALSE(read_report(*pages.control, 0, 1, &seen));
}

TEST(Report, IsNeverTorn) {
  Pages pages;
  std::atomic<bool> stop{false};
  write_report(*pages.control, 2, report_filled_with(3, 'a'));
  std::thread lane([&] {
    for (int i = 0; !stop; ++i)
      write_report(*pages.control, 2, report_filled_with(3, static_cast<char>('a' + i % 26)));
  });
  int read = 0;
  int torn = 0;
  for (int i = 0; i < 20'000; ++i) {
    Report report;
    if (!read_report(*pages.control, 2, 3, &report)) continue;
    ++read;
    const auto letter = static_cast<char>(report.ranges_total);
    if (report.text[0] != letter || report.text[kReportText - 2] != letter ||
        report.range[0].first != static_cast<uint64_t>(letter) ||
        report.range[kReportRanges - 1].first != static_cast<uint64_t>(letter)) {
      ++torn;
    }
  }
  stop = true;
  lane.join();
  EXPECT_EQ(torn, 0);
  EXPECT_GT(read, 0);
}

// --- Doorbells -------------------------------------------------------------------------------------------------------

// Two threads play client and lane: each sleeps whenever it has nothing to do. A lost wake-up would leave one of them
// asleep until its time-out, which is far longer than the whole test.
TEST(Doorbell, NoWakeUpIsLost) {
  constexpr uint32_t kRounds = 20'000;
  constexpr Micros kLost = 5 * kMicrosPerSecond;
  Pages pages;
  const UniqueFd event(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  ASSERT_TRUE(event.valid());
  std::atomic<uint32_t> lost{0};
  std::atomic<uint32_t> lane_sleeps{0};

  std::thread lane([&] {
    test::Random random(1);
    auto reader = descriptor_reader(*pages.control, *pages.submit, 0);
    auto writer = completion_writer(*pages.control, *pages.submit, 0);
    for (uint32_t done = 0; done < kRounds;) {
      Descriptor d;
      if (reader.pop(&d) == RingState::kOk) {
        for (uint64_t spin = random.below(200); spin > 0; --spin) cpu_relax();
        Completion c;
        c.op_seq = d.op_seq;
        ASSERT_EQ(writer.push(c), RingState::kOk);
        wake_client(*pages.control, *pages.submit);
        ++done;
        continue;
      }
      lane_sleeps_soon(*pages.control, 0);
      full_fence();
      if (reader.look() == RingState::kEmpty) {
        ++lane_sleeps;
        pollfd entry{event.get(), POLLIN, 0};
        if (::poll(&entry, 1, static_cast<int>(kLost / kMicrosPerMilli)) == 0) ++lost;
      }
      lane_awake(*pages.control, 0);
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t ignored = ::read(event.get(), &count, sizeof(count));
    }
  });

  test::Random random(2);
  auto writer = descriptor_writer(*pages.submit, *pages.control, 0);
  auto reader = completion_reader(*pages.submit, *pages.control, 0);
  uint32_t client_sleeps = 0;
  for (uint32_t i = 0; i < kRounds; ++i) {
    for (uint64_t spin = random.below(200); spin > 0; --spin) cpu_relax();
    ASSERT_EQ(writer.push(numbered(i)), RingState::kOk);
    ring_lane(*pages.control, 0, event.get());
    Completion c;
    for (;;) {
      const uint32_t seen = wake_seen(*pages.control);
      if (reader.pop(&c) == RingState::kOk) break;
      ++client_sleeps;
      const Micros before = monotonic_micros();
      wait_for_wake(*pages.control, *pages.submit, seen, kLost);
      if (monotonic_micros() - before >= kLost) ++lost;
    }
    ASSERT_EQ(c.op_seq, i);
  }
  lane.join();
  EXPECT_EQ(lost, 0U);
  EXPECT_GT(lane_sleeps + client_sleeps, kRounds / 100) << "nobody slept: the test tested nothing";
  EXPECT_EQ(pages.submit->client_waits.value, 0U);
}

// Pins the calling thread to the `index`-th CPU that this process may use. False when there are fewer.
bool pin_to(int index) {
  static const cpu_set_t allowed = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    ::sched_getaffinity(0, sizeof(set), &set);
    return set;
  }();
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return ::pthread_setaffinity_np(::pthread_self(), sizeof(one), &one) == 0;
  }
  return false;
}

// The narrow window of the client-to-lane direction, hit again and again: in every round both sides do their store and
// their load at the same moment. Without the fences both may miss each other, on x86 too; then "the lane saw nothing"
// and "the client woke nobody" are true at once.
TEST(Doorbell, LaneAndClientNeverMissEachOther) {
  constexpr uint32_t kRounds = 100'000;
  constexpr Micros kEnough = 5 * kMicrosPerSecond;  // on a busy machine
  Pages pages;
  const UniqueFd event(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  std::atomic<uint32_t> round{0};     // what the client has begun
  std::atomic<uint32_t> rung{0};      // where it has pushed and looked whether the lane sleeps
  std::atomic<uint32_t> answered{0};  // what the lane has finished
  std::atomic<bool> lane_saw{false};
  std::atomic<bool> lane_pinned{false};
  std::atomic<bool> client_pinned{false};  // on one CPU the two never collide
  std::thread lane([&] {
    lane_pinned = pin_to(1);
    auto reader = descriptor_reader(*pages.control, *pages.submit, 0);
    Descriptor d;
    for (uint32_t i = 1;; ++i) {
      for (int spins = 0; round.load(std::memory_order_acquire) < i; ++spins) {
        if (spins > 2000) std::this_thread::yield();
      }
      if (round.load(std::memory_order_relaxed) == UINT32_MAX) return;
      lane_sleeps_soon(*pages.control, 0);
      full_fence();
      const bool saw = reader.look() == RingState::kOk;
      lane_saw.store(saw, std::memory_order_relaxed);
      for (int spins = 0; rung.load(std::memory_order_acquire) < i;
           ++spins) {  // "asleep" until the client has looked
        if (spins > 2000) std::this_thread::yield();
      }
      if (reader.pop(&d) != RingState::kOk) std::abort();
      lane_awake(*pages.control, 0);
      answered.store(i, std::memory_order_release);
    }
  });
  auto writer = descriptor_writer(*pages.submit, *pages.control, 0);
  test::Random random(3);
  std::thread client([&] {
    client_pinned = pin_to(0);
    const Micros end = monotonic_micros() + kEnough;
    uint32_t missed = 0;
    uint32_t saw = 0;
    uint32_t woke = 0;
    uint32_t rounds = 0;
    for (; rounds < kRounds && monotonic_micros() < end; ++rounds) {
      round.store(rounds + 1, std::memory_order_release);
      for (uint64_t spin = random.below(1500); spin > 0; --spin) asm volatile("" ::: "memory");
      EXPECT_EQ(writer.push(numbered(rounds)), RingState::kOk);
      const bool rang = ring_lane(*pages.control, 0, event.get());
      rung.store(rounds + 1, std::memory_order_release);
      for (int spins = 0; answered.load(std::memory_order_acquire) != rounds + 1; ++spins) {
        if (spins > 2000) std::this_thread::yield();
      }
      const bool lane_did = lane_saw.load(std::memory_order_relaxed);
      missed += !lane_did && !rang ? 1 : 0;
      saw += lane_did ? 1 : 0;
      woke += rang ? 1 : 0;
    }
    round.store(UINT32_MAX, std::memory_order_release);
    EXPECT_EQ(missed, 0U) << "of " << rounds;
    std::printf("%u rounds: the lane saw the work in %u, was rung in %u\n", rounds, saw, woke);
  });
  client.join();
  lane.join();
  if (!lane_pinned || !client_pinned) GTEST_SKIP() << "needs two CPUs to say anything";
}

TEST(Doorbell, AwakePeersCostNoSystemCall) {
  Pages pages;
  EXPECT_FALSE(ring_lane(*pages.control, 0, -1));
  EXPECT_FALSE(wake_client(*pages.control, *pages.submit));
  lane_sleeps_soon(*pages.control, 0);
  const UniqueFd event(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  EXPECT_TRUE(ring_lane(*pages.control, 0, event.get()));
  uint64_t count = 0;
  EXPECT_EQ(::read(event.get(), &count, sizeof(count)), static_cast<ssize_t>(sizeof(count)));
  EXPECT_FALSE(ring_lane(*pages.control, 1, event.get())) << "another lane sleeps, not this one";
}

TEST(Doorbell, WaitReturnsAtOnceWhenTheWordHasMoved) {
  Pages pages;
  const uint32_t seen = wake_seen(*pages.control);
  wake_client(*pages.control, *pages.submit);
  const Micros before = monotonic_micros();
  wait_for_wake(*pages.control, *pages.submit, seen, 10 * kMicrosPerSecond);
  EXPECT_LT(monotonic_micros() - before, 5 * kMicrosPerSecond);
}

// As between two processes: the client has the control page read-only.
TEST(Doorbell, FutexWorksAcrossMappingsAndReadOnly) {
  auto fd = create_memfd("doorbell-test", sizeof(ControlPage));
  ASSERT_TRUE(fd.ok()) << fd.error().message;
  auto daemon_side = Mapping::map(fd->get(), sizeof(ControlPage), Access::kReadWrite);
  auto client_side = Mapping::map(fd->get(), sizeof(ControlPage), Access::kRead);
  ASSERT_TRUE(daemon_side.ok() && client_side.ok());
  auto* control = new (daemon_side->data()) ControlPage();
  const auto& seen_by_client = *reinterpret_cast<const ControlPage*>(client_side->data());
  auto submit = std::make_unique<SubmitPage>();

  const uint32_t seen = wake_seen(seen_by_client);
  std::thread lane([&] {
    while (submit->client_waits.value == 0) std::this_thread::yield();
    wake_client(*control, *submit);
  });
  const Micros before = monotonic_micros();
  while (wake_seen(seen_by_client) == seen && monotonic_micros() - before < 20 * kMicrosPerSecond) {
    wait_for_wake(seen_by_client, *submit, seen, 10 * kMicrosPerSecond);
  }
  EXPECT_LT(monotonic_micros() - before, 5 * kMicrosPerSecond);
  lane.join();
  EXPECT_NE(wake_seen(seen_by_client), seen);
}

}  // namespace
}  // namespace sluice::ipc
