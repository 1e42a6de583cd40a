#include "gpu/host/rows.h"

#include <hwy/contrib/sort/vqsort.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/assert.h"
#include "base/numeric/numeric.h"

// Highway includes this file once per instruction set (foreach_target.h).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/host/rows.cc"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#ifndef SLUICE_ROWS_BATCH
#define SLUICE_ROWS_BATCH
namespace sluice::codec {
// Ids whose places are computed together.
inline constexpr size_t kBatch = 256;
struct Batch {
  alignas(64) uint32_t row[kBatch], shard[kBatch], position[kBatch];
};
// What divides by the number of shards with 32-bit multiplications (Granlund, Montgomery: Division by invariant integers
// using multiplication, 1994, figure 4.1), since vectors have no 64-bit ones.
struct Division {
  uint32_t shards = 1, multiplier = 0, shift = 0, full = 0, rest = 0, seed = 0;
  explicit Division(const RowMap& map)
      : shards(map.shards()),
        shift(static_cast<uint32_t>(std::bit_width(map.shards() - 1))),
        full(map.rows() / map.shards()),
        rest(map.rows() % map.shards()),
        seed(map.seed()) {
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - shards) << 32) / shards + 1);
  }
};
}  // namespace sluice::codec
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::codec {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR

void places(const RowMap& map, const Division&, Batch* batch) {
  for (size_t i = 0; i < kBatch; ++i) {
    const RowPlace place = map.place(batch->row[i]);
    batch->shard[i] = place.shard;
    batch->position[i] = place.position;
  }
}

#else

template <class D, class V>
HWY_INLINE V multiply_high(D d, V a, V b) {
  const hn::RepartitionToWide<D> wide;
  const auto even = hn::ShiftRight<32>(hn::MulEven(a, b));
  const auto a_odd = hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, a)));
  const auto b_odd = hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, b)));
  const auto odd = hn::MulEven(a_odd, b_odd);
  return hn::BitCast(d, hn::Or(even, hn::And(odd, hn::Set(wide, 0xFFFFFFFF00000000ULL))));
}

