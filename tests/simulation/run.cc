#include "tests/simulation/run.h"

#include <algorithm>

#include "tests/simulation/check_wire.h"
#include "tests/simulation/faults.h"
#include "tests/simulation/swarm.h"

namespace sluice::simulation {

std::vector<std::unique_ptr<Checker>> make_checkers(const Options& options, const Gradients& gradients,
                                                    Violations* violations) {
  std::vector<std::unique_ptr<Checker>> checkers;
  auto frozen = std::make_unique<FrozenChecker>(options, gradients, violations);
  auto ledger = std::make_unique<ConservationChecker>(options, gradients, violations);
  checkers.push_back(
      std::make_unique<ResultChecker>(options, gradients, frozen.get(), ledger.get(), violations));
  checkers.push_back(std::move(frozen));
  checkers.push_back(std::move(ledger));
  checkers.push_back(std::make_unique<NonceChecker>(options, violations));
  checkers.push_back(std::make_unique<QuorumChecker>(options, violations));
  checkers.push_back(std::make_unique<LagChecker>(options, gradients, violations));
  checkers.push_back(std::make_unique<DropChecker>(options, violations));
  checkers.push_back(std::make_unique<EventChecker>(options, violations));
  checkers.push_back(std::make_unique<TimeChecker>(options, violations));
  checkers.push_back(std::make_unique<HealChecker>(options, violations));
  checkers.push_back(std::make_unique<FailureChecker>(options, violations));
  checkers.push_back(std::make_unique<PoolChecker>(violations));
  return checkers;
}

namespace {

struct Ran {
  RunFacts facts;
  std::vector<Cluster::Old> sample;
};

Ran run_view(const Options& options, const RunHooks& hooks, std::vector<Cluster::Old> older_view,
             Violations* violations, RunResult* result) {
  const Gradients gradients(options);
  std::vector<std::unique_ptr<Checker>> checkers;
  const ResultChecker* results = nullptr;
  const ConservationChecker* ledger = nullptr;
  if (result != nullptr) checkers = make_checkers(options, gradients, violations);
  for (const auto& checker : checkers) {
    if (results == nullptr) results = dynamic_cast<const ResultChecker*>(checker.get());
    if (ledger == nullptr) ledger = dynamic_cast<const ConservationChecker*>(checker.get());
  }
  Cluster cluster(options, gradients, std::move(checkers));
  cluster.set_verbose(hooks.verbose);
  cluster.set_watched_op(hooks.watched_op);
  cluster.set_older_view(std::move(older_view));
  if (hooks.filter != nullptr) cluster.set_filter(hooks.filter, hooks.context);
  Ran ran{cluster.run(), {}};
  if (result != nullptr) {
    result->shares = results->shares();
    result->carry = ledger->facts();
  }
  ran.sample = cluster.take_sample();
  return ran;
}

// What this job has said in the view before: a few of its ops, on a calm network.
std::vector<Cluster::Old> sample_of_view_before(const Options& options) {
  constexpr size_t kOps = 3;
  Options before = options;
  before.generation = options.generation - 1;
  before.program.resize(std::min(kOps, before.program.size()));
  for (OpShape& shape : before.program) {
    shape.count = std::min<uint64_t>(shape.count, 4096);
    shape.retire = false;
  }
  before.adaptive = before.carry_over = before.crash = before.abort = before.mismatch = false;
  before.plan = {};
  before.plan.bits_per_second = options.plan.bits_per_second;
  before.late_share = before.misroute = before.forge = before.older_view = 0;
  before.heal_at = 0;
  Violations none;
  return run_view(before, {}, {}, &none, nullptr).sample;
}

void add(const RunFacts& more, RunFacts* facts) {
  facts->hash ^= more.hash;
  facts->virtual_us += more.virtual_us;
  facts->datagrams += more.datagrams;
  facts->bytes += more.bytes;
  for (size_t i = 0; i < std::size(more.by_type); ++i) facts->by_type[i] += more.by_type[i];
  for (size_t i = 0; i < std::size(more.drops); ++i) facts->drops[i] += more.drops[i];
  for (size_t i = 0; i < std::size(more.results); ++i) facts->results[i] += more.results[i];
  facts->older_view += more.older_view;
  facts->rejoins += 1;
}

}  // namespace

RunResult run(const Options& options, const RunHooks& hooks) {
  Violations violations;
  RunResult result;
  std::vector<Cluster::Old> before;
  if (options.older_view > 0) before = sample_of_view_before(options);
  Ran first = run_view(options, hooks, std::move(before), &violations, &result);
  result.facts = first.facts;
  if (options.crash && options.rejoin) {
    Options again = options;
    again.crash = again.rejoin = false;
    again.generation = options.generation + 1;
    again.started_anew = options.crash_node;
    again.clock = options.clock + first.facts.virtual_us;
    again.plan.pauses.clear();  // their times are over
    again.plan.partitions.clear();
    again.heal_at = 0.6;
    again.older_view = 0.05;  // the last view is not long ago
    add(run_view(again, hooks, std::move(first.sample), &violations, &result).facts, &result.facts);
  }
  result.violations = violations.count();
  result.list = violations.list();
  return result;
}

std::string report(const Options& options, const RunResult& result) {
  std::string text = std::to_string(result.violations) + " violations";
  for (const std::string& violation : result.list) text += "\n  " + violation;
  if (result.list.size() < result.violations) text += "\n  ...";
  return text + "\n" + describe(options) + "struck: " + Struck(options, result.facts).text() +
         "\nreplay: " + replay_command(options) + "\n";
}

std::string log_line(const Options& options, const RunResult& result) {
  return options.scenario + " " + std::to_string(options.seed) + ": " + Struck(options, result.facts).text();
}

}  // namespace sluice::simulation
