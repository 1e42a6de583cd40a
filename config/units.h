// Numbers with units as people write them in a configuration. Each pair is its own inverse: format_x gives the
// shortest text that parse_x reads back to the same value. Errors say what is allowed; code EINVAL.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "base/types.h"

namespace sluice::config {

// "200ms", "1s", "1.5ms", "20us", "2min", "1h"; "0" needs no unit, every other number does. Must be whole microseconds.
Result<Micros> parse_duration(std::string_view text);
std::string format_duration(Micros value);

// "512KiB", "64MiB", "1GiB" (powers of 1024), "64KB", "1MB", "1GB" (powers of 1000); a plain number is bytes.
Result<uint64_t> parse_bytes(std::string_view text);
std::string format_bytes(uint64_t value);

// Bits per second as tc(8) writes them: "1gbit", "100mbit", "2.5Gbit", "64kbit". "0" needs no unit.
Result<uint64_t> parse_bit_rate(std::string_view text);
std::string format_bit_rate(uint64_t value);

// Decimal, no sign.
Result<uint64_t> parse_count(std::string_view text);
// A plain number such as "0.5".
Result<double> parse_ratio(std::string_view text);
std::string format_ratio(double value);
// "yes", "no", "true", "false", "on", "off", in any case.
Result<bool> parse_bool(std::string_view text);
// Permission bits: "0660", "660", "0o660".
Result<uint32_t> parse_mode(std::string_view text);
std::string format_mode(uint32_t value);

}  // namespace sluice::config
