#include "tests/simulation/run.h"

#include "tests/simulation/check_wire.h"
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

RunResult run(const Options& options, const RunHooks& hooks) {
  Violations violations;
  const Gradients gradients(options);
  auto checkers = make_checkers(options, gradients, &violations);
  const auto* results = dynamic_cast<const ResultChecker*>(checkers.front().get());
  const ConservationChecker* ledger = nullptr;
  for (const auto& checker : checkers) {
    if (ledger == nullptr) ledger = dynamic_cast<const ConservationChecker*>(checker.get());
  }
  RunResult result;
  Cluster cluster(options, gradients, std::move(checkers));
  cluster.set_verbose(hooks.verbose);
  cluster.set_watched_op(hooks.watched_op);
  if (hooks.filter != nullptr) cluster.set_filter(hooks.filter, hooks.context);
  result.facts = cluster.run();
  result.shares = results->shares();
  result.carry = ledger->facts();
  result.violations = violations.count();
  result.list = violations.list();
  return result;
}

std::string report(const Options& options, const RunResult& result) {
  std::string text = std::to_string(result.violations) + " violations";
  for (const std::string& violation : result.list) text += "\n  " + violation;
  if (result.list.size() < result.violations) text += "\n  ...";
  return text + "\n" + describe(options) + "replay: " + replay_command(options) + "\n";
}

}  // namespace sluice::simulation
