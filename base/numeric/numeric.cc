#include "base/numeric/numeric.h"

#include <cstdint>
#include <cstring>

#include "base/assert.h"

// Highway includes this file once per instruction set (foreach_target.h).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "base/numeric/numeric.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace sluice::numeric {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// x86 has instructions for f16 from AVX2 on (F16C), rounding to nearest even. Everywhere else the conversion
// is done on integers, because Highway 1.0.3's own fallback cuts off instead of rounding and knows neither
// infinity nor NaN. The test compares both bit by bit.
#define SLUICE_HAVE_F16C (HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL)

// A codec turns wire elements into accumulator vectors and back. `Bits` is the unsigned type of a wire
// element; an element is finite unless all bits of kExponent are set (0: always finite).

template <typename T, typename BitsType, BitsType kExponentMask>
struct PlainCodec {
  using Wire = T;
  using Accumulator = T;
  using Bits = BitsType;
  static constexpr Bits kExponent = kExponentMask;
  template <class D>
  static HWY_INLINE hn::VFromD<D> decode(D d, const Wire* from) {
    return hn::LoadU(d, from);
  }
  template <class D, class V>
  static HWY_INLINE auto encode([[maybe_unused]] D d, V value) {
    return hn::BitCast(hn::RebindToUnsigned<D>(), value);
  }
};

struct F16Codec {
  using Wire = uint16_t;
  using Accumulator = float;
  using Bits = uint16_t;
  static constexpr Bits kExponent = 0x7c00;

  template <class D>
  static HWY_INLINE hn::VFromD<D> decode(D d, const Wire* from) {
#if SLUICE_HAVE_F16C
    const hn::Rebind<hwy::float16_t, D> d16;
    const hn::Rebind<uint16_t, D> du16;
    return hn::PromoteTo(d, hn::BitCast(d16, hn::LoadU(du16, from)));
#else
    const hn::Rebind<uint16_t, D> du16;
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto half = hn::PromoteTo(du, hn::LoadU(du16, from));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)));
    const auto exponent = hn::And(half, hn::Set(du, 0x7c00u));
    const auto mantissa = hn::And(half, hn::Set(du, 0x03ffu));
    const auto zero = hn::Zero(du);
    // Normal: rebias the exponent by 112. Infinity and NaN: by 112 twice, which makes 255; NaN becomes quiet.
    const auto special = hn::Eq(exponent, hn::Set(du, 0x7c00u));
    auto wide = hn::Add(hn::ShiftLeft<13>(hn::Or(exponent, mantissa)), hn::Set(du, 112u << 23));
    const auto quiet = hn::IfThenZeroElse(hn::Eq(mantissa, zero), hn::Set(du, 1u << 22));
    wide = hn::IfThenElse(special, hn::Or(hn::Add(wide, hn::Set(du, 112u << 23)), quiet), wide);
    // Subnormal: the mantissa counts units of 2^-24.
    const auto small = hn::Mul(hn::ConvertTo(d, hn::BitCast(di, mantissa)), hn::Set(d, 0x1p-24f));
    wide = hn::IfThenElse(hn::Eq(exponent, zero), hn::BitCast(du, small), wide);
    return hn::BitCast(d, hn::Or(wide, sign));
#endif
  }

  template <class D, class V>
  static HWY_INLINE auto encode([[maybe_unused]] D d, V value) {
    const hn::Rebind<uint16_t, D> du16;
#if SLUICE_HAVE_F16C
    const hn::Rebind<hwy::float16_t, D> d16;
    return hn::BitCast(du16, hn::DemoteTo(d16, value));
#else
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto bits = hn::BitCast(du, value);
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000u));
    // Normal: rebias, add just under half a unit plus the last kept bit (ties go to even), cut. A carry runs
    // into the exponent, up to infinity, as it should.
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
    const auto rebias = hn::Sub(magnitude, hn::Set(du, 112u << 23));
    auto half = hn::ShiftRight<13>(hn::Add(hn::Add(rebias, hn::Set(du, 0x0fffu)), odd));
    // Below 2^-14: adding 0.5 lets the adder round to units of 2^-24, which are the subnormals of f16.
    const auto shifted = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f));
    const auto small = hn::Sub(hn::BitCast(du, shifted), hn::Set(du, 0x3f000000u));
    const auto less = [&](auto a, uint32_t b) HWY_ATTR {  // both below 2^31: signed comparison is right
      return hn::RebindMask(du, hn::Lt(hn::BitCast(di, a), hn::Set(di, static_cast<int32_t>(b))));
    };
    half = hn::IfThenElse(less(magnitude, 0x38800000u), small, half);
    half = hn::IfThenElse(less(magnitude, 0x47800000u), half, hn::Set(du, 0x7c00u));  // 65536 and above
    const auto nan =
        hn::Or(hn::Set(du, 0x7e00u), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x03ffu)));
    half = hn::IfThenElse(less(magnitude, 0x7f800001u), half, nan);
    return hn::DemoteTo(du16, hn::BitCast(di, hn::Or(half, sign)));
