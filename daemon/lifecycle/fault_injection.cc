#include "daemon/lifecycle/fault_injection.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/prng.h"
#include "transport/port/endpoint.h"

namespace sluice::daemon {
namespace {

using Matches = std::vector<port::PeerMatch>;

// Addresses with or without a port; `word` alone stands for an empty list.
Result<Matches> matches(std::string_view key, std::string_view word, const std::vector<std::string>& texts) {
  Matches all;
  if (texts.size() == 1 && texts[0] == word) return all;
  for (const std::string& text : texts) {
    auto endpoint = port::parse_ip(text);
    if (!endpoint) endpoint = port::parse_endpoint(text);
    if (!endpoint || *endpoint == port::Endpoint{}) {
      return Error{EINVAL,
                   fmt::format("{}: '{}' is not a numeric address such as 10.0.0.7 or 10.0.0.7:9470, nor {}",
                               key, text, word)};
    }
    all.push_back({.endpoint = *endpoint});
  }
  return all;
}

}  // namespace

Result<port::FaultyPlan> fault_plan(const config::Config& config) {
  const auto& from = config.transport.faults;
  port::LinkFaults faults;
  faults.latency = from.latency;
  faults.jitter = from.jitter;
  faults.tail_probability = from.tail;
  faults.tail_min = from.tail_min;
  faults.tail_max = from.tail_max;
  faults.loss = from.loss;
  faults.burst_enter = from.burst_enter;
  faults.burst_leave = from.burst_leave;
  faults.burst_loss = from.burst_loss;
  faults.duplicate = from.duplicate;
  faults.reorder = from.reorder;
  faults.reorder_delay = from.reorder_delay;
  faults.replay = from.replay;
  faults.corrupt = from.corrupt;
  faults.truncate = from.truncate;
  const port::LinkFaults send =
      from.direction == config::FaultDirection::kReceive ? port::LinkFaults{} : faults;
  const port::LinkFaults receive =
      from.direction == config::FaultDirection::kSend ? port::LinkFaults{} : faults;

  port::FaultyPlan plan;
  plan.seed = from.seed;
  plan.refuse = from.full;
  const auto peers = matches("transport.faults.peers", "all", from.peers);
  if (!peers) return peers.error();
  if (peers->empty()) {
    plan.send = send;
    plan.receive = receive;
  }
  for (const port::PeerMatch& peer : *peers) plan.rules.push_back({peer, send, receive});
  const auto out = matches("transport.faults.cut_out", "none", from.cut_out);
  if (!out) return out.error();
  for (const port::PeerMatch& peer : *out) plan.cuts.push_back({peer, true, false});
  const auto into = matches("transport.faults.cut_into", "none", from.cut_into);
  if (!into) return into.error();
  for (const port::PeerMatch& peer : *into) plan.cuts.push_back({peer, false, true});
  return plan;
}

uint64_t fault_seed(uint64_t seed, const port::Endpoint& local) {
  uint64_t words[2];
  std::memcpy(words, local.ip.data(), sizeof words);
  uint64_t state = seed;
  for (const uint64_t part : {words[0], words[1], uint64_t{local.port}}) state = split_mix(&state) ^ part;
  return split_mix(&state);
}

}  // namespace sluice::daemon
