// base: descriptors, mappings, CPU sets, log, types.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/cpu_set.h"
#include "base/log.h"
#include "base/mapping.h"
#include "base/secret.h"
#include "base/types.h"
#include "base/unique_fd.h"

namespace sluice {
namespace {

bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

TEST(Secret, IsWipedWhereverItWas) {
  alignas(Secret<32>) unsigned char place[sizeof(Secret<32>)];
  auto* secret = new (place) Secret<32>;
  secret->fill(7);
  Secret<32> copy = *secret;
  EXPECT_EQ(copy, *secret);
  secret->~Secret();
  for (const volatile unsigned char& byte : place) ASSERT_EQ(byte, 0);
  EXPECT_EQ(copy[31], 7);
  copy.wipe();
  EXPECT_EQ(copy[31], 0);
}

TEST(UniqueFd, ClosesOnceAndMoves) {
  int raw = -1;
  {
    UniqueFd a(open("/dev/null", O_RDONLY | O_CLOEXEC));
    raw = a.get();
    ASSERT_TRUE(is_open(raw));
    UniqueFd b(std::move(a));
    EXPECT_FALSE(a.valid());  // NOLINT(bugprone-use-after-move)
    EXPECT_EQ(b.get(), raw);
    UniqueFd c;
    c = std::move(b);
    EXPECT_EQ(c.get(), raw);
    UniqueFd d(c.release());
    EXPECT_FALSE(c.valid());
    EXPECT_TRUE(is_open(raw));
    d.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
    EXPECT_NE(d.get(), -1);
  }
  EXPECT_FALSE(is_open(raw));
}

TEST(Mapping, MemfdIsAllocatedSealedAndShared) {
  auto fd = create_memfd("sluice-test", 10000);
  ASSERT_TRUE(fd.ok()) << fd.error().message;
  struct stat status {};
  ASSERT_EQ(fstat(fd->get(), &status), 0);
  EXPECT_EQ(static_cast<size_t>(status.st_size), round_to_pages(10000));
  EXPECT_GE(static_cast<size_t>(status.st_blocks) * 512, round_to_pages(10000))
      << "pages are not allocated up front";
  EXPECT_NE(ftruncate(fd->get(), 0), 0);
  EXPECT_NE(ftruncate(fd->get(), 1 << 20), 0);
  EXPECT_TRUE(check_sealed(fd->get(), 10000).ok());
  EXPECT_FALSE(check_sealed(fd->get(), 1 << 20).ok());

  auto writer = Mapping::map(fd->get(), 10000, Access::kReadWrite);
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(seal_future_writes(fd->get()).ok());
  auto reader = Mapping::map(fd->get(), 10000, Access::kRead);
  ASSERT_TRUE(reader.ok());
  writer->data()[9999] = std::byte{42};
  EXPECT_EQ(reader->data()[9999], std::byte{42});
  EXPECT_FALSE(Mapping::map(fd->get(), 10000, Access::kReadWrite).ok());
  EXPECT_NE(mprotect(reader->data(), page_size(), PROT_READ | PROT_WRITE), 0);

  Mapping moved(std::move(*writer));
  moved.data()[0] = std::byte{7};
  EXPECT_EQ(reader->data()[0], std::byte{7});
}

TEST(Mapping, OffsetsAndBounds) {
  auto fd = create_memfd("sluice-test", 4 * page_size());
  ASSERT_TRUE(fd.ok());
  auto all = Mapping::map(fd->get(), 4 * page_size(), Access::kReadWrite);
  auto last = Mapping::map(fd->get(), page_size(), Access::kRead, 3 * page_size());
  ASSERT_TRUE(all.ok() && last.ok());
  all->data()[3 * page_size() + 5] = std::byte{9};
  EXPECT_EQ(last->data()[5], std::byte{9});
  const auto beyond = Mapping::map(fd->get(), 2 * page_size(), Access::kRead, 3 * page_size());
  ASSERT_FALSE(beyond.ok());
  EXPECT_NE(beyond.error().message.find(std::to_string(4 * page_size())), std::string::npos)
      << beyond.error().message;
  EXPECT_FALSE(Mapping::map(fd->get(), page_size(), Access::kRead, SIZE_MAX - 100).ok());
  EXPECT_FALSE(Mapping::map(fd->get(), 0, Access::kRead).ok());
  EXPECT_FALSE(Mapping::map(-1, 10, Access::kRead).ok());
}

TEST(Mapping, TooMuchIsAnErrorWithSizeAndLimitNotASignal) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  auto* old = std::signal(SIGXFSZ, SIG_IGN);
  const auto fd = create_memfd("sluice-test", 3 << 20);
  std::signal(SIGXFSZ, old);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  ASSERT_FALSE(fd.ok());
  EXPECT_NE(fd.error().message.find("3.0 MiB"), std::string::npos) << fd.error().message;
  EXPECT_NE(fd.error().message.find("RLIMIT_FSIZE 1.0 MiB"), std::string::npos) << fd.error().message;
  EXPECT_FALSE(create_memfd("sluice-test", 0).ok());
}

TEST(Mapping, UnsealedForeignMemoryIsRefused) {
  const UniqueFd fd(memfd_create("sluice-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_TRUE(fd.valid());
  ASSERT_EQ(ftruncate(fd.get(), 4096), 0);
  EXPECT_FALSE(check_sealed(fd.get(), 4096).ok());
  const UniqueFd other(open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(check_sealed(other.get(), 1).ok());
}

TEST(Mapping, AnonymousIsZeroAndWritable) {
  auto memory = Mapping::anonymous(100000);
  ASSERT_TRUE(memory.ok());
  EXPECT_GE(memory->size(), 100000U);
  for (const std::byte b : memory->bytes()) ASSERT_EQ(b, std::byte{0});
  std::memset(memory->data(), 1, memory->size());
  memory->reset();
  EXPECT_FALSE(memory->valid());
}

TEST(Clock, GoesForward) {
  const Micros start = monotonic_micros();
  const int64_t nanos = monotonic_nanos();
  EXPECT_GT(start, 0);
  EXPECT_GE(nanos / 1000, start);
  while (monotonic_micros() == start) {
  }
  EXPECT_GT(monotonic_micros(), start);
}

TEST(CpuSet, Parses) {
  EXPECT_EQ(CpuSet::parse("0,2-3")->cpus(), (std::vector<int>{0, 2, 3}));
  EXPECT_EQ(CpuSet::parse(" 7 , 1 - 2,2 ")->cpus(), (std::vector<int>{1, 2, 7}));
  EXPECT_EQ(CpuSet::parse("3-5,4,0")->to_string(), "0,3-5");
  EXPECT_TRUE(CpuSet::parse("")->empty());
  EXPECT_TRUE(CpuSet::parse("0-1")->contains(1));
  EXPECT_FALSE(CpuSet::parse("0-1")->contains(2));
  for (const char* bad : {"x", "1,", ",1", "3-1", "1-", "-1", "1--2", "1024", "99999999999", "0 1", "0x1"}) {
    const auto set = CpuSet::parse(bad);
    EXPECT_FALSE(set.ok()) << bad;
  }
  EXPECT_NE(CpuSet::parse("0,zwei").error().message.find("'zwei'"), std::string::npos);
}

TEST(CpuSet, PinsAndSaysWhatIsMissing) {
  std::thread([] {
    const CpuSet allowed = CpuSet::allowed();
    ASSERT_FALSE(allowed.empty());
    const auto one = CpuSet::parse(std::to_string(allowed.cpus().back()));
    ASSERT_TRUE(pin_current_thread(*one).ok());
    EXPECT_EQ(CpuSet::allowed(), *one);
    ASSERT_TRUE(pin_current_thread(CpuSet()).ok());  // the empty set changes nothing
    EXPECT_EQ(CpuSet::allowed(), *one);
    const auto missing = pin_current_thread(*CpuSet::parse("1023"));
    ASSERT_FALSE(missing.ok());
    EXPECT_NE(missing.error().message.find("1023"), std::string::npos);
    const auto half = pin_current_thread(*CpuSet::parse(one->to_string() + ",1023"));
    ASSERT_FALSE(half.ok()) << "a CPU that is not there must not be dropped in silence";
    EXPECT_NE(half.error().message.find("1023"), std::string::npos);
  }).join();
}

class LogTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(pipe2(ends_, O_CLOEXEC | O_NONBLOCK), 0); }
  void TearDown() override {
    log::configure(log::Level::kInfo);
    close(ends_[0]);
    close(ends_[1]);
  }
  void configure(log::Level level, log::Format format) { log::configure(level, format, ends_[1]); }
  std::string text() {
    std::string all;
    char buffer[4096];
    for (ssize_t n = 0; (n = read(ends_[0], buffer, sizeof buffer)) > 0;)
      all.append(buffer, static_cast<size_t>(n));
    return all;
  }
  int ends_[2];
};

TEST_F(LogTest, TextHasTimeLevelAndMessage) {
  configure(log::Level::kInfo, log::Format::kText);
  log::warning("peer {} is late by {} ms", 3, 12);
  const std::string line = text();
  ASSERT_GT(line.size(), 28U);
  EXPECT_EQ(line[4], '-');
  EXPECT_EQ(line[10], 'T');
  EXPECT_EQ(line[26], 'Z');
  EXPECT_EQ(line.substr(27), " warning: peer 3 is late by 12 ms\n");
}

TEST_F(LogTest, LevelsFilter) {
  configure(log::Level::kWarning, log::Format::kJournal);
  EXPECT_FALSE(log::enabled(log::Level::kInfo));
  EXPECT_FALSE(log::enabled(log::Level::kOff));
  log::debug("a");
  log::info("b");
  log::warning("c");
  log::error("d");
  EXPECT_EQ(text(), "<4>c\n<3>d\n");
  configure(log::Level::kDebug, log::Format::kJournal);
  log::debug("a");
  log::info("b");
  EXPECT_EQ(text(), "<7>a\n<6>b\n");
  configure(log::Level::kOff, log::Format::kJournal);
  log::error("d");
  EXPECT_EQ(text(), "");
}

TEST_F(LogTest, OneLineStaysOneLine) {
  configure(log::Level::kInfo, log::Format::kJournal);
  log::info("{}", "name\n<3>forged \x1b[31m\ttab");
  EXPECT_EQ(text(), "<6>name\\n<3>forged \\x1b[31m\\x09tab\n");
}

TEST_F(LogTest, JsonParses) {
  configure(log::Level::kInfo, log::Format::kJson);
  log::error("quote \" slash \\ line\n bad \xff utf8");
  const std::string line = text();
  ASSERT_EQ(std::count(line.begin(), line.end(), '\n'), 1);
  const auto object = nlohmann::json::parse(line);
  EXPECT_EQ(object["level"], "error");
  EXPECT_EQ(object["message"], "quote \" slash \\ line\n bad \xef\xbf\xbd utf8");
  EXPECT_EQ(object["time"].get<std::string>().size(), 27U);
}

TEST_F(LogTest, JournalIsRecognised) {
  struct stat status {};
  ASSERT_EQ(fstat(ends_[1], &status), 0);
  setenv("JOURNAL_STREAM", (std::to_string(status.st_dev) + ":" + std::to_string(status.st_ino)).c_str(), 1);
  configure(log::Level::kInfo, log::Format::kAuto);
  log::info("to the journal");
  EXPECT_EQ(text(), "<6>to the journal\n");
  setenv("JOURNAL_STREAM", "1:2", 1);  // inherited from a parent, but stderr was redirected since
  configure(log::Level::kInfo, log::Format::kAuto);
  log::info("to a file");
  EXPECT_NE(text().find(" info: to a file\n"), std::string::npos);
  unsetenv("JOURNAL_STREAM");
}

TEST_F(LogTest, RateLimitCountsWhatItLeavesOut) {
  configure(log::Level::kInfo, log::Format::kJournal);
  log::RateLimit limit(1000, 2);
  for (Micros now = 0; now < 10; ++now) limit.write(now, log::Level::kWarning, "drop {}", now);
  EXPECT_EQ(text(), "<4>drop 0\n<4>drop 1\n");
  limit.write(1000, log::Level::kWarning, "drop later");
  EXPECT_EQ(text(), "<4>drop later (8 more like this were suppressed)\n");
  limit.write(1001, log::Level::kWarning, "again");
  EXPECT_EQ(text(), "<4>again\n");
}

TEST_F(LogTest, Names) {
  for (const char* name : {"debug", "info", "warning", "error", "off"}) {
    ASSERT_TRUE(log::parse_level(name).ok());
    EXPECT_STREQ(log::level_name(*log::parse_level(name)), name);
  }
  EXPECT_FALSE(log::parse_level("verbose").ok());
  EXPECT_NE(log::parse_level("verbose").error().message.find("warning"), std::string::npos);
  for (const char* name : {"auto", "text", "json", "journal"}) EXPECT_TRUE(log::parse_format(name).ok());
  EXPECT_FALSE(log::parse_format("xml").ok());
}

TEST(Types, NamesAndSizes) {
  EXPECT_STREQ(status_name(Status::kOk), "OK");
  EXPECT_STREQ(status_name(Status::kDaemonLost), "DAEMON_LOST");
  EXPECT_FALSE(is_error(Status::kApproximated));
  EXPECT_TRUE(is_error(Status::kMismatch));
  EXPECT_EQ(element_size(ElementType::kBf16), 2U);
  EXPECT_EQ(accumulator_type(ElementType::kF16), ElementType::kF32);
  EXPECT_EQ(accumulator_type(ElementType::kF64), ElementType::kF64);
  EXPECT_STREQ(element_type_name(ElementType::kU8), "u8");
}

}  // namespace
}  // namespace sluice
