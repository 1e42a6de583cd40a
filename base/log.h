// The log: one line per event on stderr. Under systemd (stderr is the journal) lines carry the priority
// prefix of sd-daemon(3) and no time of their own; otherwise a UTC time and a level, or one JSON object per
// line.
//
// Any thread but a lane: a call formats, allocates and writes. What a lane has to say goes through its
// counters or its ring to the control thread. Messages say what, where and what to do next, and name rank,
// node, tag and op.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <mutex>
#include <string_view>

#include "base/result.h"
#include "base/types.h"

namespace sluice::log {

enum class Level : uint8_t { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kOff = 4 };
enum class Format : uint8_t {
  kAuto,     // kJournal when stderr is the journal ($JOURNAL_STREAM), else kText
  kText,     // 2024-05-01T10:00:00.123456Z warning: message
  kJson,     // {"time":"2024-05-01T10:00:00.123456Z","level":"warning","message":"..."}
  kJournal,  // <4>message
};

// "debug", "info", "warning", "error", "off"; "auto", "text", "json", "journal". Errors list the choices.
Result<Level> parse_level(std::string_view text);
Result<Format> parse_format(std::string_view text);
const char* level_name(Level level);

// Sets level and format; before the first call: info, auto. `fd` is where lines go (2: stderr); it stays the
// caller's.
void configure(Level level, Format format = Format::kAuto, int fd = 2);
bool enabled(Level level);

// Writes one line with one write(2). Line breaks and control characters in the message are escaped, so that
// what a peer or a client sent cannot forge a second line.
void write(Level level, std::string_view message);

template <typename... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kDebug)) write(Level::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kInfo)) write(Level::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void warning(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kWarning)) write(Level::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kError)) write(Level::kError, fmt::format(format, std::forward<Args>(args)...));
}

// Keeps a message that could come a million times from filling the disk: at most `burst` lines per
// `interval`; the first line after a silence says how many were left out ("... (17 more like this were
// suppressed)"). One per kind of message. Any thread but a lane.
class RateLimit {
 public:
  explicit RateLimit(Micros interval = 10'000'000, uint32_t burst = 1) : interval_(interval), burst_(burst) {}

  // True when a line may be written at `now`; *suppressed is then the number of lines left out since the last
  // one.
  bool allow(Micros now, uint64_t* suppressed);

  template <typename... Args>
  void write(Micros now, Level level, fmt::format_string<Args...> format, Args&&... args) {
    uint64_t suppressed = 0;
    if (!enabled(level) || !allow(now, &suppressed)) return;
    write_line(level, fmt::format(format, std::forward<Args>(args)...), suppressed);
  }

 private:
  static void write_line(Level level, std::string_view message, uint64_t suppressed);

  const Micros interval_;
  const uint32_t burst_;
  std::mutex mutex_;
  bool started_ = false;
  Micros window_start_ = 0;
  uint32_t used_ = 0;
  uint64_t suppressed_ = 0;
};

}  // namespace sluice::log