#endif
  }
};

struct Bf16Codec {
  using Wire = uint16_t;
  using Accumulator = float;
  using Bits = uint16_t;
  static constexpr Bits kExponent = 0x7f80;

  template <class D>
  static HWY_INLINE hn::VFromD<D> decode(D d, const Wire* from) {
    const hn::Rebind<uint16_t, D> du16;
    const hn::RebindToUnsigned<D> du;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, from))));
  }

  template <class D, class V>
  static HWY_INLINE auto encode([[maybe_unused]] D d, V value) {
    const hn::Rebind<uint16_t, D> du16;
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto bits = hn::BitCast(du, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd));
    // Rounding could carry a NaN into infinity: cut it instead and make it quiet.
    const auto nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x0040u));
    const auto out = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), nan, rounded);
    return hn::DemoteTo(du16, hn::BitCast(di, out));
  }
};

// Pads of the last, partial vector. Every element goes through the same vector code, so that where a block
// was cut never changes a bit of the result.
template <class D, class Wire, class Accumulator>
struct Tail {
  HWY_ALIGN Wire wire[hn::MaxLanes(D())] = {};
  HWY_ALIGN Accumulator accumulator[hn::MaxLanes(D())] = {};
};

template <class Codec, bool kAdd>
HWY_ATTR void accumulate(const std::byte* wire_bytes, std::byte* accumulator_bytes, size_t count) {
  using Accumulator = typename Codec::Accumulator;
  using Wire = typename Codec::Wire;
  const hn::ScalableTag<Accumulator> d;
  const size_t lanes = hn::Lanes(d);
  const auto* wire = reinterpret_cast<const Wire*>(wire_bytes);
  auto* accumulator = reinterpret_cast<Accumulator*>(accumulator_bytes);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    auto value = Codec::decode(d, wire + i);
    if constexpr (kAdd) value = hn::Add(hn::LoadU(d, accumulator + i), value);
    hn::StoreU(value, d, accumulator + i);
  }
  if (i == count) return;
  const size_t rest = count - i;
  Tail<hn::ScalableTag<Accumulator>, Wire, Accumulator> tail;
  std::memcpy(tail.wire, wire_bytes + i * sizeof(Wire), rest * sizeof(Wire));
  auto value = Codec::decode(d, tail.wire);
  if constexpr (kAdd) {
    std::memcpy(tail.accumulator, accumulator_bytes + i * sizeof(Accumulator), rest * sizeof(Accumulator));
    value = hn::Add(hn::LoadU(d, tail.accumulator), value);
  }
  hn::StoreU(value, d, tail.accumulator);
  std::memcpy(accumulator_bytes + i * sizeof(Accumulator), tail.accumulator, rest * sizeof(Accumulator));
}

// Writes forward: the wire element is never larger than the accumulator element, so a store in place only
// reaches what has been read.
template <class Codec, bool kDivide>
HWY_ATTR bool finish_as(const std::byte* accumulator_bytes, std::byte* wire_bytes, size_t count,
                        double divisor) {
  using Accumulator = typename Codec::Accumulator;
  using Wire = typename Codec::Wire;
  using Bits = typename Codec::Bits;
  const hn::ScalableTag<Accumulator> d;
  const hn::Rebind<Bits, hn::ScalableTag<Accumulator>> db;
  const size_t lanes = hn::Lanes(d);
  const auto* accumulator = reinterpret_cast<const Accumulator*>(accumulator_bytes);
  auto* wire = reinterpret_cast<Bits*>(wire_bytes);
  [[maybe_unused]] const auto by = hn::Set(d, static_cast<Accumulator>(divisor));
  const auto exponent = hn::Set(db, Codec::kExponent);
  auto bad = hn::FirstN(db, 0);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    auto value = hn::LoadU(d, accumulator + i);
    if constexpr (kDivide) value = hn::Div(value, by);
    const auto bits = Codec::encode(d, value);
    if constexpr (Codec::kExponent != 0) bad = hn::Or(bad, hn::Eq(hn::And(bits, exponent), exponent));
    hn::StoreU(bits, db, wire + i);
  }
  if (i < count) {
    const size_t rest = count - i;
    Tail<hn::ScalableTag<Accumulator>, Bits, Accumulator> tail;
    std::memcpy(tail.accumulator, accumulator_bytes + i * sizeof(Accumulator), rest * sizeof(Accumulator));
    auto value = hn::LoadU(d, tail.accumulator);
    if constexpr (kDivide) value = hn::Div(value, by);
    const auto bits = Codec::encode(d, value);
    if constexpr (Codec::kExponent != 0) bad = hn::Or(bad, hn::Eq(hn::And(bits, exponent), exponent));
    hn::StoreU(bits, db, tail.wire);
    std::memcpy(wire_bytes + i * sizeof(Wire), tail.wire, rest * sizeof(Wire));
  }
  return hn::AllFalse(db, bad);
}

