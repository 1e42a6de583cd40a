// What rows of sparse tensors cost on the host: partition, coalescing, and their code on the wire.
//
//   build/release/bin/rows_bench [--benchmark_filter=...]
//
// Aims: partition 150 M keys a second and core; gap code with values of width 1 at 1 GB/s, of width
// 256 at 60 % of memcpy.
#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "base/prng.h"
#include "gpu/host/rows.h"
#include "transport/wire/rows.h"

namespace sluice {
namespace {

constexpr uint64_t kSeed = 1;
constexpr uint32_t kRoom = 1408 - 64 - sizeof(wire::RowsHead);

// Ascending, each of `of` with a chance of 1 in `every`.
template <typename Id>
std::vector<Id> some(uint32_t of, uint32_t every) {
  Prng random(kSeed);
  std::vector<Id> ids;
  for (uint32_t id = 0; id < of; ++id)
    if (random.below(every) == 0) ids.push_back(static_cast<Id>(id));
  return ids;
}

template <typename Id>
void partition(benchmark::State& state) {
  const auto shards = static_cast<uint32_t>(state.range(0));
  constexpr uint32_t kRows = 20'000'000;
  const auto ids = some<Id>(kRows, 10);
  const codec::RowMap map(kRows, shards, kSeed);
  std::vector<uint32_t> next(shards), positions(ids.size()), source(ids.size());
  for (auto _ : state) {
    if (codec::count_rows<Id>(map, ids, next.data()) != codec::kAllValid) state.SkipWithError("id");
    uint32_t before = 0;
    for (uint32_t& count : next) before += std::exchange(count, before);
    codec::scatter_rows<Id>(map, ids, next.data(), positions.data(), source.data());
    benchmark::DoNotOptimize(positions.data());
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(ids.size()));
}

void coalesce(benchmark::State& state) {
  Prng random(kSeed);
  std::vector<int64_t> ids(100'000);
  for (int64_t& id : ids) id = static_cast<int64_t>(random.below(50'000));
  for (auto _ : state) benchmark::DoNotOptimize(codec::coalesce<int64_t>(ids).ids.data());
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(ids.size()));
}

struct Stream {
  std::vector<uint32_t> positions;
  std::vector<std::byte> values;
  uint32_t shard_rows, row_bytes;
  explicit Stream(benchmark::State& state)
      : positions(some<uint32_t>(4'000'000, static_cast<uint32_t>(state.range(1)))),
        shard_rows(4'000'000),
        row_bytes(static_cast<uint32_t>(state.range(0)) * 4) {
    if (state.range(0) > 1) positions.resize(std::min<size_t>(positions.size(), 20'000));
    values.resize(positions.size() * row_bytes);
  }
  // Calls f(positions, first, cut, values) for each packet.
  template <typename F>
  void packets(F f) const {
    uint32_t first = 0;
    const std::byte* at = values.data();
    for (std::span<const uint32_t> rest(positions); !rest.empty();) {
      const wire::RowsCut cut = wire::cut_rows(rest, first, shard_rows, row_bytes, kRoom);
      f(rest, first, cut, at);
      at += static_cast<size_t>(cut.rows) * row_bytes;
      rest = rest.subspan(cut.rows);
      first = cut.end;
    }
  }
};

size_t put(std::span<const uint32_t> rest, uint32_t first, const wire::RowsCut& cut, const std::byte* values,
           uint32_t row_bytes, std::byte* out) {
  const wire::RowsHead head{first, cut.end, static_cast<uint8_t>(cut.format), 0,
                            static_cast<uint16_t>(row_bytes / 4)};
  std::memcpy(out, &head, sizeof head);
  wire::encode_positions(rest, first, cut, out + sizeof head);
  std::memcpy(out + sizeof head + cut.coded, values, static_cast<size_t>(cut.rows) * row_bytes);
  return sizeof head + cut.coded + static_cast<size_t>(cut.rows) * row_bytes;
}

void encode(benchmark::State& state) {
  const Stream stream(state);
  std::byte packet[2048];
  int64_t bytes = 0;
  for (auto _ : state) {
    stream.packets([&](auto rest, uint32_t first, const wire::RowsCut& cut, const std::byte* values) {
      bytes += static_cast<int64_t>(put(rest, first, cut, values, stream.row_bytes, packet));
      benchmark::DoNotOptimize(packet);
    });
  }
  state.SetBytesProcessed(bytes);
}

void decode(benchmark::State& state) {
  const Stream stream(state);
  struct Packet {
    std::vector<std::byte> bytes;
    uint32_t rows;
  };
  std::vector<Packet> packets;
  stream.packets([&](auto rest, uint32_t first, const wire::RowsCut& cut, const std::byte* values) {
    std::byte packet[2048];
    const size_t size = put(rest, first, cut, values, stream.row_bytes, packet);
    packets.push_back({{packet, packet + size}, cut.rows});
  });
  uint32_t positions[2048];
  std::vector<std::byte> out(kRoom);
  int64_t bytes = 0;
  for (auto _ : state) {
    for (const Packet& packet : packets) {
      wire::RowsHead head;
      const std::byte* values = nullptr;
      if (!wire::decode_rows(packet.bytes, packet.rows, stream.row_bytes, &head, positions, &values))
        state.SkipWithError("packet");
      std::memcpy(out.data(), values, static_cast<size_t>(packet.rows) * stream.row_bytes);
      benchmark::DoNotOptimize(positions);
      benchmark::DoNotOptimize(out.data());
      bytes += static_cast<int64_t>(packet.bytes.size());
    }
  }
  state.SetBytesProcessed(bytes);
}

// The peer of the two: the same values, packet by packet.
void copy(benchmark::State& state) {
  const Stream stream(state);
  std::byte packet[2048];
  int64_t bytes = 0;
  for (auto _ : state) {
    const size_t part = kRoom / stream.row_bytes * stream.row_bytes;
    for (size_t at = 0; at + part <= stream.values.size(); at += part) {
      std::memcpy(packet, stream.values.data() + at, part);
      benchmark::DoNotOptimize(packet);
      bytes += static_cast<int64_t>(part);
    }
  }
  state.SetBytesProcessed(bytes);
}

BENCHMARK(partition<int32_t>)->Arg(4)->Arg(16)->Arg(128);
BENCHMARK(partition<int64_t>)->Arg(4)->Arg(16)->Arg(128);
BENCHMARK(coalesce);
BENCHMARK(encode)->Args({1, 2})->Args({1, 10})->Args({1, 100})->Args({1, 1000})->Args({256, 100});
BENCHMARK(decode)->Args({1, 2})->Args({1, 10})->Args({1, 100})->Args({1, 1000})->Args({256, 100});
BENCHMARK(copy)->Args({1, 100})->Args({256, 100});

}  // namespace
}  // namespace sluice

BENCHMARK_MAIN();
