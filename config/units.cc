#include "config/units.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <span>

namespace sluice::config {
namespace {

struct Unit {
  std::string_view name;
  uint64_t factor;
};

// Largest first: the first that divides a value is the one it is printed in.
constexpr std::array<Unit, 5> kTimes{
    {{"h", 3'600'000'000}, {"min", 60'000'000}, {"s", 1'000'000}, {"ms", 1'000}, {"us", 1}}};
constexpr std::array<Unit, 9> kSizes{{{"TiB", 1ULL << 40},
                                      {"GiB", 1ULL << 30},
                                      {"MiB", 1ULL << 20},
                                      {"KiB", 1ULL << 10},
                                      {"TB", 1'000'000'000'000},
                                      {"GB", 1'000'000'000},
                                      {"MB", 1'000'000},
                                      {"KB", 1'000},
                                      {"B", 1}}};
constexpr std::array<Unit, 5> kRates{
    {{"tbit", 1'000'000'000'000}, {"gbit", 1'000'000'000}, {"mbit", 1'000'000}, {"kbit", 1'000}, {"bit", 1}}};

constexpr uint64_t kLargest = 1ULL << 62;  // also fits Micros, with room

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

Error invalid(std::string message) { return {EINVAL, std::move(message)}; }

// A number and one of the units; `plain` is the factor of a number without one, 0: only "0" may stand alone.
Result<uint64_t> parse_with_unit(std::string_view text, std::span<const Unit> units, uint64_t plain,
                                 bool ignore_case, const char* example) {
  const auto wrong = [&] { return invalid(fmt::format("'{}' is not {}", text, example)); };
  double number = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (error != std::errc() || number < 0 || !std::isfinite(number)) return wrong();
  std::string_view rest = text.substr(static_cast<size_t>(end - text.data()));
  const size_t gap = rest.find_first_not_of(' ');
  rest = gap == std::string_view::npos ? std::string_view() : rest.substr(gap);

  uint64_t factor = plain;
  if (rest.empty()) {
    if (plain == 0 && number != 0) {
      return invalid(fmt::format("'{}' has no unit; write {}", text, example));
    }
  } else {
    const auto unit = std::find_if(units.begin(), units.end(), [&](const Unit& candidate) {
      return ignore_case ? equal_ignoring_case(candidate.name, rest) : candidate.name == rest;
    });
    if (unit == units.end()) return wrong();
    factor = unit->factor;
  }
  // Whole numbers are multiplied as integers, so that no digit is lost above 2^53.
  uint64_t whole = 0;
  const auto [whole_end, whole_error] = std::from_chars(text.data(), text.data() + text.size(), whole);
  if (whole_error == std::errc() && whole_end == end) {
    if (factor != 0 && whole > kLargest / factor) return invalid(fmt::format("'{}' is too large", text));
    return whole * factor;
  }
  const double value = number * static_cast<double>(factor);
  if (value > static_cast<double>(kLargest)) return invalid(fmt::format("'{}' is too large", text));
  const double rounded = std::round(value);
  if (std::abs(value - rounded) > 1e-6 * std::max(1.0, rounded)) {
    return invalid(fmt::format("'{}' is not a whole number of {}", text, units.back().name));
  }
  return static_cast<uint64_t>(rounded);
}

std::string format_with_unit(uint64_t value, std::span<const Unit> units) {
  if (value == 0) return "0";
  for (const Unit& unit : units) {
    if (value % unit.factor == 0) return fmt::format("{}{}", value / unit.factor, unit.name);
  }
  return fmt::format("{}", value);
}

}  // namespace

Result<Micros> parse_duration(std::string_view text) {
  auto value = parse_with_unit(text, kTimes, 0, false, "a time such as 20us, 200ms, 1.5s, 2min or 1h");
  if (!value) return value.error();
  return static_cast<Micros>(*value);
}

std::string format_duration(Micros value) { return format_with_unit(static_cast<uint64_t>(value), kTimes); }

Result<uint64_t> parse_bytes(std::string_view text) {
  return parse_with_unit(text, kSizes, 1, true, "a size such as 4096, 512KiB, 64MiB or 1GiB");
}

std::string format_bytes(uint64_t value) {
  // Powers of 1024 first, then plain bytes: 64000 is clearer than 62.5KiB, and than 64KB to those who mean KiB by it.
  return format_with_unit(value, std::span(kSizes).first(4));
}

Result<uint64_t> parse_bit_rate(std::string_view text) {
  return parse_with_unit(text, kRates, 0, true, "a rate such as 100mbit, 1gbit or 2.5gbit");
}

std::string format_bit_rate(uint64_t value) { return format_with_unit(value, kRates); }

Result<uint64_t> parse_count(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range) return invalid(fmt::format("'{}' is too large", text));
  if (error != std::errc() || end != text.data() + text.size()) {
    return invalid(fmt::format("'{}' is not a whole number", text));
  }
  return value;
}

Result<double> parse_ratio(std::string_view text) {
  double value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    return invalid(fmt::format("'{}' is not a number such as 0.5", text));
  }
  return value;
}

std::string format_ratio(double value) {
  // Never with an exponent, which parse_ratio does not take; the shortest digits that read back to the same.
  std::array<char, 512> text;  // the longest is the smallest denormal: 0. and 324 more
  const auto [end, error] =
      std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  return {text.data(), end};
}

Result<bool> parse_bool(std::string_view text) {
  for (const char* yes : {"yes", "true", "on"}) {
    if (equal_ignoring_case(text, yes)) return true;
  }
  for (const char* no : {"no", "false", "off"}) {
    if (equal_ignoring_case(text, no)) return false;
  }
  return invalid(fmt::format("'{}' is neither true nor false", text));
}

Result<uint32_t> parse_mode(std::string_view text) {
  std::string_view digits = text;
  if (digits.starts_with("0o")) digits.remove_prefix(2);
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 8);
  if (error != std::errc() || end != digits.data() + digits.size() || value > 0777) {
    return invalid(fmt::format("'{}' is not a file mode such as 0660 (octal, 0 to 0777)", text));
  }
  return value;
}

std::string format_mode(uint32_t value) { return fmt::format("{:04o}", value); }

}  // namespace sluice::config
