#include "tests/simulation/gradients.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/assert.h"
#include "tests/simulation/hash.h"
#include "transport/wire/packet.h"

namespace sluice::simulation {
namespace {

float round_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U);
}

uint16_t f16_bits(float value) {
  // Only finite values in the normal range and zero: what the gradients are made of.
  if (value == 0) return 0;
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 31;
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t rounded = (magnitude + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  SLUICE_ASSERT(magnitude >= 113U << 23 && magnitude < 143U << 23);
  return static_cast<uint16_t>(sign << 15 | (rounded - (112U << 10)));
}

float f16_value(uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const int mantissa = half & 1023;
  const float magnitude = exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
                          : exponent == 31 ? HUGE_VALF
                                           : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

template <typename T>
T read(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

template <typename T>
void write(std::byte* out, T value) {
  std::memcpy(out, &value, sizeof value);
}

}  // namespace

// Bits of an integer that the type holds exactly, and that a division by a number of ranks still tells apart: sums up
// to 2^bits - 1. (bf16 has 8 bits of precision: quotients of sums below 128 differ by more than one unit.)
uint32_t exact_bits(ElementType type, ReduceKind kind) {
  const uint32_t less = kind == ReduceKind::kMean ? 1 : 0;
  switch (type) {
    case ElementType::kF32:
      return 24 - less;
    case ElementType::kF16:
      return 11 - less;
    case ElementType::kBf16:
      return 8 - less;
    case ElementType::kF64:
      return 48;  // a quotient times its divisor must still round to the sum
    case ElementType::kI32:
      return 30;
    case ElementType::kI64:
      return 62;
    case ElementType::kU8:
      return 8;
  }
  return 0;
}

void encode(ElementType type, int64_t sum, uint32_t divisor, std::byte* out) {
  const auto quotient = [&] { return static_cast<float>(sum) / static_cast<float>(divisor); };
  switch (type) {
    case ElementType::kF32:
      return write(out, quotient());
    case ElementType::kF16:
      return write(out, f16_bits(quotient()));
    case ElementType::kBf16:
      return write(out, static_cast<uint16_t>(std::bit_cast<uint32_t>(round_to_bf16(quotient())) >> 16));
    case ElementType::kF64:
      return write(out, static_cast<double>(sum) / static_cast<double>(divisor));
    case ElementType::kI32:
      return write(out, static_cast<int32_t>(sum));
    case ElementType::kI64:
      return write(out, sum);
    case ElementType::kU8:
      return write(out, static_cast<uint8_t>(sum));
  }
}

// The loss scale is a power of two, so that nothing is rounded.
void encode_scaled(ElementType type, int64_t number, float scale, std::byte* out) {
  if (scale == 1.0F) return encode(type, number, 1, out);
  const float value = static_cast<float>(number) * scale;
  switch (type) {
    case ElementType::kF32:
      return write(out, value);
    case ElementType::kF16:
      return write(out, f16_bits(value));
    case ElementType::kBf16:
      return write(out, static_cast<uint16_t>(std::bit_cast<uint32_t>(round_to_bf16(value)) >> 16));
    case ElementType::kF64:
      return write(out, static_cast<double>(number) * static_cast<double>(scale));
    default:
      SLUICE_ASSERT(!"integers have no loss scale");
  }
}

double decode(ElementType type, const std::byte* bytes) {
  switch (type) {
    case ElementType::kF32:
      return read<float>(bytes);
    case ElementType::kF16:
      return f16_value(read<uint16_t>(bytes));
    case ElementType::kBf16:
      return std::bit_cast<float>(static_cast<uint32_t>(read<uint16_t>(bytes)) << 16);
    case ElementType::kF64:
      return read<double>(bytes);
    default:
      return static_cast<double>(decode_integer(type, bytes));
  }
}

int64_t decode_integer(ElementType type, const std::byte* bytes) {
  switch (type) {
    case ElementType::kI32:
      return read<int32_t>(bytes);
    case ElementType::kI64:
      return read<int64_t>(bytes);
    case ElementType::kU8:
      return read<uint8_t>(bytes);
    default:
      return std::llround(decode(type, bytes));
  }
}

Gradients::Gradients(const Options& options)
    : seed_(options.seed), ranks_(options.ranks()), payload_(options.payload) {
  if (!options.carry_over) return;
  tag_of_.assign(options.program.size(), kNoTag);
  step_of_.assign(options.program.size(), 0);
  std::vector<std::vector<uint32_t>> ops;
  std::vector<OpShape> shapes;
  for (uint32_t op = 0; op < options.program.size(); ++op) {
    const OpShape& shape = options.program[op];
    if (shape.op_class != OpClass::kConsistent || shape.tag == 0) continue;
    uint32_t tag = 0;
    while (tag < shapes.size() && !(shapes[tag].tag == shape.tag && shapes[tag].count == shape.count &&
                                    shapes[tag].type == shape.type && shapes[tag].kind == shape.kind))
      ++tag;
    if (tag == shapes.size()) {
      shapes.push_back(shape);
      ops.emplace_back();
    }
    tag_of_[op] = tag;
    step_of_[op] = static_cast<uint32_t>(ops[tag].size());
    ops[tag].push_back(op);
  }
  for (uint32_t tag = 0; tag < shapes.size(); ++tag) {
    const auto steps = static_cast<uint32_t>(ops[tag].size());
    tags_.push_back({shapes[tag], std::move(ops[tag]),
                     TagCodes(shapes[tag].type, shapes[tag].kind, ranks_, steps,
                              exact_bits(shapes[tag].type, shapes[tag].kind))});
  }
}

uint32_t Gradients::block_elements(const OpShape& shape) const {
  return wire::elements_per_block(payload_, shape.type);
}

uint32_t Gradients::blocks(const OpShape& shape) const {
  const uint32_t elements = block_elements(shape);
  return static_cast<uint32_t>((shape.count + elements - 1) / elements);
}

uint32_t Gradients::elements_of(const OpShape& shape, uint32_t block) const {
  const uint32_t elements = block_elements(shape);
  const uint64_t first = static_cast<uint64_t>(block) * elements;
  return static_cast<uint32_t>(std::min<uint64_t>(elements, shape.count - first));
}

int64_t Gradients::value(const OpShape& shape, uint32_t op, uint32_t block, uint32_t position,
                         uint32_t rank) const {
  const uint32_t bits = exact_bits(shape.type, shape.kind);
  if (position % 2 == 0) {
    const uint32_t groups = (ranks_ + bits - 1) / bits;
    const uint32_t place = (rank + block + op) % ranks_;
    if (place / bits != (position / 2 + block + op) % groups) return 0;
    return static_cast<int64_t>(1) << (place % bits);
  }
  // Small enough that the sum over all ranks keeps to the exact bits.
  const uint64_t range = std::max<uint64_t>(2, std::min<uint64_t>(1U << 16, (1ULL << bits) / ranks_));
  const uint64_t element = static_cast<uint64_t>(block) << 20 | position;
  return static_cast<int64_t>(mix(seed_ ^ (static_cast<uint64_t>(op) << 32 | rank), element) % range);
}

void Gradients::fill(const OpShape& shape, uint32_t op, uint32_t rank, std::byte* out) const {
  const size_t size = element_size(shape.type);
  const uint32_t tag = tag_of(op);
  const bool carries = tag != kNoTag && shape.count == tags_[tag].shape.count &&
                       shape.type == tags_[tag].shape.type && shape.tag == tags_[tag].shape.tag;
  for (uint32_t block = 0; block < blocks(shape); ++block) {
    const uint32_t elements = elements_of(shape, block);
    for (uint32_t position = 0; position < elements; ++position, out += size) {
      const int64_t number = carries ? tags_[tag].codes.value(block, position, step_of_[op], rank)
                                     : value(shape, op, block, position, rank);
      encode_scaled(shape.type, number, shape.loss_scale, out);
    }
  }
}

void Gradients::expected(const OpShape& shape, uint32_t op, uint32_t block, const RankSet& counted,
                         std::byte* out) const {
  const auto divisor = shape.kind == ReduceKind::kMean ? static_cast<uint32_t>(counted.count()) : 1;
  const size_t size = element_size(shape.type);
  for (uint32_t position = 0; position < elements_of(shape, block); ++position, out += size) {
    int64_t sum = 0;
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      if (counted[rank]) sum += value(shape, op, block, position, rank);
    }
    encode(shape.type, sum, divisor == 0 ? 1 : divisor, out);
  }
}

bool Gradients::explain(const OpShape& shape, uint32_t op, uint32_t block, const std::byte* bytes,
                        uint32_t divisor, Recovered* out) const {
  const uint32_t bits = exact_bits(shape.type, shape.kind);
  const uint32_t groups = (ranks_ + bits - 1) / bits;
  const uint32_t elements = elements_of(shape, block);
  const size_t size = element_size(shape.type);
  *out = Recovered{};
  const auto refuse = [&](uint32_t position, const char* what) {
    out->why = std::string(what) + " at element " + std::to_string(position) + " of block " +
               std::to_string(block) + ": " + std::to_string(decode(shape.type, bytes + position * size)) +
               (divisor > 1 ? " x " + std::to_string(divisor) : "");
    return false;
  };

  std::array<std::byte, 8> again{};
  for (uint32_t position = 0; position < elements; position += 2) {
    const std::byte* at = bytes + position * size;
    const int64_t sum = divisor == 1 ? decode_integer(shape.type, at)
                                     : std::llround(decode(shape.type, at) * static_cast<double>(divisor));
    if (sum < 0 || sum >= static_cast<int64_t>(1) << bits) return refuse(position, "no sum of powers of two");
    encode(shape.type, sum, divisor, again.data());
    if (std::memcmp(again.data(), at, size) != 0) return refuse(position, "not the quotient of an integer");
    const uint32_t group = (position / 2 + block + op) % groups;
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      const uint32_t place = (rank + block + op) % ranks_;
      if (place / bits != group) continue;
      const bool in = (sum >> (place % bits) & 1) != 0;
      if (out->known[rank] && out->ranks[rank] != in) return refuse(position, "another set of ranks");
      out->known[rank] = true;
      out->ranks[rank] = in;
    }
    // Bits that belong to no rank.
    int64_t named = 0;
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      const uint32_t place = (rank + block + op) % ranks_;
      if (place / bits == group && out->ranks[rank]) named |= static_cast<int64_t>(1) << (place % bits);
    }
    if (named != sum) return refuse(position, "a bit that no rank has");
  }

  out->whole = out->known.count() == ranks_;
  const auto count = static_cast<uint32_t>(out->ranks.count());
  if (shape.kind == ReduceKind::kMean && count != 0 && (out->whole ? count != divisor : count > divisor)) {
    out->why = "divided by " + std::to_string(divisor) + ", but " + std::to_string(count) + " ranks are in";
    return false;
  }
  if (!out->whole) {
    // A quotient alone, without the number of ranks, can have more than one explanation.
    if (divisor != 1 || shape.kind == ReduceKind::kMean) out->known.reset();
    return out->ok = true;
  }
  for (uint32_t position = 1; position < elements; position += 2) {
    int64_t sum = 0;
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      if (out->ranks[rank]) sum += value(shape, op, block, position, rank);
    }
    encode(shape.type, sum, divisor, again.data());
    if (std::memcmp(again.data(), bytes + position * size, size) != 0) {
      return refuse(position, "not the sum of the ranks that the block names");
    }
  }
  return out->ok = true;
}

