// The one table of configuration keys. Loader, validator, --print-config and the annotated sluice.yaml are all driven
// by it, so that a key cannot exist in one of them and not in another.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/result.h"
#include "config/config.h"

namespace sluice::config {

// What a value looks like in the file.
enum class Kind : uint8_t {
  kFlag,
  kCount,
  kRatio,
  kDuration,
  kBytes,
  kBitRate,
  kMode,
  kChoice,
  kText,
  kTextList,
  kCpus,
  kPeers
};

// Where a default (or a range) comes from, so that a reader knows how far to trust it.
enum class Source : uint8_t {
  kProtocol,   // docs/protocol.md
  kMeasured,   // a measurement of the project; the help says which
  kJudgement,  // chosen; nothing better is known
};

// The field of Config that a key fills; std::monostate for the parts of `peers`.
using Field =
    std::variant<std::monostate, bool& (*)(Config&), uint32_t& (*)(Config&), double& (*)(Config&),
                 Micros& (*)(Config&), uint64_t& (*)(Config&), uint8_t& (*)(Config&),
                 std::string& (*)(Config&), std::vector<std::string>& (*)(Config&), CpuSet& (*)(Config&)>;

struct Key {
  std::string_view name;  // "transport.port"; parts of a list: "peers[].jobs"
  Kind kind = Kind::kText;
  std::string_view default_value{};  // as it would stand in the file
  double min = 0;                    // of kCount, kRatio, kDuration (us), kBytes
  double max = std::numeric_limits<double>::infinity();
  std::string_view special{};  // of numbers: a word that stands for 0, whatever the range ("auto")
  std::string_view choices{};  // kChoice: names separated by '|', in the order of the enumeration
  bool reload = false;  // true: SIGHUP applies it (to jobs that join afterwards); false: needs a restart
  Source source = Source::kJudgement;
  std::string_view help{};  // what it does, one or more sentences
  Field field{};
};

// In the order of the reference file.
std::span<const Key> keys();
const Key* find_key(std::string_view name);

// Parses `text` as a value of `key` and stores it. The error says what is allowed; it names neither key nor place.
Result<void> set_value(const Key& key, std::string_view text, Config* config);
// The elements of a kTextList one by one; a list replaces what was there.
Result<void> set_list(const Key& key, const std::vector<std::string>& texts, Config* config);
// The value as it would stand in a file.
std::string format_value(const Key& key, const Config& config);
// Takes one value over.
void copy_value(const Key& key, const Config& from, Config* to);
// "1 to 16", "auth or none", "a time, 1ms to 1h": what an error and the reference file say.
std::string allowed(const Key& key);

// Rules between keys. Names the key at fault first; empty: all is well.
struct CrossProblem {
  std::string_view key;
  std::string what;
};
std::vector<CrossProblem> cross_check(const Config& config);

// All keys at their defaults.
Config defaults();

// The name in `names` that was probably meant by `name`; "" when nothing is near.
std::string nearest(std::string_view name, std::span<const std::string> names);

}  // namespace sluice::config
