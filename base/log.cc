#include "base/log.h"

#include <spdlog/formatter.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/base_sink.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

namespace sluice::log {
namespace {

spdlog::level::level_enum to_spdlog(Level level) {
  switch (level) {
    case Level::kDebug:
      return spdlog::level::debug;
    case Level::kInfo:
      return spdlog::level::info;
    case Level::kWarning:
      return spdlog::level::warn;
    case Level::kError:
      return spdlog::level::err;
    case Level::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

Level from_spdlog(spdlog::level::level_enum level) {
  if (level <= spdlog::level::debug) return Level::kDebug;
  if (level == spdlog::level::info) return Level::kInfo;
  if (level == spdlog::level::warn) return Level::kWarning;
  return Level::kError;
}

// Priorities of syslog(3), as sd-daemon(3) wants them in front of a line.
char journal_priority(Level level) {
  switch (level) {
    case Level::kDebug:
      return '7';
    case Level::kInfo:
      return '6';
    case Level::kWarning:
      return '4';
    default:
      return '3';
  }
}

std::string utc_time(spdlog::log_clock::time_point time) {
  using std::chrono::duration_cast;
  using std::chrono::microseconds;
  const auto since = duration_cast<microseconds>(time.time_since_epoch()).count();
  const std::time_t seconds = static_cast<std::time_t>(since / 1'000'000);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[40];
  const size_t length = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(text + length, sizeof text - length, ".%06dZ", static_cast<int>(since % 1'000'000));
  return text;
}

void append_escaped(std::string_view message, spdlog::memory_buf_t* out) {
  static constexpr char kHex[] = "0123456789abcdef";
  for (const char c : message) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out->append(std::string_view("\\n"));
    } else if (byte < 0x20 || byte == 0x7f) {
      const char escaped[4] = {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
      out->append(escaped, escaped + 4);
    } else {
      out->push_back(c);
    }
  }
}

class LineFormatter final : public spdlog::formatter {
 public:
  explicit LineFormatter(Format format) : format_(format) {}
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<LineFormatter>(format_);
  }

  void format(const spdlog::details::log_msg& line, spdlog::memory_buf_t& out) override {
    const Level level = from_spdlog(line.level);
    const std::string_view message(line.payload.data(), line.payload.size());
    if (format_ == Format::kJson) {
      nlohmann::ordered_json object;
      object["time"] = utc_time(line.time);
      object["level"] = level_name(level);
      object["message"] = message;
      // Bytes that are not UTF-8 become U+FFFD: a log line must not make the log unreadable.
      out.append(object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    } else {
      if (format_ == Format::kJournal) {
        const char prefix[3] = {'<', journal_priority(level), '>'};
        out.append(prefix, prefix + 3);
      } else {
        out.append(utc_time(line.time));
        out.push_back(' ');
        out.append(std::string_view(level_name(level)));
        out.append(std::string_view(": "));
      }
      append_escaped(message, &out);
    }
    out.push_back('\n');
  }

 private:
  const Format format_;
};

// One write(2) per line: lines of several processes on one stderr do not mix, and nothing waits in a buffer
// when the process dies. spdlog's own sinks go through stdio.
class FdSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit FdSink(int fd) : fd_(fd) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& line) override {
    spdlog::memory_buf_t text;
    formatter_->format(line, text);
    const char* next = text.data();
    size_t left = text.size();
    while (left > 0) {
      const ssize_t written = ::write(fd_, next, left);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return;  // nowhere to say so
      next += written;
      left -= static_cast<size_t>(written);
    }
  }
  void flush_() override {}

 private:
  const int fd_;
};

bool stderr_is_journal(int fd) {
  const char* stream = std::getenv("JOURNAL_STREAM");  // "device:inode", systemd.exec(5)
  if (stream == nullptr) return false;
  unsigned long long device = 0;
  unsigned long long inode = 0;
  struct stat status {};
  return std::sscanf(stream, "%llu:%llu", &device, &inode) == 2 && fstat(fd, &status) == 0 &&
         status.st_dev == device && status.st_ino == inode;
}

std::shared_ptr<spdlog::logger> make_logger(Format format, int fd) {
  if (format == Format::kAuto) format = stderr_is_journal(fd) ? Format::kJournal : Format::kText;
  auto sink = std::make_shared<FdSink>(fd);
  sink->set_formatter(std::make_unique<LineFormatter>(format));
  auto logger = std::make_shared<spdlog::logger>("sluice", std::move(sink));
  logger->set_level(spdlog::level::trace);  // the level is checked in enabled(), before formatting
  return logger;
}

std::atomic<Level> current_level{Level::kInfo};
std::mutex logger_mutex;

std::shared_ptr<spdlog::logger>& logger_slot() {
  static std::shared_ptr<spdlog::logger> slot = make_logger(Format::kAuto, 2);
  return slot;
}

}  // namespace

const char* level_name(Level level) {
  switch (level) {
    case Level::kDebug:
      return "debug";
    case Level::kInfo:
      return "info";
    case Level::kWarning:
      return "warning";
    case Level::kError:
      return "error";
    case Level::kOff:
      return "off";
  }
  return "?";
}

Result<Level> parse_level(std::string_view text) {
  for (const Level level : {Level::kDebug, Level::kInfo, Level::kWarning, Level::kError, Level::kOff}) {
    if (text == level_name(level)) return level;
  }
  return Error{EINVAL, "log level '" + std::string(text) + "' is none of debug, info, warning, error, off"};
}

Result<Format> parse_format(std::string_view text) {
  if (text == "auto") return Format::kAuto;
  if (text == "text") return Format::kText;
  if (text == "json") return Format::kJson;
  if (text == "journal") return Format::kJournal;
  return Error{EINVAL, "log format '" + std::string(text) + "' is none of auto, text, json, journal"};
}

void configure(Level level, Format format, int fd) {
  auto logger = make_logger(format, fd);
  const std::lock_guard lock(logger_mutex);
  logger_slot() = std::move(logger);
  current_level.store(level, std::memory_order_relaxed);
}

bool enabled(Level level) {
  return level >= current_level.load(std::memory_order_relaxed) && level != Level::kOff;
}

void write(Level level, std::string_view message) {
  if (!enabled(level)) return;
  std::shared_ptr<spdlog::logger> logger;
  {
    const std::lock_guard lock(logger_mutex);
    logger = logger_slot();
  }
  logger->log(to_spdlog(level), spdlog::string_view_t(message.data(), message.size()));
}

bool RateLimit::allow(Micros now, uint64_t* suppressed) {
  const std::lock_guard lock(mutex_);
  if (!started_ || now - window_start_ >= interval_) {
    started_ = true;
    window_start_ = now;
    used_ = 0;
  }
  if (used_ >= burst_) {
    ++suppressed_;
    return false;
  }
  ++used_;
  *suppressed = std::exchange(suppressed_, 0);
  return true;
}

void RateLimit::write_line(Level level, std::string_view message, uint64_t suppressed) {
  if (suppressed == 0) {
    log::write(level, message);
  } else {
    log::write(level, fmt::format("{} ({} more like this were suppressed)", message, suppressed));
  }
}

}  // namespace sluice::log
