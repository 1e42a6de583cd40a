// A job on a lane: its exchange::Lane, its clients' rings, and where its nodes are. Lane thread only.
#pragma once

#include <cstdint>
#include <vector>

#include "base/mapping.h"
#include "daemon/engine/lane_worker.h"

namespace sluice::daemon {

// Endpoints that a queue knows, counted: several jobs may have the same node. Changes allocate; they come with
// commands only.
class PeerTable {
 public:
  explicit PeerTable(port::Queue* queue) : queue_(queue) {}
  port::PeerHandle hold(const port::Endpoint& endpoint);  // kUnknownPeer: the port refuses it
  void drop(const port::Endpoint& endpoint);

 private:
  struct Entry {
    port::Endpoint endpoint;
    port::PeerHandle handle;
    uint32_t uses;
  };
  port::Queue* queue_;
  std::vector<Entry> entries_;
};

// A kTakeCarry that waits for the fates of its tag.
struct Take {
  exchange::Submission what;
  std::byte* out = nullptr;  // nullptr: what is owed is dropped
  bool correction = false;   // kFlagCorrection
  Micros deadline = 0;
};

struct AttachedClient {
  LaneClient view;
  ipc::DescriptorReader descriptors;
  ipc::CompletionWriter completions;
  std::vector<Take> takes;  // capacity: ipc::kMaxTakes
  bool broken = false;
  bool overran = false;  // broken since it does not take its completions; the control thread is to be told
  bool gone = false;
  bool live() const { return !broken && !gone; }
};

struct AttachedJob {
  AttachedJob(LaneJob job, PeerTable* peers, uint32_t lane, Micros now);
  void release_peers(PeerTable* peers);

  // Validates a copied descriptor and hands it to the protocol. nullptr, or what is wrong with it.
  const char* submit(AttachedClient* client, const ipc::Descriptor& descriptor, Micros now);
  // Events to completions and reports. A client that does not take them `overran`.
  bool deliver_events();
  // Answers the kTakeCarry whose tags have no open fate, and those whose time is over.
  bool serve_takes(Micros now);
  Micros next_take() const;  // when the time of the first is over; kNever: none waits
  // Nothing of this client is touched afterwards. `left`: it left in order; false then means that an open op still
  // needs its memory, and nothing was forgotten.
  bool forget(uint64_t client_id, Micros now, bool left);
  void collect_traces();
  void publish(JobStats* out) const;

  uint64_t id;
  uint32_t lane_index;
  Mapping pool;  // of the lane, in huge pages if possible
  exchange::Lane lane;
  std::vector<port::Endpoint> nodes;
  std::vector<port::PeerHandle> handles;  // by node; own: kUnknownPeer
  std::vector<AttachedClient> clients;    // by local rank
  bool met_told = false;
  bool failure_told = false;

 private:
  void complete(AttachedClient* client, const exchange::Event& event, bool* full);
  const char* take(AttachedClient* client, const ipc::Descriptor& descriptor, Micros now);

  static constexpr size_t kTraces = 256;
  std::vector<exchange::Trace> traces_;  // a ring
  size_t trace_next_ = 0;
  uint64_t durations_[3][20] = {};
  double duration_sum_[3] = {};
  ipc::Report report_;
};

}  // namespace sluice::daemon
