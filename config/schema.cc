#include "config/schema.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <type_traits>

#include "base/assert.h"
#include "config/units.h"

namespace sluice::config {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

template <typename T>
T& field(const Key& key, Config& config) {
  T& (*const* access)(Config&) = std::get_if<T& (*)(Config&)>(&key.field);
  SLUICE_ASSERT(access != nullptr);
  return (*access)(config);
}

Error invalid(std::string message) { return {EINVAL, std::move(message)}; }

// Stores a number after comparing it with the key's range.
template <typename Stored, typename Parsed>
Result<void> store_number(const Key& key, std::string_view text, Result<Parsed> parsed, Config* config) {
  if (!key.special.empty() && text == key.special) {
    field<Stored>(key, *config) = 0;
    return {};
  }
  if (!parsed) {
    if (key.special.empty()) return parsed.error();
    return invalid(fmt::format("{}; or {}", parsed.error().message, key.special));
  }
  const auto value = static_cast<double>(*parsed);
  if (value < key.min || value > key.max)
    return invalid(fmt::format("{} is out of range; allowed: {}", text, allowed(key)));
  field<Stored>(key, *config) = static_cast<Stored>(*parsed);
  return {};
}

std::string format_bound(const Key& key, double bound) {
  switch (key.kind) {
    case Kind::kDuration:
      return bound == 0 ? "0" : format_duration(static_cast<Micros>(bound));
    case Kind::kBytes:
      return bound == 0 ? "0" : format_bytes(static_cast<uint64_t>(bound));
    case Kind::kBitRate:
      return format_bit_rate(static_cast<uint64_t>(bound));
    case Kind::kRatio:
      return format_ratio(bound);
    default:
      return fmt::format("{}", static_cast<uint64_t>(bound));
  }
}

// UTF-8 without control characters. What it says of a sequence is about its form; not every code point has a glyph.
bool printable(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80                   ? 1
                          : lead >= 0xC2 && lead < 0xE0 ? 2
                          : lead >= 0xE0 && lead < 0xF0 ? 3
                          : lead >= 0xF0 && lead < 0xF5 ? 4
                                                        : 0;
    if (length == 0 || i + length > text.size() || lead < 0x20 || lead == 0x7F) return false;
    uint32_t point = length == 1 ? lead : lead & (0x7FU >> length);
    for (size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      if ((next & 0xC0) != 0x80) return false;
      point = point << 6 | (next & 0x3F);
    }
    constexpr uint32_t kShortest[] = {0, 0, 0x80, 0x800, 0x10000};
    const bool control = point >= 0x80 && point < 0xA0;
    const bool surrogate = point >= 0xD800 && point < 0xE000;
    const bool noncharacter =
        (point & 0xFFFE) == 0xFFFE || (point >= 0xFDD0 && point < 0xFDF0) || point == 0xFEFF;
    if (point < kShortest[length] || point > 0x10FFFF || control || surrogate || noncharacter ||
        point == 0x2028 || point == 0x2029) {
      return false;
    }
    i += length;
  }
  return true;
}

// Letters to insert, delete, replace or swap with their neighbour.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      cost[i][j] = std::min(
          {cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

}  // namespace

const Key* find_key(std::string_view name) {
  const auto all = keys();
  const auto key =
      std::find_if(all.begin(), all.end(), [&](const Key& candidate) { return candidate.name == name; });
  return key == all.end() ? nullptr : &*key;
}

Result<void> set_value(const Key& key, std::string_view text, Config* config) {
  switch (key.kind) {
    case Kind::kFlag: {
      auto value = parse_bool(text);
      if (!value) return value.error();
      field<bool>(key, *config) = *value;
      return {};
    }
    case Kind::kCount:
      return store_number<uint32_t>(key, text, parse_count(text), config);
    case Kind::kRatio:
      return store_number<double>(key, text, parse_ratio(text), config);
    case Kind::kDuration:
      return store_number<Micros>(key, text, parse_duration(text), config);
    case Kind::kBytes:
      return store_number<uint64_t>(key, text, parse_bytes(text), config);
    case Kind::kBitRate:
      return store_number<uint64_t>(key, text, parse_bit_rate(text), config);
    case Kind::kMode: {
      auto value = parse_mode(text);
      if (!value) return value.error();
      field<uint32_t>(key, *config) = *value;
      return {};
    }
    case Kind::kChoice: {
      const auto choices = split(key.choices, '|');
      const auto at = std::find(choices.begin(), choices.end(), text);
      if (at == choices.end()) {
        const std::vector<std::string> names(choices.begin(), choices.end());
        const std::string meant = nearest(text, names);
        return invalid(fmt::format("'{}' is not {}{}", text, allowed(key),
                                   meant.empty() ? "" : fmt::format("; did you mean '{}'?", meant)));
      }
      field<uint8_t>(key, *config) = static_cast<uint8_t>(at - choices.begin());
      return {};
    }
    case Kind::kText:
      if (!printable(text)) return invalid("must be printable UTF-8 on one line");
      field<std::string>(key, *config) = std::string(text);
      return {};
    case Kind::kTextList:
      return set_list(key, {std::string(text)}, config);
    case Kind::kCpus: {
      auto value = CpuSet::parse(text);
      if (!value) return value.error();
      field<CpuSet>(key, *config) = *value;
      return {};
    }
    case Kind::kPeers:
      break;
  }
  return invalid(fmt::format("cannot be given as one value; {}", allowed(key)));
}