template <typename Bits, Bits kExponent>
HWY_ATTR bool finite_bits(const std::byte* wire_bytes, size_t count) {
  const hn::ScalableTag<Bits> d;
  const size_t lanes = hn::Lanes(d);
  const auto* wire = reinterpret_cast<const Bits*>(wire_bytes);
  const auto exponent = hn::Set(d, kExponent);
  auto bad = hn::FirstN(d, 0);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    bad = hn::Or(bad, hn::Eq(hn::And(hn::LoadU(d, wire + i), exponent), exponent));
  }
  if (i < count) {
    Tail<hn::ScalableTag<Bits>, Bits, Bits> tail;
    std::memcpy(tail.wire, wire_bytes + i * sizeof(Bits), (count - i) * sizeof(Bits));
    bad = hn::Or(bad, hn::Eq(hn::And(hn::LoadU(d, tail.wire), exponent), exponent));
  }
  return hn::AllFalse(d, bad);
}

using F32Codec = PlainCodec<float, uint32_t, 0x7f800000u>;
using F64Codec = PlainCodec<double, uint64_t, 0x7ff0000000000000u>;
using I32Codec = PlainCodec<int32_t, uint32_t, 0>;
using I64Codec = PlainCodec<int64_t, uint64_t, 0>;
using U8Codec = PlainCodec<uint8_t, uint8_t, 0>;

template <bool kAdd>
HWY_ATTR void accumulate_type(ElementType type, const std::byte* wire, std::byte* accumulator, size_t count) {
  switch (type) {
    case ElementType::kF32:
      return accumulate<F32Codec, kAdd>(wire, accumulator, count);
    case ElementType::kF16:
      return accumulate<F16Codec, kAdd>(wire, accumulator, count);
    case ElementType::kBf16:
      return accumulate<Bf16Codec, kAdd>(wire, accumulator, count);
    case ElementType::kF64:
      return accumulate<F64Codec, kAdd>(wire, accumulator, count);
    case ElementType::kI32:
      return accumulate<I32Codec, kAdd>(wire, accumulator, count);
    case ElementType::kI64:
      return accumulate<I64Codec, kAdd>(wire, accumulator, count);
    case ElementType::kU8:
      return accumulate<U8Codec, kAdd>(wire, accumulator, count);
  }
}

template <class Codec>
HWY_ATTR bool finish_float(const std::byte* accumulator, std::byte* wire, size_t count, double divisor) {
  // In place, undivided and of one type the bytes stay as they are.
  if constexpr (sizeof(typename Codec::Wire) == sizeof(typename Codec::Accumulator)) {
    if (divisor == 1.0 && accumulator == wire) {
      return finite_bits<typename Codec::Bits, Codec::kExponent>(wire, count);
    }
  }
  return divisor == 1.0 ? finish_as<Codec, false>(accumulator, wire, count, divisor)
                        : finish_as<Codec, true>(accumulator, wire, count, divisor);
}

HWY_ATTR void load_target(ElementType type, const std::byte* wire, std::byte* accumulator, size_t count) {
  accumulate_type<false>(type, wire, accumulator, count);
}

HWY_ATTR void add_target(ElementType type, const std::byte* wire, std::byte* accumulator, size_t count) {
  accumulate_type<true>(type, wire, accumulator, count);
}

