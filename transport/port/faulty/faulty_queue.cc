// Opening, peers and sleeping of a faulty queue.
#include "transport/port/faulty/faulty_queue.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace sluice::port {
namespace {

bool holds(const LinkFaults& faults) {
  return faults.delays() || faults.duplicate > 0 || faults.replay > 0 || faults.corrupt > 0 ||
         faults.truncate > 0;
}

// Whether a condition is true for the faults of anybody in one direction.
template <typename Condition>
bool anywhere(const FaultyPlan& plan, LinkFaults FaultyPlan::*all, LinkFaults PeerRule::*one,
              Condition condition) {
  return condition(plan.*all) || std::any_of(plan.rules.begin(), plan.rules.end(),
                                             [&](const PeerRule& rule) { return condition(rule.*one); });
}

Error system_error(const char* what) {
  const int code = errno;
  return Error{code, std::string(what) + " of a faulty port: " + std::strerror(code)};
}

}  // namespace

FaultyQueue::FaultyQueue(const FaultySetup& setup, uint32_t index)
    : setup_(setup),
      plan_(setup.options.plan),
      index_(index),
      holds_send_(anywhere(plan_, &FaultyPlan::send, &PeerRule::send, holds)),
      holds_receive_(anywhere(plan_, &FaultyPlan::receive, &PeerRule::receive, holds)),
      strangers_(seed_of(false, Pipe::kStrangers, 0)),
      refusals_(seed_of(true, Pipe::kNoLink, 0)) {}

Result<std::unique_ptr<Queue>> FaultyQueue::open(const FaultySetup& setup, std::unique_ptr<Queue> inner,
                                                 uint32_t index, LiveFaults* send, LiveFaults* receive) {
  std::unique_ptr<FaultyQueue> queue(new FaultyQueue(setup, index));
  queue->inner_ = std::move(inner);
  queue->out_.count_in(send);
  queue->in_.count_in(receive);
  if (auto prepared = queue->prepare(); !prepared.ok()) return prepared.error();
  return std::unique_ptr<Queue>(std::move(queue));
}

Result<void> FaultyQueue::prepare() {
  const auto replays = [](const LinkFaults& faults) { return faults.replay > 0; };
  const size_t slots = std::max<size_t>(1, setup_.options.hold_bytes / setup_.slot_bytes);
  if (holds_send_) {
    auto allocated =
        out_.allocate(slots, setup_.slot_bytes, anywhere(plan_, &FaultyPlan::send, &PeerRule::send, replays));
    if (!allocated.ok()) return allocated;
    leaving_.reserve(kFlush);
  }
  if (holds_receive_) {
    auto allocated = in_.allocate(slots, setup_.slot_bytes,
                                  anywhere(plan_, &FaultyPlan::receive, &PeerRule::receive, replays));
    if (!allocated.ok()) return allocated;
  }
  if (setup_.send) {
    fates_.reserve(kBurst);
    run_.reserve(kBurst);
    if (!setup_.copies_on_send) {
      lent_.reserve(2 * out_.slots());
      tickets_.reserve(kTickets);
    }
  }
  if ((!holds_send_ && !holds_receive_) || inner_->fd() < 0) return {};
  sleeps_.reset(::epoll_create1(EPOLL_CLOEXEC));
  timer_.reset(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!sleeps_ || !timer_) return system_error("cannot create the descriptors");
  epoll_event event{};
  event.events = EPOLLIN;
  if (::epoll_ctl(sleeps_.get(), EPOLL_CTL_ADD, timer_.get(), &event) != 0 ||
      ::epoll_ctl(sleeps_.get(), EPOLL_CTL_ADD, inner_->fd(), &event) != 0) {
    return system_error("cannot watch the descriptors");
  }
  return {};
}

uint64_t FaultyQueue::seed_of(bool send, uint32_t link, uint64_t generation) const {
  uint64_t state = plan_.seed;
  for (const uint64_t part : {uint64_t{index_} << 1 | (send ? 1 : 0), uint64_t{link}, generation})
    state = split_mix(&state) ^ part;
  return split_mix(&state);
}

// --- Peers ------------------------------------------------------------------------------------------------------------