Recovered Gradients::recover(const OpShape& shape, uint32_t op, uint32_t block,
                             const std::byte* bytes) const {
  Recovered result;
  if (const uint32_t tag = tag_of(op); tag != kNoTag) {
    TagRecovered found =
        tags_[tag].codes.read_result(block, elements_of(shape, block), bytes, shape.loss_scale);
    result.ok = found.ok;
    result.whole = found.whole;
    result.why = std::move(found.why);
    for (const uint32_t contribution : found.in) {
      if (contribution / ranks_ == step_of_[op]) result.ranks[contribution % ranks_] = true;
    }
    if (found.whole) {
      for (uint32_t rank = 0; rank < ranks_; ++rank) result.known[rank] = true;
    }
    result.in = std::move(found.in);
    return result;
  }
  if (shape.kind == ReduceKind::kSum) {
    explain(shape, op, block, bytes, 1, &result);
    return result;
  }
  // A few quotients can have more than one explanation; then the block names nobody for certain.
  uint32_t explanations = 0;
  Recovered attempt;
  for (uint32_t divisor = ranks_; divisor >= 1; --divisor) {
    if (explain(shape, op, block, bytes, divisor, &attempt)) {
      if (explanations++ == 0 || result.ranks.none()) result = attempt;
      if (attempt.ranks.none()) return attempt;  // zeros: every divisor explains them
    } else if (explanations == 0 && result.why.empty()) {
      result.why = attempt.why;
    }
  }
  if (explanations > 1) {
    result.whole = false;
    result.known.reset();
  }
  return result;
}

}  // namespace sluice::simulation