HWY_ATTR bool finish_target(ElementType type, const std::byte* accumulator, std::byte* wire, size_t count,
                            double divisor) {
  switch (type) {
    case ElementType::kF32:
      return finish_float<F32Codec>(accumulator, wire, count, divisor);
    case ElementType::kF16:
      return finish_float<F16Codec>(accumulator, wire, count, divisor);
    case ElementType::kBf16:
      return finish_float<Bf16Codec>(accumulator, wire, count, divisor);
    case ElementType::kF64:
      return finish_float<F64Codec>(accumulator, wire, count, divisor);
    case ElementType::kI32:
    case ElementType::kI64:
    case ElementType::kU8:
      break;
  }
  SLUICE_ASSERT(divisor == 1.0);
  if (accumulator != wire) std::memmove(wire, accumulator, count * element_size(type));
  return true;
}

HWY_ATTR bool all_finite_target(ElementType type, const std::byte* wire, size_t count) {
  switch (type) {
    case ElementType::kF32:
      return finite_bits<uint32_t, F32Codec::kExponent>(wire, count);
    case ElementType::kF16:
      return finite_bits<uint16_t, F16Codec::kExponent>(wire, count);
    case ElementType::kBf16:
      return finite_bits<uint16_t, Bf16Codec::kExponent>(wire, count);
    case ElementType::kF64:
      return finite_bits<uint64_t, F64Codec::kExponent>(wire, count);
    case ElementType::kI32:
    case ElementType::kI64:
    case ElementType::kU8:
      return true;
  }
  return true;
}

HWY_ATTR void stream_target(const std::byte* from, std::byte* to, size_t bytes) {
  const hn::ScalableTag<uint8_t> d;
  const size_t lanes = hn::Lanes(d);
  const auto* in = reinterpret_cast<const uint8_t*>(from);
  auto* out = reinterpret_cast<uint8_t*>(to);
  size_t i = 0;
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0 && 64 % lanes == 0) {
    for (; i + lanes <= bytes; i += lanes) hn::Stream(hn::LoadU(d, in + i), d, out + i);
  }
  std::memcpy(out + i, in + i, bytes - i);
}

const char* target_name_target() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace sluice::numeric
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::numeric {

HWY_EXPORT(load_target);
HWY_EXPORT(add_target);
HWY_EXPORT(finish_target);
HWY_EXPORT(all_finite_target);
HWY_EXPORT(stream_target);
HWY_EXPORT(target_name_target);

void load(ElementType type, const std::byte* wire, std::byte* accumulator, size_t count) {
  HWY_DYNAMIC_DISPATCH(load_target)(type, wire, accumulator, count);
}

void add(ElementType type, const std::byte* wire, std::byte* accumulator, size_t count) {
  HWY_DYNAMIC_DISPATCH(add_target)(type, wire, accumulator, count);
}

bool finish(ElementType type, const std::byte* accumulator, std::byte* wire, size_t count, double divisor) {
  return HWY_DYNAMIC_DISPATCH(finish_target)(type, accumulator, wire, count, divisor);
}

bool all_finite(ElementType type, const std::byte* wire, size_t count) {
  return HWY_DYNAMIC_DISPATCH(all_finite_target)(type, wire, count);
}

namespace {
template <typename T>
void scale_as(std::byte* data, size_t count, double factor) {
  for (size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, data + i * sizeof value, sizeof value);
    value = static_cast<T>(value * static_cast<T>(factor));
    std::memcpy(data + i * sizeof value, &value, sizeof value);
  }
}
}  // namespace

void scale(ElementType type, std::byte* accumulator, size_t count, double factor) {
  switch (type) {
    case ElementType::kF64:
      return scale_as<double>(accumulator, count, factor);
    case ElementType::kI32:
      return scale_as<uint32_t>(accumulator, count, factor);
    case ElementType::kI64:
      return scale_as<uint64_t>(accumulator, count, factor);
    case ElementType::kU8:
      return scale_as<uint8_t>(accumulator, count, factor);
    default:
      return scale_as<float>(accumulator, count, factor);  // f32, and the sums of the 16-bit floats
  }
}

void stream(const std::byte* from, std::byte* to, size_t bytes) {
  HWY_DYNAMIC_DISPATCH(stream_target)(from, to, bytes);
}

void stream_fence() { hwy::FlushStream(); }

const char* target_name() { return HWY_DYNAMIC_DISPATCH(target_name_target)(); }

}  // namespace sluice::numeric
#endif  // HWY_ONCE
