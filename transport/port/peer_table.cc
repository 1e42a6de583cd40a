#include "transport/port/peer_table.h"

#include <algorithm>
#include <cstring>

namespace sluice::port {
namespace {

constexpr size_t kFirstSlots = 64;

// Endpoints come from the network, but only known ones are ever stored, so nobody outside can fill a chain.
size_t hash(const Endpoint& endpoint) {
  uint64_t words[3];
  std::memcpy(words, &endpoint, sizeof words);
  uint64_t h = words[0] * 0x9e3779b97f4a7c15ULL;
  h = (h ^ (h >> 29) ^ words[1]) * 0xbf58476d1ce4e5b9ULL;
  h = (h ^ (h >> 32) ^ words[2]) * 0x94d049bb133111ebULL;
  return static_cast<size_t>(h ^ (h >> 31));
}

}  // namespace

PeerTable::PeerTable() : slots_(kFirstSlots, kUnknownPeer) {}

size_t PeerTable::slot_of(const Endpoint& endpoint) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = hash(endpoint) & mask;
  while (slots_[slot] != kUnknownPeer && !(peers_[slots_[slot]].endpoint == endpoint))
    slot = (slot + 1) & mask;
  return slot;
}

PeerHandle PeerTable::find(const Endpoint& endpoint) const { return slots_[slot_of(endpoint)]; }

void PeerTable::rebuild(size_t slots) {
  slots_.assign(slots, kUnknownPeer);
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i].uses > 0) slots_[slot_of(peers_[i].endpoint)] = static_cast<PeerHandle>(i);
  }
}

PeerHandle PeerTable::add(const Endpoint& endpoint) {
  size_t slot = slot_of(endpoint);
  if (slots_[slot] != kUnknownPeer) {
    ++peers_[slots_[slot]].uses;
    return slots_[slot];
  }
  if ((used_ + 1) * 2 > slots_.size()) {
    rebuild(slots_.size() * 2);
    slot = slot_of(endpoint);
  }
  const auto free =
      std::find_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.uses == 0; });
  const auto handle = static_cast<PeerHandle>(free - peers_.begin());
  if (free == peers_.end()) peers_.emplace_back();
  peers_[handle] = Peer{endpoint, 1};
  slots_[slot] = handle;
  ++used_;
  return handle;
}

void PeerTable::remove(PeerHandle peer) {
  if (!contains(peer) || --peers_[peer].uses > 0) return;
  const size_t mask = slots_.size() - 1;
  size_t hole = slot_of(peers_[peer].endpoint);
  slots_[hole] = kUnknownPeer;
  --used_;
  // Close the gap, so that a search never stops short of an entry that had been pushed past it.
  for (size_t next = (hole + 1) & mask; slots_[next] != kUnknownPeer; next = (next + 1) & mask) {
    const size_t home = hash(peers_[slots_[next]].endpoint) & mask;
    if (((next - home) & mask) >= ((next - hole) & mask)) {
      slots_[hole] = slots_[next];
      slots_[next] = kUnknownPeer;
      hole = next;
    }
  }
}

}  // namespace sluice::port
