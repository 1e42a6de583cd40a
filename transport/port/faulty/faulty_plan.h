// What a faulty port does to its traffic: the faults of the simulator's links (transport/port/link_faults.h) on the way
// out and on the way in, for all peers or for some; cuts; and a device that is now and then full. All off by default.
// Pure data. Left out of the simulator's menu: pauses (stop the process), full cables (tc does that).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/port/link_faults.h"
#include "transport/port/port.h"

namespace sluice::port {

// Which peers a rule is for. Index: the how-manieth peer, from 0, that was made known to the queue; a peer that was
// removed and comes back has its old one.
struct PeerMatch {
  static constexpr uint32_t kAnyIndex = UINT32_MAX;
  Endpoint endpoint;  // port 0: any port of the address; all zero: any endpoint
  uint32_t index = kAnyIndex;

  bool fits(const Endpoint& other, uint32_t its_index) const;
};

// Replaces the faults of the peers that fit; the last rule that fits wins.
struct PeerRule {
  PeerMatch peer;
  LinkFaults send;
  LinkFaults receive;
};

// Nothing passes to the peers that fit (out), from them (into), or both. One direction alone is an asymmetric
// partition: the one side hears the other, which hears nothing.
struct Cut {
  PeerMatch peer;
  bool out = true;
  bool into = true;
};

struct FaultyPlan {
  uint64_t seed = 1;
  LinkFaults send;     // what leaves
  LinkFaults receive;  // what arrives
  std::vector<PeerRule> rules;
  std::vector<Cut> cuts;
  // Before each packet, with this probability, send() stops as if the device were full. Below 1, or nothing ever leaves.
  double refuse = 0;

  bool faults_send() const;
  bool faults_receive() const;
  bool any() const { return faults_send() || faults_receive(); }
};

// What is on, in one line: "send loss 0.0500; to 10.0.0.2 cut; seed 1". Empty when nothing is.
std::string describe(const FaultyPlan& plan);

}  // namespace sluice::port
