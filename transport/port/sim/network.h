// A network of virtual nodes with a virtual clock: a seeded discrete-event simulation. Nothing in it reads a real
// clock, so a run depends on the seed and on the calls alone; trace_hash() tells whether two runs were the same.
//
// Two ways to use it:
//   directly: send(from, to, bytes), then advance_to(time); the delivery handler gets what arrives (simulator)
//   as ports: open_port(node) gives a port::Port; the owner of the network still advances the clock (conformance)
//
// An endpoint is one queue of one node: endpoint = node * queues + queue. Faults, cables, pauses and partitions belong to
// nodes; delays within a node's own endpoints are those of the plan too (a node may send to itself).
// Copies the bytes of what is in flight. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/prng.h"
#include "base/types.h"
#include "transport/port/port.h"
#include "transport/port/sim/fault_plan.h"

namespace sluice::port::sim {

// Everything that happened to datagrams; sent + duplicated + replayed = delivered + all losses + pending().
struct NetworkCounters {
  uint64_t sent = 0, refused = 0;  // refused: the device of the sender was full; not part of sent
  uint64_t duplicated = 0, replayed = 0;
  uint64_t delivered = 0;
  uint64_t lost = 0, lost_in_burst = 0, partitioned = 0, switch_overflow = 0, receive_overflow = 0;
  uint64_t reordered = 0, tails = 0, corrupted = 0, truncated = 0;  // arrive nevertheless
};

class SimPort;
class SimQueue;

class Network {
 public:
  struct Options {
    uint32_t nodes = 2;
    uint32_t queues = 1;  // per node
    uint64_t seed = 1;
    FaultPlan plan;
    uint32_t max_datagram = 1472;
  };
  explicit Network(Options options);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // The bytes are valid during the call. The handler may send; it must not advance the clock.
  using Handler = std::function<void(uint32_t from, uint32_t to, std::span<const std::byte> bytes)>;
  void on_delivery(Handler handler) { handler_ = std::move(handler); }

  // Sends a datagram given in pieces. False: the sender's device is full, nothing was taken; there is room again at
  // device_free_at(from).
  bool send(uint32_t from, uint32_t to, std::span<const std::span<const std::byte>> pieces);
  bool send(uint32_t from, uint32_t to, std::span<const std::byte> bytes) {
    return send(from, to, std::span<const std::span<const std::byte>>(&bytes, 1));
  }
  // When the device of this endpoint's node takes a datagram of max_datagram again; now() if it does already.
  Micros device_free_at(uint32_t endpoint) const;

  Micros now() const { return now_; }
  // Time of the next event inside the network, kNever if nothing is in flight. Not every event delivers.
  Micros next_event() const { return events_.empty() ? kNever : events_.front().time; }
  // Carries out every event up to `time`, in order, and sets the clock there. During the handler now() is the time of
  // its event. Returns the number of deliveries.
  size_t advance_to(Micros time);

  // True while the node is stopped by the plan; its owner must not run it. paused_until: the end, or now().
  bool paused(uint32_t node) const { return paused_until(node) > now_; }
  Micros paused_until(uint32_t node) const;

  const FaultPlan& plan() const { return plan_; }
  // Changes the plan from now on; what is in flight keeps its fate, except that a partition also stops it on arrival.
  void set_plan(FaultPlan plan);
  // Ends all faults: no loss, bursts, duplicates, reordering, replay, damage, tails, partitions or pauses any more. Base
  // latency, speed and buffers stay. What is in flight still arrives.
  void heal();

  // Of all deliveries so far: time, endpoints, length, bytes, in order.
  uint64_t trace_hash() const { return trace_; }
  const NetworkCounters& counters() const { return counters_; }
  size_t pending() const { return events_.size(); }

  uint32_t nodes() const { return options_.nodes; }
  uint32_t queues() const { return options_.queues; }
  uint32_t max_datagram() const { return options_.max_datagram; }

  // 10.x.y.z of the node, port 9470 + queue.
  Endpoint address(uint32_t endpoint) const;
  // The inverse; UINT32_MAX for an address that is not in this network.
  uint32_t endpoint_of(const Endpoint& address) const;

  // The network must outlive the port. What arrives at an endpoint whose queue is open goes to the queue and not to
  // the handler.
  std::unique_ptr<Port> open_port(uint32_t node);

 private:
  friend class SimPort;
  friend class SimQueue;

  // In front of the receiver's cable; at the receiver; there already, but the receiver is paused.
  enum class Stage : uint8_t { kSwitch, kArrive, kParked };
  struct Event {
    Micros time;
    uint64_t order;  // of scheduling: equal times keep it
    uint32_t datagram;
    Stage stage;
    bool later_than(const Event& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };
  struct Datagram {
    uint32_t from = 0;
    uint32_t to = 0;
    std::vector<std::byte> bytes;
  };
  struct Link {
    explicit Link(uint64_t seed) : random(seed) {}
    Prng random;  // its own, so that traffic on one link does not change the luck of another
    LinkFaults faults;
    bool bad = false;                             // Gilbert-Elliott state
    std::vector<std::vector<std::byte>> history;  // for replay
  };

  Link& link(uint32_t from_node, uint32_t to_node);
  LinkFaults faults_of(uint32_t from_node, uint32_t to_node) const;
  bool cut(uint32_t from_node, uint32_t to_node) const;
  bool link_loses(Link* link);
  void record(Link* link, const Datagram& datagram);
  uint32_t new_datagram();
  uint32_t copy_of(uint32_t from, uint32_t to, std::span<const std::byte> bytes);
  void damage(Link* link, Datagram* datagram);
  void depart(Link* link, uint32_t datagram, int64_t sent_nanos);
  void schedule(Micros time, Stage stage, uint32_t datagram);
  void drop(uint32_t datagram) { free_.push_back(datagram); }
  void at_switch(const Event& event);
  bool arrive(const Event& event);
  uint32_t node_of(uint32_t endpoint) const { return endpoint / options_.queues; }
  int64_t wire_nanos(size_t bytes) const;

  const Options options_;
  FaultPlan plan_;
  Handler handler_;
  Micros now_ = 0;
  uint64_t order_ = 0;
  std::vector<Event> events_;  // a heap
  std::vector<Datagram> datagrams_;
  std::vector<uint32_t> free_;
  std::vector<std::vector<std::unique_ptr<Link>>> links_;  // [from][to], made on first use
  std::vector<int64_t> up_busy_until_;                     // nanoseconds; by node
  std::vector<int64_t> down_busy_until_;
  std::vector<uint32_t> waiting_;       // datagrams parked at a paused node
  std::vector<SimQueue*> open_queues_;  // by endpoint
  uint64_t trace_ = 0;
  NetworkCounters counters_;
};

}  // namespace sluice::port::sim
