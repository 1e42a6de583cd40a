// base/numeric against plain scalar references, on every instruction set that this CPU has.
#include "base/numeric/numeric.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace sluice::numeric {
namespace {

// References. f16 -> f32 by value; f32 -> 16 bits by search for the nearest representable value, in double,
// where both the values and their midpoints are exact. Nothing here shares an idea with the code under test.

double half_value(uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const int mantissa = half & 0x3ff;
  double value = 0;
  if (exponent == 31) {
    value = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, -24);
  } else {
    value = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return (half & 0x8000) != 0 ? -value : value;
}

double brain_value(uint16_t brain) { return std::bit_cast<float>(static_cast<uint32_t>(brain) << 16); }

// Largest magnitude code (without sign) whose value is at most |x|, then round to nearest, ties to even.
uint16_t round_to_16(double x, double (*value_of)(uint16_t), uint16_t infinity, double overflow) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(x);
  if (magnitude >= overflow) return sign | infinity;
  uint16_t low = 0;
  uint16_t high = infinity;  // value_of(low) <= magnitude < value_of(high)
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
    (value_of(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - value_of(low);
  const double above = (high == infinity ? overflow * 2 - value_of(low) : value_of(high)) - magnitude;
  const bool up = below > above || (below == above && (low & 1) != 0);
  return sign | (up ? high : low);
}

uint16_t reference_half(float x) { return round_to_16(x, half_value, 0x7c00, 65520.0); }
uint16_t reference_brain(float x) {
  // Halfway between the largest finite bf16 and the next power of two.
  return round_to_16(x, brain_value, 0x7f80, std::ldexp(511.0, 119));
}

const std::vector<ElementType> kAllTypes = {ElementType::kF32, ElementType::kF16, ElementType::kBf16,
                                            ElementType::kF64, ElementType::kI32, ElementType::kI64,
                                            ElementType::kU8};

class NumericTest : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { choose(GetParam()); }
  void TearDown() override { choose(0); }
  static void choose(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

std::vector<int64_t> targets_of_this_cpu() {
  std::vector<int64_t> targets;
  for (int64_t left = HWY_TARGETS & hwy::SupportedTargets(); left != 0; left &= left - 1) {
    targets.push_back(left & -left);
  }
  return targets;
}

INSTANTIATE_TEST_SUITE_P(Targets, NumericTest, testing::ValuesIn(targets_of_this_cpu()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

TEST_P(NumericTest, UsesTheTargetAskedFor) { EXPECT_STREQ(target_name(), hwy::TargetName(GetParam())); }

// A buffer whose data begins at any alignment, with guards on both sides.
class Buffer {
 public:
  Buffer(size_t bytes, size_t misalignment)
      : store_(bytes + 2 * kGuard + 64, std::byte{0xa5}), begin_(kGuard + misalignment), bytes_(bytes) {}
  std::byte* data() { return store_.data() + begin_; }
  size_t size() const { return bytes_; }
  template <typename T>
  T get(size_t i) {
    T value;
    std::memcpy(&value, data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <typename T>
  void set(size_t i, T value) {
    std::memcpy(data() + i * sizeof(T), &value, sizeof(T));
  }
  bool guards_intact() const {
    for (size_t i = 0; i < store_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + bytes_) && store_[i] != std::byte{0xa5}) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 128;
  std::vector<std::byte> store_;
  size_t begin_;
  size_t bytes_;
};

uint64_t next_random(uint64_t* state) {  // SplitMix64
  uint64_t z = (*state += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

TEST_P(NumericTest, EveryHalfLoads) {
  Buffer wire(65536 * 2, 2);
  Buffer accumulator(65536 * 4, 1);
  for (uint32_t i = 0; i < 65536; ++i) wire.set<uint16_t>(i, static_cast<uint16_t>(i));
  load(ElementType::kF16, wire.data(), accumulator.data(), 65536);
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto half = static_cast<uint16_t>(i);
    const float got = accumulator.get<float>(i);
    if ((half & 0x7fff) > 0x7c00) {
      // NaN stays NaN, becomes quiet and keeps sign and payload.
      const uint32_t expected = (uint32_t{half} & 0x8000) << 16 | 0x7fc00000 | (uint32_t{half} & 0x3ff) << 13;
      ASSERT_EQ(std::bit_cast<uint32_t>(got), expected) << std::hex << i;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(static_cast<float>(half_value(half))))
          << std::hex << i;
    }
  }
}

TEST_P(NumericTest, EveryHalfAndBrainComesBack) {
  for (const ElementType type : {ElementType::kF16, ElementType::kBf16}) {
    const uint32_t infinity = type == ElementType::kF16 ? 0x7c00 : 0x7f80;
    const uint32_t quiet = type == ElementType::kF16 ? 0x0200 : 0x0040;
    Buffer wire(65536 * 2, 0);
    Buffer accumulator(65536 * 4, 0);
    for (uint32_t i = 0; i < 65536; ++i) wire.set<uint16_t>(i, static_cast<uint16_t>(i));
    load(type, wire.data(), accumulator.data(), 65536);
    Buffer back(65536 * 2, 0);
    EXPECT_FALSE(finish(type, accumulator.data(), back.data(), 65536, 1));
    for (uint32_t i = 0; i < 65536; ++i) {
      const uint32_t expected = (i & 0x7fff) > infinity ? (i | quiet) : i;
      ASSERT_EQ(back.get<uint16_t>(i), expected) << std::hex << i;
    }
  }
}

// Floats around everything that can go wrong in rounding: every representable 16-bit value, the midpoints
// between neighbours, and the floats next to both.
std::vector<float> edge_floats(double (*value_of)(uint16_t), uint16_t infinity) {
  std::vector<float> values;
  for (uint32_t code = 0; code < infinity; ++code) {
    const double here = value_of(static_cast<uint16_t>(code));
    const double next = code + 1 == infinity ? 2 * here - value_of(static_cast<uint16_t>(code - 1))
                                             : value_of(static_cast<uint16_t>(code + 1));
    for (const double x : {here, (here + next) / 2}) {
      const auto value = static_cast<float>(x);
      for (const float v : {value, std::nextafterf(value, INFINITY), std::nextafterf(value, -INFINITY)}) {
        if (!std::isfinite(v)) continue;
        values.push_back(v);
        values.push_back(-v);
      }
    }
  }
  for (const float v : {std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min(),
                        std::numeric_limits<float>::max(), 65519.996f, 65520.0f, 65536.0f, 1e30f}) {
    values.push_back(v);
    values.push_back(-v);
  }
  return values;
}

TEST_P(NumericTest, RoundsToNearestEven) {
  struct Case {
    ElementType type;
    double (*value_of)(uint16_t);
    uint16_t infinity;
    uint16_t (*reference)(float);
  };
  for (const Case& c : {Case{ElementType::kF16, half_value, 0x7c00, reference_half},
                        Case{ElementType::kBf16, brain_value, 0x7f80, reference_brain}}) {
    std::vector<float> values = edge_floats(c.value_of, c.infinity);
    uint64_t state = 7;
    for (int i = 0; i < 200000; ++i) {
      const float v = std::bit_cast<float>(static_cast<uint32_t>(next_random(&state)));
      if (std::isfinite(v)) values.push_back(v);
    }
    std::vector<uint16_t> wire(values.size());
    finish(c.type, reinterpret_cast<const std::byte*>(values.data()),
           reinterpret_cast<std::byte*>(wire.data()), values.size(), 1);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(wire[i], c.reference(values[i]))
          << element_type_name(c.type) << " of " << std::hexfloat << values[i];
    }
  }
}

TEST_P(NumericTest, NanStaysNanAndInfinityInfinity) {
  const uint32_t codes[] = {0x7f800000, 0xff800000, 0x7f800001, 0xff800001, 0x7fc00000,
                            0x7fffffff, 0xffffffff, 0x7f801fff, 0x7f802000, 0x7fbfffff};
  float values[std::size(codes)];
  std::memcpy(values, codes, sizeof codes);
  for (const ElementType type : {ElementType::kF16, ElementType::kBf16}) {
    uint16_t wire[std::size(codes)];
    EXPECT_FALSE(finish(type, reinterpret_cast<const std::byte*>(values), reinterpret_cast<std::byte*>(wire),
                        std::size(codes), 1));
    const uint16_t infinity = type == ElementType::kF16 ? 0x7c00 : 0x7f80;
    EXPECT_EQ(wire[0], infinity);
    EXPECT_EQ(wire[1], infinity | 0x8000);
    for (size_t i = 2; i < std::size(codes); ++i) {
      EXPECT_GT(wire[i] & 0x7fff, infinity) << std::hex << codes[i];
      EXPECT_EQ(wire[i] >> 15, codes[i] >> 31);
    }
  }
}

// Integer-valued elements, so that every sum is exact in every type.
int small_integer(uint64_t* state) { return static_cast<int>(next_random(state) % 33) - 16; }

void set_element(ElementType type, Buffer* wire, size_t i, int value) {
  switch (type) {
    case ElementType::kF32:
      return wire->set<float>(i, static_cast<float>(value));
    case ElementType::kF16:
      return wire->set<uint16_t>(i, reference_half(static_cast<float>(value)));
    case ElementType::kBf16:
      return wire->set<uint16_t>(i, reference_brain(static_cast<float>(value)));
    case ElementType::kF64:
      return wire->set<double>(i, value);
    case ElementType::kI32:
      return wire->set<int32_t>(i, value);
    case ElementType::kI64:
      return wire->set<int64_t>(i, value);
    case ElementType::kU8:
      return wire->set<uint8_t>(i, static_cast<uint8_t>(value));
  }
}

double accumulated(ElementType type, Buffer* accumulator, size_t i) {
  switch (accumulator_type(type)) {
    case ElementType::kF32:
      return accumulator->get<float>(i);
    case ElementType::kF64:
      return accumulator->get<double>(i);
    case ElementType::kI32:
      return accumulator->get<int32_t>(i);
    case ElementType::kI64:
      return static_cast<double>(accumulator->get<int64_t>(i));
    default:
      return accumulator->get<uint8_t>(i);
  }
}

TEST_P(NumericTest, SumsAtEveryCountAndAlignment) {
  std::vector<size_t> counts = {100, 127, 128, 129, 1000, 4097};
  for (size_t count = 0; count <= 70; ++count) counts.push_back(count);
  uint64_t state = 1;
  for (const ElementType type : kAllTypes) {
    const size_t wire_size = element_size(type);
    const size_t sum_size = element_size(accumulator_type(type));
    for (const size_t count : counts) {
      const size_t shift = next_random(&state) % 64;
      Buffer accumulator(count * sum_size, shift);
      std::vector<int> expected(count, 0);
      for (int sender = 0; sender < 3; ++sender) {
        Buffer wire(count * wire_size, (shift + 17 * static_cast<size_t>(sender)) % 64);
        for (size_t i = 0; i < count; ++i) {
          const int value = small_integer(&state);
          set_element(type, &wire, i, value);
          expected[i] += value;
        }
        (sender == 0 ? load : add)(type, wire.data(), accumulator.data(), count);
        EXPECT_TRUE(wire.guards_intact());
        EXPECT_TRUE(all_finite(type, wire.data(), count));
      }
      ASSERT_TRUE(accumulator.guards_intact()) << element_type_name(type) << " count " << count;
      for (size_t i = 0; i < count; ++i) {
        const double want = type == ElementType::kU8 ? static_cast<uint8_t>(expected[i]) : expected[i];
        ASSERT_EQ(accumulated(type, &accumulator, i), want)
            << element_type_name(type) << " count " << count << " element " << i;
      }
      // Back to the wire, into another buffer and in place: the same bytes.
      Buffer wire(count * wire_size, (shift + 3) % 64);
      EXPECT_TRUE(finish(type, accumulator.data(), wire.data(), count, 1));
      EXPECT_TRUE(wire.guards_intact());
      EXPECT_TRUE(finish(type, accumulator.data(), accumulator.data(), count, 1));
      EXPECT_TRUE(accumulator.guards_intact());
      ASSERT_EQ(count == 0 ? 0 : std::memcmp(wire.data(), accumulator.data(), count * wire_size), 0)
          << element_type_name(type) << " count " << count;
      Buffer expected_wire(count * wire_size, 0);
      for (size_t i = 0; i < count; ++i) set_element(type, &expected_wire, i, expected[i]);
      ASSERT_EQ(count == 0 ? 0 : std::memcmp(wire.data(), expected_wire.data(), count * wire_size), 0)
          << element_type_name(type) << " count " << count;
    }
  }
}

TEST_P(NumericTest, IntegersWrap) {
  const int32_t big32[] = {INT32_MAX, INT32_MIN, -1};
  const int32_t one32[] = {1, -1, 1};
  int32_t sum32[3];
  std::memcpy(sum32, big32, sizeof big32);
  add(ElementType::kI32, reinterpret_cast<const std::byte*>(one32), reinterpret_cast<std::byte*>(sum32), 3);
  EXPECT_EQ(sum32[0], INT32_MIN);
  EXPECT_EQ(sum32[1], INT32_MAX);
  EXPECT_EQ(sum32[2], 0);
  const int64_t one64 = 1;
  int64_t sum64 = INT64_MAX;
  add(ElementType::kI64, reinterpret_cast<const std::byte*>(&one64), reinterpret_cast<std::byte*>(&sum64), 1);
  EXPECT_EQ(sum64, INT64_MIN);
  const uint8_t one8 = 1;
  uint8_t sum8 = 255;
  add(ElementType::kU8, reinterpret_cast<const std::byte*>(&one8), reinterpret_cast<std::byte*>(&sum8), 1);
  EXPECT_EQ(sum8, 0);
}

TEST_P(NumericTest, DividesLikeTheScalarDivision) {
  uint64_t state = 3;
  for (const double divisor : {1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 49.0, 1000.0, 1023.0, 1024.0}) {
    std::vector<float> sums(5001);
    std::vector<double> wide(5001);
    for (size_t i = 0; i < sums.size(); ++i) {
      // Mantissas at random, exponents from where f16 is subnormal to where it overflows.
      const int exponent = static_cast<int>(next_random(&state) % 48) - 28;
      sums[i] = std::ldexp(static_cast<float>(static_cast<int32_t>(next_random(&state) >> 40) - (1 << 23)),
                           exponent - 23);
      wide[i] =
          std::ldexp(static_cast<double>(static_cast<int64_t>(next_random(&state)) >> 11), exponent - 52);
    }
    const auto* from = reinterpret_cast<const std::byte*>(sums.data());
    std::vector<float> f32(sums.size());
    EXPECT_TRUE(
        finish(ElementType::kF32, from, reinterpret_cast<std::byte*>(f32.data()), sums.size(), divisor));
    std::vector<double> f64(sums.size());
    EXPECT_TRUE(finish(ElementType::kF64, reinterpret_cast<const std::byte*>(wide.data()),
                       reinterpret_cast<std::byte*>(f64.data()), wide.size(), divisor));
    std::vector<uint16_t> f16(sums.size());
    std::vector<uint16_t> bf16(sums.size());
    bool overflow = false;
    const bool finite16 =
        finish(ElementType::kF16, from, reinterpret_cast<std::byte*>(f16.data()), sums.size(), divisor);
    EXPECT_TRUE(
        finish(ElementType::kBf16, from, reinterpret_cast<std::byte*>(bf16.data()), sums.size(), divisor));
    for (size_t i = 0; i < sums.size(); ++i) {
      const float quotient = sums[i] / static_cast<float>(divisor);
      ASSERT_EQ(f32[i], quotient);
      ASSERT_EQ(f64[i], wide[i] / divisor);
      ASSERT_EQ(f16[i], reference_half(quotient));
      ASSERT_EQ(bf16[i], reference_brain(quotient));
      overflow = overflow || (f16[i] & 0x7c00) == 0x7c00;
    }
    EXPECT_EQ(finite16, !overflow);
  }
}

TEST_P(NumericTest, DivisionIsNotAReciprocal) {
  // 5 * (1/5) style errors: for many integers k, k * (1.0f / d) differs from k / d in f32.
  std::vector<float> sums(4096);
  for (size_t i = 0; i < sums.size(); ++i) sums[i] = static_cast<float>(i);
  std::vector<float> got(sums.size());
  size_t differs = 0;
  for (const float divisor : {3.0f, 7.0f, 10.0f}) {
    finish(ElementType::kF32, reinterpret_cast<const std::byte*>(sums.data()),
           reinterpret_cast<std::byte*>(got.data()), sums.size(), divisor);
    for (size_t i = 0; i < sums.size(); ++i) {
      ASSERT_EQ(got[i], sums[i] / divisor);
      differs += got[i] != sums[i] * (1.0f / divisor);
    }
  }
  EXPECT_GT(differs, 100U);  // the inputs can tell the two apart
}

TEST_P(NumericTest, FindsEveryNonFiniteElement) {
  for (const ElementType type : kAllTypes) {
    const size_t size = element_size(type);
    for (const size_t count : {1U, 3U, 16U, 67U}) {
      for (size_t at = 0; at < count; ++at) {
        for (const double value : {HUGE_VAL, -HUGE_VAL, std::nan("")}) {
          Buffer wire(count * size, 5);
          Buffer sum(count * element_size(accumulator_type(type)), 9);
          std::memset(wire.data(), 0, wire.size());
          std::memset(sum.data(), 0, sum.size());
          if (!is_float(type)) {
            std::memset(wire.data(), 0xff, wire.size());  // looks like a NaN in a float type
            EXPECT_TRUE(all_finite(type, wire.data(), count));
            EXPECT_TRUE(finish(type, sum.data(), wire.data(), count, 1));
            continue;
          }
          if (type == ElementType::kF64) {
            sum.set<double>(at, value);
          } else {
            sum.set<float>(at, static_cast<float>(value));
          }
          EXPECT_FALSE(finish(type, sum.data(), wire.data(), count, 2));
          EXPECT_FALSE(all_finite(type, wire.data(), count));
          for (size_t i = 0; i < count; ++i) {
            if (i != at) std::memset(wire.data() + i * size, 0x3c, size);
          }
          EXPECT_FALSE(all_finite(type, wire.data(), count));
          std::memset(wire.data() + at * size, 0x3c, size);
          EXPECT_TRUE(all_finite(type, wire.data(), count));
        }
      }
    }
  }
}

// The same bytes on every instruction set, NaN payloads included where no two NaNs meet.
TEST_P(NumericTest, StreamCopiesEveryByteAndNoMore) {
  std::vector<std::byte> from(5000), memory(6000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 256);
  std::byte* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  for (const size_t offset : {0UL, 4UL, 64UL}) {
    for (const size_t bytes : {0UL, 1UL, 63UL, 64UL, 65UL, 1344UL, 1347UL, 4000UL}) {
      std::fill(memory.begin(), memory.end(), std::byte{0xa5});
      stream(from.data() + 3, aligned + offset, bytes);
      stream_fence();
      ASSERT_EQ(std::memcmp(aligned + offset, from.data() + 3, bytes), 0) << offset << " " << bytes;
      for (std::byte* p = memory.data(); p < memory.data() + memory.size(); ++p) {
        if (p < aligned + offset || p >= aligned + offset + bytes) {
          ASSERT_EQ(*p, std::byte{0xa5}) << offset << " " << bytes;
        }
      }
    }
  }
}

TEST_P(NumericTest, FinishInPlaceUndividedKeepsTheBytesAndLooksAtThem) {
  std::vector<float> values(337);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 100.5F;
  const std::vector<float> before = values;
  auto* bytes = reinterpret_cast<std::byte*>(values.data());
  EXPECT_TRUE(finish(ElementType::kF32, bytes, bytes, values.size(), 1.0));
  EXPECT_EQ(values, before);
  for (const size_t at : {0UL, 100UL, 336UL}) {
    values = before;
    values[at] = std::numeric_limits<float>::infinity();
    EXPECT_FALSE(finish(ElementType::kF32, bytes, bytes, values.size(), 1.0)) << at;
  }
}

TEST(NumericTargets, AgreeBitByBit) {
  constexpr size_t kCount = 100003;
  std::vector<uint32_t> bits(kCount);
  std::vector<uint32_t> other(kCount);
  uint64_t state = 11;
  for (size_t i = 0; i < kCount; ++i) {
    bits[i] = static_cast<uint32_t>(next_random(&state));
    const float finite = static_cast<float>(small_integer(&state));
    std::memcpy(&other[i], &finite, 4);
  }
  for (const ElementType type : {ElementType::kF32, ElementType::kF16, ElementType::kBf16}) {
    std::vector<std::byte> first;
    for (const int64_t target : targets_of_this_cpu()) {
      hwy::SetSupportedTargetsForTest(target);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      std::vector<float> sum(kCount);
      load(type, reinterpret_cast<const std::byte*>(bits.data()), reinterpret_cast<std::byte*>(sum.data()),
           kCount);
      add(ElementType::kF32, reinterpret_cast<const std::byte*>(other.data()),
          reinterpret_cast<std::byte*>(sum.data()), kCount);
      std::vector<std::byte> wire(kCount * element_size(type));
      finish(type, reinterpret_cast<const std::byte*>(sum.data()), wire.data(), kCount, 3);
      if (first.empty()) first = wire;
      EXPECT_EQ(std::memcmp(first.data(), wire.data(), wire.size()), 0)
          << element_type_name(type) << " on " << hwy::TargetName(target);
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace
}  // namespace sluice::numeric
