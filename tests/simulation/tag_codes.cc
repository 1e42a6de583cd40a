#include "tests/simulation/tag_codes.h"

#include <array>
#include <cmath>

#include "tests/simulation/gradients.h"

namespace sluice::simulation {

int64_t TagCodes::value(uint32_t block, uint32_t position, uint32_t step, uint32_t rank) const {
  const uint32_t place = (step * ranks_ + rank + block) % total_;
  if (place / bits_ != (position + block) % groups_) return 0;
  return static_cast<int64_t>(1) << ((place + position / groups_) % bits_);
}

TagRecovered TagCodes::read(uint32_t block, uint32_t elements, const std::byte* bytes, ElementType type,
                            uint32_t divisor, float scale) const {
  TagRecovered found;
  const size_t size = element_size(type);
  std::vector<int64_t> groups(groups_, -1);  // contributions in each, as bits in order of place
  std::array<std::byte, 8> again{};
  const auto refuse = [&](uint32_t position, const char* what) {
    found.why = std::string(what) + " at element " + std::to_string(position) + " of block " +
                std::to_string(block) + ": " + std::to_string(decode(type, bytes + position * size)) +
                (divisor > 1 ? " x " + std::to_string(divisor) : "");
    return found;
  };
  for (uint32_t position = 0; position < elements; ++position) {
    const std::byte* at = bytes + position * size;
    int64_t sum = 0;
    if (is_float(type)) {
      const double value = decode(type, at) / static_cast<double>(scale);
      sum = std::llround(value * divisor);
      if (sum < 0 || sum >= int64_t{1} << bits_) return refuse(position, "no sum of contributions");
      encode(type, sum, divisor, again.data());
      if (decode(type, again.data()) != value) return refuse(position, "not the quotient of an integer");
    } else {
      sum = decode_integer(type, at);
      if (sum < 0 || sum >= int64_t{1} << bits_) return refuse(position, "no sum of contributions");
    }
    // Turn the bits back to the order of places.
    const uint32_t turn = position / groups_ % bits_;
    const auto mask = static_cast<int64_t>((uint64_t{1} << bits_) - 1);
    const int64_t set = ((sum >> turn) | (sum << (bits_ - turn))) & mask;
    int64_t& group = groups[(position + block) % groups_];
    if (group >= 0 && group != set) return refuse(position, "other contributions than before");
    group = set;
  }
  found.whole = true;
  for (uint32_t group = 0; group < groups_; ++group) {
    if (groups[group] < 0) {
      found.whole = false;
      continue;
    }
    for (uint32_t bit = 0; bit < bits_; ++bit) {
      if ((groups[group] >> bit & 1) == 0) continue;
      // The place within the group has this remainder by bits.
      const uint32_t first = group * bits_;
      const uint32_t place = first + (bit + bits_ - first % bits_) % bits_;
      if (place >= total_) {
        found.why = "a bit that no contribution has in block " + std::to_string(block);
        return found;
      }
      found.in.push_back((place + total_ - block % total_) % total_);
    }
  }
  found.ok = true;
  return found;
}

}  // namespace sluice::simulation
