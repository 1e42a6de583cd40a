// What a join has to say to people.
#include <algorithm>

#include "base/assert.h"
#include "transport/exchange/join.h"

namespace sluice::exchange {
namespace {

constexpr size_t kListed = 8;  // missing nodes that are named; of the others only the number

std::string hex(uint64_t value) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "0x0000000000000000";
  for (size_t i = text.size(); i-- > 2; value >>= 4) text[i] = kDigits[value & 15];
  return text;
}

std::string sealing_name(uint64_t value) {
  if (value == static_cast<uint64_t>(wire::Sealing::kNone)) return "none";
  if (value == static_cast<uint64_t>(wire::Sealing::kAuth)) return "auth";
  return "number " + std::to_string(value);
}

std::string what_it_does(const JoinPeer& peer) {
  switch (peer.state) {
    case JoinPeer::State::kSilent:
      return "no answer; is its daemon running, and does the firewall let UDP through?";
    case JoinPeer::State::kStrange:
      return std::to_string(peer.wrong_tags) + " datagrams came that are not tagged with this job's key";
    case JoinPeer::State::kUnproven:
      return "its datagrams come, but it does not answer ours; does the firewall let UDP through to it?";
    case JoinPeer::State::kBehind:
      return "alive, with an older view";
    case JoinPeer::State::kProbing:
      return "alive, datagram size being probed";
    case JoinPeer::State::kWaiting:
      return "alive, waiting for other nodes";
    case JoinPeer::State::kReady:
      return "ready";
  }
  return "unknown";
}

}  // namespace

const char* state_name(JoinPeer::State state) {
  switch (state) {
    case JoinPeer::State::kSilent:
      return "silent";
    case JoinPeer::State::kStrange:
      return "strange";
    case JoinPeer::State::kUnproven:
      return "unproven";
    case JoinPeer::State::kBehind:
      return "behind";
    case JoinPeer::State::kProbing:
      return "probing";
    case JoinPeer::State::kWaiting:
      return "waiting";
    case JoinPeer::State::kReady:
      return "ready";
  }
  return "unknown";
}

std::string JoinFault::text() const {
  const std::string who = "node " + std::to_string(node);
  const std::string both = ": here " + std::to_string(ours) + ", there " + std::to_string(theirs);
  switch (kind) {
    case Kind::kVersion:
      return who + " speaks another version of the protocol" + both + "; install the same release";
    case Kind::kSealing:
      return who + " has another `sealing`: here " + sealing_name(ours) + ", there " + sealing_name(theirs) +
             "; set the same on all nodes";
    case Kind::kConfig:
      return who + " has other settings that must be the same on all nodes: digest here " + hex(ours) +
             ", there " + hex(theirs) + "; compare `sluiced --print-config` of both";
    case Kind::kLanes:
      return who + " has another number of lanes for the same view" + both;
    case Kind::kGeneration:
      return who + " has a newer view of the job: generation" + both + "; join again";
    case Kind::kNonce:
      return who + " was started again since the view was written: join nonce expected " + hex(ours) +
             ", found " + hex(theirs) + "; join again";
    case Kind::kUnknownStart:
      return who + " has joined the job with an earlier start of this node (join nonce now " + hex(ours) +
             "); all nodes must join again";
    case Kind::kPayload:
      if (theirs == 0) {
        return who + " answers, but no datagram of " + std::to_string(ours) +
               " bytes reaches it; check the MTU on the way";
      }
      return who + " can send datagrams of at most " + std::to_string(theirs) + " bytes; " +
             std::to_string(ours) + " are needed";
  }
  return "unknown";
}

std::vector<JoinPeer> Join::peers() const {
  std::vector<JoinPeer> out;
  for (uint32_t node = 0; node < peers_.size(); ++node) {
    if (node == settings_.self) continue;
    const Peer& peer = peers_[node];
    JoinPeer::State state = JoinPeer::State::kWaiting;
    if (peer.known) {
      if (state_ == State::kFinished || (phase_ == 2 && agrees(peer))) {
        state = JoinPeer::State::kReady;
      } else if (peer.reach < payload_ || peer.phase == 0) {
        state = JoinPeer::State::kProbing;
      }
    } else if (peer.behind) {
      state = JoinPeer::State::kBehind;
    } else if (peer.tagged != 0) {
      state = JoinPeer::State::kUnproven;
    } else {
      state = peer.wrong_tags != 0 ? JoinPeer::State::kStrange : JoinPeer::State::kSilent;
    }
    out.push_back({node, state, peer.wrong_tags, peer.rtt, peer.restarted});
  }
  return out;
}

std::string Join::text() const {
  if (state_ == State::kFailed) return fault_->text();
  if (state_ == State::kFinished) return "joined: payload " + std::to_string(payload_) + " bytes";
  // Who does not take part at all holds up everybody else; name those only, if there are any.
  std::vector<JoinPeer> missing = peers();
  const auto alive = [](const JoinPeer& peer) { return peer.state >= JoinPeer::State::kProbing; };
  if (!std::all_of(missing.begin(), missing.end(), alive)) std::erase_if(missing, alive);
  std::erase_if(missing, [](const JoinPeer& peer) { return peer.state == JoinPeer::State::kReady; });
  std::string text = "waiting for ";
  for (size_t i = 0; i < missing.size() && i < kListed; ++i) {
    if (i != 0) text += ", ";
    text += "node " + std::to_string(missing[i].node) + " (" + what_it_does(missing[i]) + ")";
  }
  if (missing.size() > kListed) text += " and " + std::to_string(missing.size() - kListed) + " more nodes";
  return text;
}

}  // namespace sluice::exchange
