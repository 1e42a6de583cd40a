// Which peer a datagram came from: endpoints to handles by open addressing, for the receive path of a queue.
#pragma once

#include <vector>

#include "transport/port/port.h"

namespace sluice::port {

// Handles are small and dense: the lowest free one is given out. One thread. find() allocates nothing.
class PeerTable {
 public:
  PeerTable();

  // The handle of `endpoint`. A known endpoint gets the handle that it has; it then takes one more remove().
  PeerHandle add(const Endpoint& endpoint);
  // Undoes one add(). A forgotten handle may be given to the next peer; one that is not in use is ignored.
  void remove(PeerHandle peer);

  PeerHandle find(const Endpoint& endpoint) const;
  bool contains(PeerHandle peer) const { return peer < peers_.size() && peers_[peer].uses > 0; }
  const Endpoint& endpoint(PeerHandle peer) const { return peers_[peer].endpoint; }
  size_t size() const { return used_; }
  size_t capacity() const { return peers_.size(); }  // all handles given out so far are below

 private:
  struct Peer {
    Endpoint endpoint;
    uint32_t uses = 0;  // add() minus remove(): two jobs may have the same peer
  };
  size_t slot_of(const Endpoint& endpoint) const;  // where it is, or the empty slot where it would go
  void rebuild(size_t slots);

  std::vector<Peer> peers_;        // by handle
  std::vector<PeerHandle> slots_;  // power of two, at most half full; kUnknownPeer: empty
  size_t used_ = 0;
};

}  // namespace sluice::port
