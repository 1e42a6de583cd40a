#include "transport/port/faulty/faulty_plan.h"

#include <fmt/core.h>

#include <algorithm>

#include "transport/port/endpoint.h"

namespace sluice::port {
namespace {

std::string name_of(const PeerMatch& peer) {
  std::string text = "every peer";
  if (!(peer.endpoint == Endpoint{}))
    text = peer.endpoint.port == 0 ? ip_to_string(peer.endpoint) : to_string(peer.endpoint);
  if (peer.index != PeerMatch::kAnyIndex) text += fmt::format(" that is peer {}", peer.index);
  return text;
}

}  // namespace

bool PeerMatch::fits(const Endpoint& other, uint32_t its_index) const {
  if (index != kAnyIndex && index != its_index) return false;
  if (endpoint == Endpoint{}) return true;
  return endpoint.ip == other.ip && (endpoint.scope == 0 || endpoint.scope == other.scope) &&
         (endpoint.port == 0 || endpoint.port == other.port);
}

bool FaultyPlan::faults_send() const {
  return send.any() || refuse > 0 ||
         std::any_of(rules.begin(), rules.end(), [](const PeerRule& rule) { return rule.send.any(); }) ||
         std::any_of(cuts.begin(), cuts.end(), [](const Cut& cut) { return cut.out; });
}

bool FaultyPlan::faults_receive() const {
  return receive.any() ||
         std::any_of(rules.begin(), rules.end(), [](const PeerRule& rule) { return rule.receive.any(); }) ||
         std::any_of(cuts.begin(), cuts.end(), [](const Cut& cut) { return cut.into; });
}

std::string describe(const FaultyPlan& plan) {
  std::string text;
  const auto add = [&](const std::string& what) { text += what + "; "; };
  const auto way = [&](const char* what, const LinkFaults& faults, const std::string& peer) {
    if (faults.any()) add(fmt::format("{}{} {}", what, peer, describe(faults)));
  };
  way("send", plan.send, "");
  way("receive", plan.receive, "");
  for (const PeerRule& rule : plan.rules) {
    const std::string peer = name_of(rule.peer);
    if (!rule.send.any() && !rule.receive.any()) add(fmt::format("none with {}", peer));
    way("send to ", rule.send, peer);
    way("receive from ", rule.receive, peer);
  }
  for (const Cut& cut : plan.cuts) {
    if (cut.out) add(fmt::format("to {} cut", name_of(cut.peer)));
    if (cut.into) add(fmt::format("from {} cut", name_of(cut.peer)));
  }
  if (plan.refuse > 0) add(fmt::format("device full {:.4f}", plan.refuse));
  if (text.empty()) return "";
  return text + fmt::format("seed {}", plan.seed);
}

}  // namespace sluice::port