Result<void> set_list(const Key& key, const std::vector<std::string>& texts, Config* config) {
  SLUICE_ASSERT(key.kind == Kind::kTextList);
  if (texts.empty()) return invalid("is an empty list; leave the key out for its default");
  for (const std::string& text : texts) {
    if (text.empty()) return invalid("has an empty element");
    if (!printable(text)) return invalid("must be printable UTF-8 on one line");
  }
  field<std::vector<std::string>>(key, *config) = texts;
  return {};
}

std::string format_value(const Key& key, const Config& config) {
  auto& source = const_cast<Config&>(config);  // field() only hands out the reference
  const auto is_special = [&](auto value) { return !key.special.empty() && value == 0; };
  switch (key.kind) {
    case Kind::kFlag:
      return field<bool>(key, source) ? "true" : "false";
    case Kind::kCount:
      if (is_special(field<uint32_t>(key, source))) return std::string(key.special);
      return fmt::format("{}", field<uint32_t>(key, source));
    case Kind::kRatio:
      if (is_special(field<double>(key, source))) return std::string(key.special);
      return format_ratio(field<double>(key, source));
    case Kind::kDuration:
      if (is_special(field<Micros>(key, source))) return std::string(key.special);
      return format_duration(field<Micros>(key, source));
    case Kind::kBytes:
      if (is_special(field<uint64_t>(key, source))) return std::string(key.special);
      return format_bytes(field<uint64_t>(key, source));
    case Kind::kBitRate:
      if (is_special(field<uint64_t>(key, source))) return std::string(key.special);
      return format_bit_rate(field<uint64_t>(key, source));
    case Kind::kMode:
      return format_mode(field<uint32_t>(key, source));
    case Kind::kChoice:
      return std::string(split(key.choices, '|').at(field<uint8_t>(key, source)));
    case Kind::kText:
      return field<std::string>(key, source);
    case Kind::kTextList: {
      const auto& list = field<std::vector<std::string>>(key, source);
      return list.size() == 1 ? list[0] : fmt::format("[{}]", fmt::join(list, ", "));
    }
    case Kind::kCpus:
      return field<CpuSet>(key, source).to_string();
    case Kind::kPeers:
      return "";
  }
  return "";
}

void copy_value(const Key& key, const Config& from, Config* to) {
  std::visit(
      [&](auto access) {
        if constexpr (!std::is_same_v<decltype(access), std::monostate>)
          access(*to) = access(const_cast<Config&>(from));
      },
      key.field);
}

std::string allowed(const Key& key) {
  const auto range = [&](const char* what) {
    const std::string special = key.special.empty() ? "" : fmt::format("{}, or ", key.special);
    const std::string prefix = special + (*what == '\0' ? "" : fmt::format("{}, ", what));
    if (std::isinf(key.max)) return fmt::format("{}at least {}", prefix, format_bound(key, key.min));
    return fmt::format("{}{} to {}", prefix, format_bound(key, key.min), format_bound(key, key.max));
  };
  switch (key.kind) {
    case Kind::kFlag:
      return "true or false";
    case Kind::kCount:
    case Kind::kRatio:
      return range("");
    case Kind::kDuration:
      return range("a time");
    case Kind::kBytes:
      return range("a size");
    case Kind::kBitRate:
      return range("a rate");
    case Kind::kMode:
      return "a file mode, octal";
    case Kind::kChoice: {
      const auto choices = split(key.choices, '|');
      if (choices.size() == 1) return std::string(choices[0]);
      return fmt::format("{} or {}", fmt::join(choices.begin(), choices.end() - 1, ", "), choices.back());
    }
    case Kind::kText:
      return "text";
    case Kind::kTextList:
      return "text, or a list of texts";
    case Kind::kCpus:
      return "CPU numbers such as 2 or 0,2-3";
    case Kind::kPeers:
      return "a list; the reference file shows one";
  }
  return "";
}

