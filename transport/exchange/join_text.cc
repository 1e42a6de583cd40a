// What a join has to say to people.
#include <algorithm>

#include "base/assert.h"
#include "transport/exchange/join.h"

namespace sluice::exchange {
namespace {

constexpr size_t kListed = 8;  // missing nodes of one kind that are named; of the others only the number

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

std::string what_is_wrong(JoinPeer::State state, uint64_t wrong_tags) {
  switch (state) {
    case JoinPeer::State::kSilent:
      return "no answer; is the daemon running, and does the firewall let UDP through?";
    case JoinPeer::State::kStrange:
      return std::to_string(wrong_tags) + " datagrams came that are not tagged with this job's key";
    case JoinPeer::State::kUnproven:
      return "datagrams come, but no answer to ours; does the firewall let UDP through both ways?";
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
      return who + " has a newer generation of the job's view" + both + "; join again";
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
  // Who does not take part at all holds up everybody else: those that are alive are named only if all are.
  std::vector<JoinPeer> missing = peers();
  const auto alive = [](const JoinPeer& peer) { return peer.state >= JoinPeer::State::kProbing; };
  if (!std::all_of(missing.begin(), missing.end(), alive)) std::erase_if(missing, alive);
  std::string text = "waiting for ";
  const size_t head = text.size();
  for (int state = 0; state < static_cast<int>(JoinPeer::State::kReady); ++state) {
    std::string nodes;
    size_t count = 0;
    uint64_t wrong_tags = 0;
    for (const JoinPeer& peer : missing) {
      if (peer.state != static_cast<JoinPeer::State>(state)) continue;
      if (count < kListed) nodes += (count == 0 ? "" : ", ") + std::to_string(peer.node);
      wrong_tags += peer.wrong_tags;
      ++count;
    }
    if (count == 0) continue;
    if (count > kListed) nodes += " and " + std::to_string(count - kListed) + " more";
    text += (text.size() == head ? "" : "; ") + std::string(count == 1 ? "node " : "nodes ") + nodes + " (" +
            what_is_wrong(static_cast<JoinPeer::State>(state), wrong_tags) + ")";
  }
  return text;
}

}  // namespace sluice::exchange
