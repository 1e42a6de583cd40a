// sluice-bench: measures collective calls over the daemons of a set of nodes, with the columns of nccl-tests.
//
// One process per rank, started by a launcher that sets RANK and WORLD_SIZE, or by hand with --rank and --world. The
// ranks find each other in a folder that all of them can see (--rendezvous), or by `peers:` of the daemons'
// configuration (without it). Rank 0 prints.
//
// Exit status: 0 all is well, 1 a call failed or an element was wrong, 2 usage.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "lib/client/sluice.h"
#include "tools/sluice_bench/measure.h"
#include "tools/sluice_bench/options.h"
#include "tools/sluice_bench/oracle.h"
#include "tools/sluice_bench/rendezvous.h"

namespace sluice::bench {
namespace {

struct Options : SweepOptions {
  std::string socket, job = "sluice-bench", rendezvous, op_class = "exact", redop = "sum";
  uint32_t rank = 0, world = 1, deadline_us = 0;
  pid_t daemon = 0;
  int timeout_ms = 60'000;
};

struct Closer {
  void operator()(sluice_context* context) const { sluice_close(context); }
};
using Context = std::unique_ptr<sluice_context, Closer>;

// Something failed whose words are already complete.
struct Failure {
  std::string text;
};

void must(int error, const char* what) {
  if (error == SLUICE_SUCCESS) return;
  throw Failure{std::string(what) + ": " + sluice_error_name(error) + ": " + sluice_last_error()};
}

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) throw Failure{result.error().message};
  return std::move(*result);
}
void must(const Result<void>& result) {
  if (!result.ok()) throw Failure{result.error().message};
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {}

  ~Bench() {
    if (job_ != nullptr) sluice_leave(job_, options_.timeout_ms);
  }

  void join() {
    sluice_context* context = nullptr;
    must(sluice_open(options_.socket.empty() ? nullptr : options_.socket.c_str(), options_.timeout_ms,
                     &context),
         "open");
    context_.reset(context);

    sluice_join_options join{};
    join.size = sizeof(join);
    join.job = options_.job.c_str();
    join.rank = options_.rank;
    join.world_size = options_.world;
    // Slots are cut on 64-byte boundaries; the samples of all ranks go through the arena as well.
    const uint64_t slots = 2 * options_.sweep.inflight;
    const uint64_t samples = 8 * (64 + uint64_t{options_.sweep.iterations}) * options_.world;
    join.max_op_bytes = std::max(options_.sweep.end, samples);
    join.arena_bytes = slots * (options_.sweep.end + 4096) + 2 * samples + (1 << 20);
    join.deadline_us = options_.deadline_us;
    join.timeout_ms = options_.timeout_ms;

    std::vector<sluice_card> cards(options_.world);
    unsigned char key[32];
    if (!options_.rendezvous.empty() || options_.world == 1) {
      sluice_card card;
      must(sluice_card_get(context, join.job, join.rank, join.world_size, options_.timeout_ms, &card),
           "card");
      if (options_.world == 1) {
        cards[0] = card;
        must(sluice_key_generate(key), "key");
      } else {
        meet(card, &cards, key);
      }
      join.cards = cards.data();
      join.key = key;
    }
    must(sluice_join(context, &join, &job_), "join");
    info_.size = sizeof(info_);
    must(sluice_job_get_info(job_, &info_), "info");
  }

  bool run() {
    Report report("sluice", options_.op_class, options_.world, options_.sweep);
    const bool speaks = options_.rank == 0;
    if (speaks) {
      std::printf("# sluice %s, %u nodes, %u lanes, %u payload bytes a datagram\n", sluice_version(),
                  info_.nodes, info_.lanes, info_.payload_bytes);
      std::printf("# out of place: the result goes to a buffer of its own; in place is not supported\n");
      report.print_head();
    }
    for (const uint64_t bytes : sizes(options_.sweep)) {
      const Row row = measure(bytes);
      if (speaks) report.add(row);
      right_ = right_ && row.wrong <= 0;
    }
    if (speaks) {
      report.print_foot();
      if (!options_.json.empty() && !report.write_json(options_.json)) return false;
    }
    must(sluice_barrier(job_, options_.timeout_ms), "barrier");
    return right_;
  }

 private:
  struct Slot {
    void* contribution = nullptr;
    void* result = nullptr;
    sluice_op op = 0;
  };

  void meet(const sluice_card& card, std::vector<sluice_card>* cards, unsigned char* key) {
    const Rendezvous rendezvous(options_.rendezvous, options_.rank, options_.world, options_.timeout_ms);
    if (options_.rank == 0) {
      must(sluice_key_generate(key), "key");
      must(rendezvous.put("key", {reinterpret_cast<const char*>(key), 32}));
    }
    must(rendezvous.put("card", {reinterpret_cast<const char*>(card.bytes), sizeof(card.bytes)}));
    const auto all = must(rendezvous.get_all("card", sizeof(card.bytes)));
    for (size_t rank = 0; rank < all.size(); ++rank) {
      std::memcpy((*cards)[rank].bytes, all[rank].data(), sizeof(card.bytes));
    }
    if (options_.rank != 0) std::memcpy(key, must(rendezvous.get("key", 0, 32)).data(), 32);
  }

  void* take(uint64_t bytes) {
    void* buffer = sluice_alloc(job_, bytes);
    if (buffer == nullptr) throw Failure{std::string("alloc: ") + sluice_last_error()};
    return buffer;
  }

  void begin(Slot* slot, uint64_t count, uint64_t tag) {
    sluice_op_options op{};
    op.size = sizeof(op);
    op.op_class = options_.op_class == "exact"        ? SLUICE_EXACT
                  : options_.op_class == "consistent" ? SLUICE_CONSISTENT
                                                      : SLUICE_BEST_EFFORT;
    op.tag = tag;
    op.deadline_us = options_.deadline_us;
    must(sluice_allreduce(job_, slot->contribution, slot->result, count,
                          static_cast<sluice_type>(options_.sweep.type),
                          static_cast<sluice_kind>(options_.sweep.kind), &op, &slot->op),
         "allreduce");
  }

  // Returns whether the result lacks something.
  bool finish(Slot* slot) {
    sluice_report report{};
    report.size = sizeof(report);
    must(sluice_wait(job_, slot->op, options_.timeout_ms, &report), "wait");
    if (report.status >= SLUICE_MISMATCH) {
      throw Failure{std::string("allreduce: ") + sluice_status_name(report.status) + ": " + report.text};
    }
    return report.status != SLUICE_OK || report.blocks_skipped != 0 || report.blocks_uncounted != 0;
  }

  // One call that is not timed, with values of its own; returns the wrong elements.
  double checked_call(Slot* slot, uint64_t bytes, uint64_t count, uint64_t tag) {
    const Pattern pattern{options_.sweep.type, options_.sweep.kind, options_.world, ++seed_};
    fill(pattern, options_.rank, slot->contribution, count);
    std::memset(slot->result, 0xa5, bytes);
    begin(slot, count, tag);
    finish(slot);
    const Verdict verdict = check(pattern, slot->result, count);
    if (verdict.wrong > 0) {
      std::fprintf(stderr, "rank %u, %llu bytes: %s\n", options_.rank, static_cast<unsigned long long>(bytes),
                   describe(verdict, count).c_str());
    }
    return static_cast<double>(verdict.wrong);
  }

  Row measure(uint64_t bytes) {
    const Sweep& sweep = options_.sweep;
    const uint64_t count = bytes / element_size(sweep.type);
    std::vector<Slot> slots(sweep.inflight);
    for (size_t i = 0; i < slots.size(); ++i) {
      slots[i].contribution = take(bytes);
      slots[i].result = take(bytes);
      fill({sweep.type, sweep.kind, options_.world, 0}, options_.rank, slots[i].contribution, count);
      std::memset(slots[i].result, 0, bytes);
    }
    Sample sample;
    sample.wrong = sweep.check ? 0 : -1;
    const auto tag = [&](uint32_t slot) { return bytes * 64 + slot + 1; };
    std::vector<double> ignored;
    const auto start = [&](uint32_t slot) { begin(&slots[slot], count, tag(slot)); };
    const auto end = [&](uint32_t slot) { sample.incomplete += finish(&slots[slot]) ? 1 : 0; };
    run_calls(sweep.warmup, sweep.inflight, start, end, &ignored);
    if (sweep.check) sample.wrong += checked_call(&slots[0], bytes, count, tag(0));
    sample.incomplete = 0;
    must(sluice_barrier(job_, options_.timeout_ms), "barrier");

    Stopwatch watch(options_.daemon);
    watch.start();
    run_calls(sweep.iterations, sweep.inflight, start, end, &sample.duration);
    watch.stop(&sample);
    if (options_.daemon > 0) sample.daemon_key = 1.0 + info_.node;
    if (sweep.check) {
      for (size_t i = 0; i < slots.size(); ++i) {
        sample.wrong += checked_call(&slots[i], bytes, count, tag(static_cast<uint32_t>(i)));
      }
    }
    for (const Slot& slot : slots) {
      sluice_free(job_, slot.contribution);
      sluice_free(job_, slot.result);
    }
    return summarize(bytes, count, gather(sample));
  }

  std::vector<Sample> gather(const Sample& sample) {
    const std::vector<double> mine = pack(sample);
    const uint64_t bytes = mine.size() * sizeof(double);
    auto* all = static_cast<double*>(take(bytes * options_.world));
    sluice_op op = 0;
    must(sluice_all_gather(job_, mine.data(), all, bytes, &op), "all_gather");
    Slot slot{nullptr, nullptr, op};
    finish(&slot);
    std::vector<Sample> ranks;
    for (uint32_t rank = 0; rank < options_.world; ++rank)
      ranks.push_back(unpack(all + rank * mine.size(), mine.size()));
    sluice_free(job_, all);
    return ranks;
  }

  const Options& options_;
  Context context_;
  sluice_job* job_ = nullptr;
  sluice_job_info info_{};
  uint32_t seed_ = 0;
  bool right_ = true;
};