// RowMap::place() of a whole batch.
void places(const RowMap&, const Division& division, Batch* batch) {
  const hn::CappedTag<uint32_t, kBatch> d;
  const auto shards = hn::Set(d, division.shards), full = hn::Set(d, division.full);
  const auto rest = hn::Set(d, division.rest), seed = hn::Set(d, division.seed);
  const auto multiplier = hn::Set(d, division.multiplier);
  for (size_t i = 0; i < kBatch; i += hn::Lanes(d)) {
    const auto row = hn::Load(d, batch->row + i);
    auto group = row;
    if (division.shift > 0) {
      const auto t = multiply_high(d, row, multiplier);
      const auto sum = hn::Add(t, hn::ShiftRight<1>(hn::Sub(row, t)));
      group = hn::ShiftRightSame(sum, static_cast<int>(division.shift - 1));
    }
    const auto size = hn::IfThenElse(hn::Lt(group, full), shards, rest);
    auto x = hn::Xor(group, seed);
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(d, 0x85ebca6bU));
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<13>(x)), hn::Set(d, 0xc2b2ae35U));
    x = hn::Xor(x, hn::ShiftRight<16>(x));
    const auto turn = multiply_high(d, x, size);
    const auto shard = hn::Add(hn::Sub(row, hn::Mul(group, shards)), turn);
    hn::Store(hn::IfThenElse(hn::Lt(shard, size), shard, hn::Sub(shard, size)), d, batch->shard + i);
    hn::Store(group, d, batch->position + i);
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace sluice::codec
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::codec {
namespace {

HWY_EXPORT(places);

constexpr uint32_t kTables = 4;  // of counts: one id after the other of the same shard would wait for its sum

// As unsigned 64 bits, a negative id is beyond every row.
template <typename Id>
bool valid(const RowMap& map, Id id) {
  return static_cast<uint64_t>(id) < map.rows();
}

// Calls f(begin, count, batch) for each batch of ids, with their places. False: f was not content.
template <typename Id, typename F>
bool for_batches(const RowMap& map, std::span<const Id> ids, F f) {
  const Division division(map);
  Batch batch{};
  for (size_t begin = 0; begin < ids.size(); begin += kBatch) {
    const size_t count = std::min(kBatch, ids.size() - begin);
    for (size_t i = 0; i < count; ++i) batch.row[i] = static_cast<uint32_t>(ids[begin + i]);
    HWY_DYNAMIC_DISPATCH(places)(map, division, &batch);
    if (!f(begin, count, batch)) return false;
  }
  return true;
}

}  // namespace

template <typename Id>
size_t count_rows(const RowMap& map, std::span<const Id> ids, uint32_t* counts) {
  constexpr uint32_t kMost = 1024;
  uint32_t table[kTables][kMost];
  for (auto& one : table) std::fill_n(one, map.shards(), 0U);
  size_t invalid = kAllValid;
  for_batches(map, ids, [&](size_t begin, size_t count, const Batch& batch) {
    bool all = true;
    for (size_t i = 0; i < count; ++i) all &= valid(map, ids[begin + i]);
    if (!all) {
      for (invalid = begin; valid(map, ids[invalid]);) ++invalid;
      return false;
    }
    for (size_t i = 0; i < count; ++i) ++table[i % kTables][batch.shard[i]];
    return true;
  });
  if (invalid != kAllValid) return invalid;
  for (uint32_t s = 0; s < map.shards(); ++s) {
    counts[s] = 0;
    for (const auto& one : table) counts[s] += one[s];
  }
  return kAllValid;
}

template <typename Id>
void scatter_rows(const RowMap& map, std::span<const Id> ids, uint32_t* next, uint32_t* positions,
                  uint32_t* source) {
  for_batches(map, ids, [&](size_t begin, size_t count, const Batch& batch) {
    for (size_t i = 0; i < count; ++i) {
      const uint32_t to = next[batch.shard[i]]++;
      positions[to] = batch.position[i];
      source[to] = static_cast<uint32_t>(begin + i);
    }
    return true;
  });
}

template <typename Id>
bool ascending(std::span<const Id> ids) {
  return std::adjacent_find(ids.begin(), ids.end(), [](Id a, Id b) { return a >= b; }) == ids.end();
}

template <typename Id>
Coalesced<Id> coalesce(std::span<const Id> ids) {
  SLUICE_ASSERT(ids.size() < UINT32_MAX);
  // Id above, index below: sorting the pairs keeps the order of equal ids.
  std::vector<uint64_t> pairs(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) pairs[i] = static_cast<uint64_t>(ids[i]) << 32 | i;
  hwy::Sorter()(pairs.data(), pairs.size(), hwy::SortAscending());
  Coalesced<Id> out;
  out.source.resize(ids.size());
  for (size_t i = 0; i < pairs.size(); ++i) {
    out.source[i] = static_cast<uint32_t>(pairs[i]);
    if (i > 0 && pairs[i] >> 32 == pairs[i - 1] >> 32) continue;
    out.ids.push_back(static_cast<Id>(pairs[i] >> 32));
    out.first.push_back(static_cast<uint32_t>(i));
  }
  out.first.push_back(static_cast<uint32_t>(ids.size()));
  return out;
}

void sum_rows(ElementType type, std::span<const uint32_t> first, std::span<const uint32_t> source,
              const std::byte* values, size_t width, std::byte* out, std::byte* scratch) {
  const size_t bytes = width * element_size(type);
  const bool wide = accumulator_type(type) != type;
  for (size_t row = 0; row + 1 < first.size(); ++row, out += bytes) {
    const auto inputs = source.subspan(first[row], first[row + 1] - first[row]);
    if (inputs.size() == 1) {
      std::memcpy(out, values + inputs[0] * bytes, bytes);
      continue;
    }
    std::byte* const sum = wide ? scratch : out;
    numeric::load(type, values + inputs[0] * bytes, sum, width);
    for (const uint32_t input : inputs.subspan(1)) numeric::add(type, values + input * bytes, sum, width);
    if (wide) numeric::finish(type, sum, out, width, 1);
  }
}

void gather_rows(std::span<const uint32_t> source, const std::byte* values, size_t bytes, std::byte* out) {
  for (const uint32_t row : source) {
    std::memcpy(out, values + row * bytes, bytes);
    out += bytes;
  }
}

template size_t count_rows(const RowMap&, std::span<const int32_t>, uint32_t*);
template size_t count_rows(const RowMap&, std::span<const int64_t>, uint32_t*);
template void scatter_rows(const RowMap&, std::span<const int32_t>, uint32_t*, uint32_t*, uint32_t*);
template void scatter_rows(const RowMap&, std::span<const int64_t>, uint32_t*, uint32_t*, uint32_t*);
template bool ascending(std::span<const int32_t>);
template bool ascending(std::span<const int64_t>);
template Coalesced<int32_t> coalesce(std::span<const int32_t>);
template Coalesced<int64_t> coalesce(std::span<const int64_t>);

}  // namespace sluice::codec
#endif  // HWY_ONCE
