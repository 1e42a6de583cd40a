#include "tools/sluice_bench/oracle.h"

#include <algorithm>
#include <cstring>

namespace sluice::bench {
namespace {

// Finalizer of splitmix64: neighbouring elements get unrelated values, so that a shift by any distance shows.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Values lie in [0, modulus). bf16 has 8 bits of precision, f16 11, u8 wraps at 256.
uint32_t modulus_of(ElementType type) {
  switch (type) {
    case ElementType::kBf16:
    case ElementType::kU8:
      return 8;
    case ElementType::kF16:
      return 32;
    default:
      return 1024;
  }
}

// The element's own random number, of which every rank takes other bits.
struct Element {
  uint64_t hash;
  uint32_t modulus;
  uint32_t value(uint32_t rank) const {
    return static_cast<uint32_t>((hash >> (rank % 48)) + rank) & (modulus - 1);
  }
};

uint16_t to_bf16(uint32_t value) {  // exact for integers up to 256
  const auto wide = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &wide, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

uint16_t to_f16(uint32_t value) {  // exact for integers up to 2048
  if (value == 0) return 0;
  const int exponent = 31 - __builtin_clz(value);
  return static_cast<uint16_t>((exponent + 15) << 10 | ((value << (10 - exponent)) & 0x3ff));
}

double from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

double from_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const uint32_t fraction = bits & 0x3ff;
  double value = exponent == 0 ? fraction / 16777216.0 : (1024 + fraction) / 1024.0;
  if (exponent == 31) value = fraction != 0 ? __builtin_nan("") : __builtin_inf();
  if (exponent > 0 && exponent < 31)
    value = exponent >= 15 ? value * (1U << (exponent - 15)) : value / (1U << (15 - exponent));
  return (bits & 0x8000) != 0 ? -value : value;
}

template <typename T, typename Encode>
void fill_as(const Pattern& pattern, uint32_t rank, void* data, uint64_t count, Encode encode) {
  const uint32_t modulus = modulus_of(pattern.type);
  const uint32_t factor = pattern.kind == ReduceKind::kMean ? pattern.world_size : 1;
  const uint64_t base = mix(pattern.seed);
  T* out = static_cast<T*>(data);
  for (uint64_t i = 0; i < count; ++i) out[i] = encode(Element{mix(base + i), modulus}.value(rank) * factor);
}

template <typename T, typename Encode, typename Decode>
Verdict check_as(const Pattern& pattern, const void* data, uint64_t count, Encode encode, Decode decode) {
  Verdict verdict;
  const uint32_t modulus = modulus_of(pattern.type);
  const uint64_t base = mix(pattern.seed);
  const T* in = static_cast<const T*>(data);
  for (uint64_t i = 0; i < count; ++i) {
    const Element element{mix(base + i), modulus};
    uint32_t sum = 0;
    for (uint32_t rank = 0; rank < pattern.world_size; ++rank) sum += element.value(rank);
    const T expected = encode(sum);
    if (std::memcmp(&in[i], &expected, sizeof(T)) == 0) continue;
    if (verdict.wrong++ == 0) {
      verdict.first = i;
      verdict.found = decode(in[i]);
      verdict.expected = decode(expected);
    }
    if (decode(in[i]) == 0) ++verdict.zeros;
  }
  return verdict;
}

template <typename T>
T encode_plain(uint32_t value) {
  return static_cast<T>(value);
}
template <typename T>
double decode_plain(T value) {
  return static_cast<double>(value);
}

constexpr const char* kNames[kElementTypes] = {"f32", "f16", "bf16", "f64", "i32", "i64", "u8"};

}  // namespace

uint32_t largest_world(ElementType type, ReduceKind kind) {
  const uint32_t modulus = modulus_of(type);
  uint64_t limit = 1ULL << 24;  // f32, and i32 far from its end
  if (type == ElementType::kBf16) limit = 256;
  if (type == ElementType::kU8) limit = 255;
  if (type == ElementType::kF16) limit = 2048;
  // The largest sum is (modulus - 1) x N; under mean the contributions themselves are N times as large, and the sum
  // of 16-bit types lives in f32, whose 24 bits are then the limit.
  uint64_t world = limit / (modulus - 1);
  if (kind == ReduceKind::kMean) {
    while (world > 1 && (modulus - 1) * world * world > (1ULL << 24)) --world;
  }
  return static_cast<uint32_t>(std::max<uint64_t>(world, 1));
}

void fill(const Pattern& pattern, uint32_t rank, void* data, uint64_t count) {
  switch (pattern.type) {
    case ElementType::kF32:
      return fill_as<float>(pattern, rank, data, count, encode_plain<float>);
    case ElementType::kF16:
      return fill_as<uint16_t>(pattern, rank, data, count, to_f16);
    case ElementType::kBf16:
      return fill_as<uint16_t>(pattern, rank, data, count, to_bf16);
    case ElementType::kF64:
      return fill_as<double>(pattern, rank, data, count, encode_plain<double>);
    case ElementType::kI32:
      return fill_as<int32_t>(pattern, rank, data, count, encode_plain<int32_t>);
    case ElementType::kI64:
      return fill_as<int64_t>(pattern, rank, data, count, encode_plain<int64_t>);
    case ElementType::kU8:
      return fill_as<uint8_t>(pattern, rank, data, count, encode_plain<uint8_t>);
  }
}

Verdict check(const Pattern& pattern, const void* data, uint64_t count) {
  switch (pattern.type) {
    case ElementType::kF32:
      return check_as<float>(pattern, data, count, encode_plain<float>, decode_plain<float>);
    case ElementType::kF16:
      return check_as<uint16_t>(pattern, data, count, to_f16, from_f16);
    case ElementType::kBf16:
      return check_as<uint16_t>(pattern, data, count, to_bf16, from_bf16);
    case ElementType::kF64:
      return check_as<double>(pattern, data, count, encode_plain<double>, decode_plain<double>);
    case ElementType::kI32:
      return check_as<int32_t>(pattern, data, count, encode_plain<int32_t>, decode_plain<int32_t>);
    case ElementType::kI64:
      return check_as<int64_t>(pattern, data, count, encode_plain<int64_t>, decode_plain<int64_t>);
    case ElementType::kU8:
      return check_as<uint8_t>(pattern, data, count, encode_plain<uint8_t>, decode_plain<uint8_t>);
  }
  return {};
}

std::string describe(const Verdict& verdict, uint64_t count) {
  if (verdict.wrong == 0) return "all " + std::to_string(count) + " right";
  return std::to_string(verdict.wrong) + " of " + std::to_string(count) + " wrong (" +
         std::to_string(verdict.zeros) + " are 0), first at " + std::to_string(verdict.first) + ": " +
         std::to_string(verdict.found) + " instead of " + std::to_string(verdict.expected);
}

bool parse_type(const std::string& name, ElementType* type) {
  for (uint8_t i = 0; i < kElementTypes; ++i) {
    if (name == kNames[i]) {
      *type = static_cast<ElementType>(i);
      return true;
    }
  }
  return false;
}

const char* type_name(ElementType type) { return kNames[static_cast<uint8_t>(type)]; }

}  // namespace sluice::bench