int run(int argc, char** argv) {
  CLI::App app{"Measures collective calls over sluiced, with the columns of nccl-tests"};
  app.set_version_flag("--version", sluice_version());
  app.require_subcommand(1);
  Options options;
  CLI::App* allreduce = app.add_subcommand("allreduce", "sum or mean over all ranks; out of place only");
  options.add_to(allreduce);
  allreduce->add_option("--type", options.type, "f32, f16, bf16, f64, i32, i64, u8")->capture_default_str();
  allreduce->add_option("--redop", options.redop, "sum or mean")
      ->check(CLI::IsMember({"sum", "mean"}))
      ->capture_default_str();
  allreduce->add_option("--class", options.op_class, "class of service")
      ->check(CLI::IsMember({"exact", "consistent", "best_effort"}))
      ->capture_default_str();
  allreduce->add_option("--deadline-us", options.deadline_us, "bound of a call; 0: the daemon's setting")
      ->capture_default_str();
  allreduce->add_option("--inflight", options.sweep.inflight, "calls that are open at once")
      ->check(CLI::Range(1U, 60U))
      ->capture_default_str();
  allreduce->add_option("--rank", options.rank, "this rank")->envname("RANK")->capture_default_str();
  allreduce->add_option("--world,--ranks", options.world, "number of ranks")
      ->envname("WORLD_SIZE")
      ->check(CLI::Range(1U, 65535U))
      ->capture_default_str();
  allreduce->add_option("--rendezvous", options.rendezvous,
                        "empty folder that all ranks can see; without it the daemons know their peers");
  allreduce->add_option("--socket", options.socket, "the daemon's socket (default: $SLUICE_SOCKET)");
  allreduce->add_option("--job", options.job, "name of the job")->capture_default_str();
  allreduce->add_option("--timeout-ms", options.timeout_ms, "bound of every wait")->capture_default_str();
  allreduce->add_option("--daemon-pid", options.daemon,
                        "count this process's CPU time as well (it is this node's daemon)");
  try {
    app.parse(argc, argv);
    options.finish();
    options.sweep.kind = options.redop == "mean" ? ReduceKind::kMean : ReduceKind::kSum;
    if (options.rank >= options.world) throw CLI::ValidationError("--rank", "must be below --world");
    if (options.sweep.kind == ReduceKind::kMean && !is_float(options.sweep.type)) {
      throw CLI::ValidationError("--redop", "mean needs a floating-point type");
    }
    if (options.sweep.check && options.world > largest_world(options.sweep.type, options.sweep.kind)) {
      throw CLI::ValidationError("--check", "sums of so many ranks are not exact in " + options.type);
    }
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  Bench bench(options);
  bench.join();
  return bench.run() ? 0 : 1;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  try {
    return sluice::bench::run(argc, argv);
  } catch (const sluice::bench::Failure& failure) {
    std::fprintf(stderr, "sluice-bench: %s\n", failure.text.c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sluice-bench: %s\n", error.what());
  }
  return 1;
}