// What the plan says about one peer. `send` may be nullptr.
void FaultyQueue::apply(const Endpoint& endpoint, uint32_t id, Way* send, Way* receive) const {
  const LinkFaults* out = &plan_.send;
  const LinkFaults* into = &plan_.receive;
  for (const PeerRule& rule : plan_.rules) {
    if (!rule.peer.fits(endpoint, id)) continue;
    out = &rule.send;
    into = &rule.receive;
  }
  bool cut_out = false;
  bool cut_into = false;
  for (const Cut& cut : plan_.cuts) {
    if (!cut.peer.fits(endpoint, id)) continue;
    cut_out |= cut.out;
    cut_into |= cut.into;
  }
  if (send != nullptr) {
    send->faults = *out;
    send->cut = cut_out;
  }
  receive->faults = *into;
  receive->cut = cut_into;
}

uint32_t FaultyQueue::make_link(const Endpoint& endpoint) {
  if (const PeerHandle known = known_.find(endpoint); known != kUnknownPeer) return known;
  if (known_.size() >= kMaxLinks) {
    // Whoever makes peers known without end must not fill the memory: forget who has not been needed for longest.
    Link* oldest = nullptr;
    for (Link& link : links_) {
      if (link.uses > 0 || link.held > 0) continue;
      if (oldest == nullptr || link.last_use < oldest->last_use) oldest = &link;
    }
    if (oldest != nullptr) {
      const auto id = static_cast<uint32_t>(oldest - links_.data());
      known_.remove(id);
      out_.forget(id);
      in_.forget(id);
    }
  }
  const PeerHandle id = known_.add(endpoint);
  if (links_.size() <= id) links_.resize(id + 1);
  Link link;
  link.endpoint = endpoint;
  link.send = Way(seed_of(true, id, links_[id].last_use));
  link.receive = Way(seed_of(false, id, links_[id].last_use));
  apply(endpoint, id, &link.send, &link.receive);
  links_[id] = link;
  return id;
}

Result<PeerHandle> FaultyQueue::add_peer(const Endpoint& endpoint) {
  auto handle = inner_->add_peer(endpoint);
  if (!handle.ok()) return handle;
  const uint32_t id = make_link(endpoint);
  Link& link = links_[id];
  link.handle = *handle;
  ++link.uses;
  link.last_use = ++uses_;
  if (link_of_handle_.size() <= *handle) link_of_handle_.resize(*handle + 1, Pipe::kNoLink);
  link_of_handle_[*handle] = id;
  return handle;
}

FaultyQueue::Link* FaultyQueue::link_of(PeerHandle peer) {
  if (peer >= link_of_handle_.size() || link_of_handle_[peer] == Pipe::kNoLink) return nullptr;
  Link& link = links_[link_of_handle_[peer]];
  return link.handle == peer && link.uses > 0 ? &link : nullptr;
}

void FaultyQueue::remove_peer(PeerHandle peer) {
  Link* link = link_of(peer);
  if (link == nullptr) return;
  --link->uses;
  link->last_use = ++uses_;
  inner_->remove_peer(peer);
}

// --- Sleeping ---------------------------------------------------------------------------------------------------------

bool FaultyQueue::arm() {
  const bool idle = inner_->arm();
  if (!holds_send_ && !holds_receive_) return idle;
  // What a full device keeps from leaving is no work; the descriptor tells when there is room.
  const Micros next = std::min(full_ ? kNever : out_.next_due(), in_.next_due());
  const Micros now = next == kNever ? 0 : setup_.options.clock();
  if (!idle || next <= now) return false;
  if (!sleeps_) return true;
  if (next != timer_at_) {
    itimerspec when{};  // zero: off
    if (next != kNever) {
      when.it_value.tv_sec = (next - now) / kMicrosPerSecond;
      when.it_value.tv_nsec = (next - now) % kMicrosPerSecond * 1000;
    }
    SLUICE_ASSERT(::timerfd_settime(timer_.get(), 0, &when, nullptr) == 0);
    timer_at_ = next;
  }
  if (full_ != wants_room_) {
    epoll_event event{};
    event.events = full_ ? EPOLLIN | EPOLLOUT : EPOLLIN;
    SLUICE_ASSERT(::epoll_ctl(sleeps_.get(), EPOLL_CTL_MOD, inner_->fd(), &event) == 0);
    wants_room_ = full_;
  }
  return true;
}

}  // namespace sluice::port
