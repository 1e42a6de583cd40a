#include "tests/simulation/faults.h"

#include <algorithm>
#include <charconv>

namespace sluice::simulation {
namespace {

constexpr const char* kNames[] = {
    "lost",        "lost_in_burst", "duplicated",  "reordered",   "tail",
    "replayed",    "corrupted",     "truncated",   "partitioned", "partitioned_one_way",
    "switch_full", "receive_full",  "device_full", "misrouted",   "forged",
    "older_view",  "pause",         "long_pause",  "late",        "lag_wait",
    "no_memory",   "crash",         "rejoin",      "abort",       "mismatch",
    "stamp_wraps"};
static_assert(std::size(kNames) == kFaults);
constexpr std::string_view kDropPrefix = "drop.";

}  // namespace

const char* fault_name(Fault fault) { return kNames[static_cast<size_t>(fault)]; }

Struck::Struck(const Options& options, const RunFacts& facts) {
  const auto set = [this](Fault fault, uint64_t times) { faults_[static_cast<size_t>(fault)] = times; };
  const auto& n = facts.network;
  set(Fault::kLost, n.lost);
  set(Fault::kLostInBurst, n.lost_in_burst);
  set(Fault::kDuplicated, n.duplicated);
  set(Fault::kReordered, n.reordered);
  set(Fault::kTail, n.tails);
  set(Fault::kReplayed, n.replayed);
  set(Fault::kCorrupted, n.corrupted);
  set(Fault::kTruncated, n.truncated);
  // The network does not tell which partition has cut: only runs with one kind of them say something.
  const auto& cuts = options.plan.partitions;
  const auto one_way = [](const port::sim::Partition& cut) { return cut.out != cut.into; };
  if (std::none_of(cuts.begin(), cuts.end(), one_way)) set(Fault::kPartitioned, n.partitioned);
  if (std::all_of(cuts.begin(), cuts.end(), one_way)) set(Fault::kPartitionedOneWay, n.partitioned);
  set(Fault::kSwitchOverflow, n.switch_overflow);
  set(Fault::kReceiveOverflow, n.receive_overflow);
  set(Fault::kDeviceFull, n.refused);
  set(Fault::kMisrouted, facts.misrouted);
  set(Fault::kForged, facts.forged);
  set(Fault::kOlderView, facts.older_view);
  set(Fault::kPause, facts.pauses);
  set(Fault::kLongPause, facts.long_pauses);
  set(Fault::kLate, facts.late_submits);
  set(Fault::kLagWait, facts.results_waited_lag);
  set(Fault::kPoolExhausted, facts.drops[static_cast<size_t>(wire::Drop::kNoMemory)]);
  set(Fault::kCrash, facts.crashes);
  set(Fault::kRejoin, facts.rejoins);
  set(Fault::kAbort, facts.aborts);
  set(Fault::kMismatch, facts.results[static_cast<size_t>(Status::kMismatch)]);
  set(Fault::kStampWraps, options.clock >> 32 != (options.clock + facts.virtual_us) >> 32 ? 1 : 0);
  for (size_t i = 0; i < kFaults; ++i) runs_[i] = faults_[i] > 0 ? 1 : 0;
  for (size_t i = 0; i < kDrops; ++i) drops_[i] = facts.drops[i];
}

std::string Struck::text() const {
  std::string text;
  const auto add = [&](std::string_view prefix, const char* name, uint64_t times) {
    if (times == 0) return;
    if (!text.empty()) text += ' ';
    text.append(prefix).append(name).append("=").append(std::to_string(times));
  };
  for (size_t i = 0; i < kFaults; ++i) add("", kNames[i], faults_[i]);
  for (size_t i = 1; i < kDrops; ++i)
    add(kDropPrefix, wire::drop_name(static_cast<wire::Drop>(i)), drops_[i]);
  return text;
}

bool Struck::add(std::string_view text) {
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    const size_t equals = word.find('=');
    if (equals == std::string_view::npos) return false;
    std::string_view name = word.substr(0, equals);
    uint64_t times = 0;
    const auto [end, error] = std::from_chars(word.data() + equals + 1, word.data() + word.size(), times);
    if (error != std::errc() || end != word.data() + word.size() || times == 0) return false;
    bool known = false;
    if (name.substr(0, kDropPrefix.size()) == kDropPrefix) {
      name.remove_prefix(kDropPrefix.size());
      for (size_t i = 1; i < kDrops && !known; ++i) {
        known = name == wire::drop_name(static_cast<wire::Drop>(i));
        if (known) drops_[i] += times;
      }
    } else {
      for (size_t i = 0; i < kFaults && !known; ++i) {
        known = name == kNames[i];
        if (!known) continue;
        faults_[i] += times;
        ++runs_[i];
      }
    }
    if (!known) return false;
  }
  return true;
}

}  // namespace sluice::simulation