Config defaults() {
  Config config;
  for (const Key& key : keys()) {
    if (std::holds_alternative<std::monostate>(key.field)) continue;
    const auto stored = set_value(key, key.default_value, &config);
    SLUICE_ASSERT(stored.ok());
  }
  return config;
}

std::vector<CrossProblem> cross_check(const Config& config) {
  std::vector<CrossProblem> problems;
  const auto& exchange = config.exchange;
  if (exchange.flow_window_min > exchange.flow_window) {
    problems.push_back({"exchange.flow_window_min", fmt::format("{} is above exchange.flow_window ({})",
                                                                format_bytes(exchange.flow_window_min),
                                                                format_bytes(exchange.flow_window))});
  }
  if (exchange.peer_timeout < exchange.peer_interval) {
    problems.push_back(
        {"exchange.peer_timeout",
         fmt::format("{} is below exchange.peer_interval ({}): every peer would be lost at once",
                     format_duration(exchange.peer_timeout), format_duration(exchange.peer_interval))});
  }
  if (exchange.deadline > exchange.op_timeout) {
    problems.push_back(
        {"exchange.deadline",
         fmt::format("{} is above exchange.op_timeout ({}): a bounded op would outlast an exact one",
                     format_duration(exchange.deadline), format_duration(exchange.op_timeout))});
  }
  if (exchange.hard_deadline_min > exchange.hard_deadline_max) {
    problems.push_back(
        {"exchange.hard_deadline_min", fmt::format("{} is above exchange.hard_deadline_max ({})",
                                                   format_duration(exchange.hard_deadline_min),
                                                   format_duration(exchange.hard_deadline_max))});
  }
  if (exchange.hard_deadline_max > exchange.op_timeout) {
    problems.push_back(
        {"exchange.hard_deadline_max",
         fmt::format("{} is above exchange.op_timeout ({}): a bounded op would outlast an exact one",
                     format_duration(exchange.hard_deadline_max), format_duration(exchange.op_timeout))});
  }
  const auto& faults = config.transport.faults;
  if (faults.any() && !faults.i_know) {
    problems.push_back(
        {"transport.faults.i_know",
         "must be true when faults are on: they lose and damage datagrams on purpose; take them out, or "
         "say that you know"});
  }
  if (faults.tail_min > faults.tail_max) {
    problems.push_back({"transport.faults.tail_min",
                        fmt::format("{} is above transport.faults.tail_max ({})",
                                    format_duration(faults.tail_min), format_duration(faults.tail_max))});
  }
  if (config.transport.port == 0 && config.lanes > 1) {
    problems.push_back(
        {"transport.port", "0 (any) works with one lane only: peers must know that lane l is at port + l"});
  }
  if (!config.peers.empty() && config.security.key_file.empty() &&
      config.security.sealing == SealingMode::kAuth) {
    problems.push_back(
        {"peers",
         "jobs that are listed here need security.key_file, equal on all their nodes (or sealing none)"});
  }
  if (config.transport.port != 0 && config.transport.port + config.lanes - 1 > 65'535) {
    problems.push_back({"transport.port", fmt::format("lane l uses port + l; {} + {} lanes ends above 65535",
                                                      config.transport.port, config.lanes)});
  }
  if (config.memory.arena_total < config.memory.arena_max) {
    problems.push_back(
        {"memory.arena_total",
         fmt::format("{} is below memory.arena_max ({}), which one client may take",
                     format_bytes(config.memory.arena_total), format_bytes(config.memory.arena_max))});
  }
  if (!config.cpus.lanes.empty() && config.cpus.lanes.cpus().size() < config.lanes) {
    problems.push_back({"cpus.lanes", fmt::format("names {} CPUs for {} lanes; name one for each, or none",
                                                  config.cpus.lanes.cpus().size(), config.lanes)});
  }
  if (config.socket.path.empty() || config.socket.path.front() != '/' || config.socket.path.size() > 107) {
    problems.push_back({"socket.path", "must be an absolute path of at most 107 characters"});
  }
  return problems;
}

std::string nearest(std::string_view name, std::span<const std::string> names) {
  std::string best;
  if (name.size() > 64) return best;  // no key is that long, and the comparison is quadratic
  size_t best_distance = std::max<size_t>(2, name.size() / 3) + 1;
  for (const std::string& candidate : names) {
    const size_t distance = edit_distance(name, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace sluice::config
