// What the tag of one packet costs: seal and open by payload size, and the replay window.
//
//   build/release/bin/seal_bench [--benchmark_filter=...]
//
// For comparison (docs/protocol.md, section 2; OpenSSL 3.0, AES-NI without VAES): about 320 ns at 1,400
// bytes.
#include <benchmark/benchmark.h>

#include <array>
#include <cstddef>
#include <vector>

#include "transport/wire/packet.h"
#include "transport/wire/seal.h"

namespace sluice::wire {
namespace {

constexpr uint32_t kNodes = 64;

struct Fixture {
  JobKey key{};
  std::vector<ViewMember> members{kNodes};
  ViewHash view = view_hash("bench", 1, members, {}, 1, 1344);
  std::vector<std::byte> payload;
  Header header;
  std::array<std::byte, kTagBytes> tag{};
  Sealer sealer{Sealing::kAuth, "bench", key, view, 1, members[1].join_nonce, 0};

  explicit Fixture(benchmark::State& state) : payload(static_cast<size_t>(state.range(0))) {}
  std::span<const std::byte> header_bytes() const { return std::as_bytes(std::span(&header, 1)); }
  void seal() {
    header.counter = sealer.next_counter();
    sealer.seal(header_bytes(), payload, header.counter, tag.data());
  }
};

void seal(benchmark::State& state) {
  Fixture job(state);
  for (auto _ : state) {
    job.seal();
    benchmark::DoNotOptimize(job.tag);
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void open(benchmark::State& state) {
  Fixture job(state);
  Opener opener(Sealing::kAuth, "bench", job.key, job.view, job.members, 0);
  job.seal();
  for (auto _ : state) {
    if (!opener.open(1, job.header.counter, job.header_bytes(), job.payload, job.tag, 0))
      state.SkipWithError("tag");
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void enter_view(benchmark::State& state) {
  const std::vector<ViewMember> members(static_cast<size_t>(state.range(0)));
  const ViewHash view = view_hash("bench", 1, members, {}, 1, 1344);
  for (auto _ : state) {
    Opener opener(Sealing::kAuth, "bench", JobKey{}, view, members, 0);
    benchmark::DoNotOptimize(opener);
  }
}

void replay_window(benchmark::State& state) {
  ReplayWindow window;
  uint64_t counter = 0;
  for (auto _ : state) benchmark::DoNotOptimize(window.accept(++counter));
}

BENCHMARK(seal)->Arg(16)->Arg(1344)->Arg(1408)->Arg(4032)->Arg(8128)->Arg(8896);
BENCHMARK(open)->Arg(16)->Arg(1344)->Arg(1408)->Arg(4032)->Arg(8128)->Arg(8896);
BENCHMARK(enter_view)->Arg(4)->Arg(1024)->Unit(benchmark::kMicrosecond);
BENCHMARK(replay_window);

}  // namespace
}  // namespace sluice::wire

BENCHMARK_MAIN();
