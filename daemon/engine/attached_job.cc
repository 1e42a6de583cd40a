#include "daemon/engine/attached_job.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/assert.h"
#include "base/ipc/doorbell.h"

namespace sluice::daemon {

port::PeerHandle PeerTable::hold(const port::Endpoint& endpoint) {
  for (Entry& entry : entries_) {
    if (entry.endpoint != endpoint) continue;
    ++entry.uses;
    return entry.handle;
  }
  auto handle = queue_->add_peer(endpoint);
  if (!handle) return port::kUnknownPeer;
  entries_.push_back({endpoint, *handle, 1});
  return *handle;
}

void PeerTable::drop(const port::Endpoint& endpoint) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].endpoint != endpoint) continue;
    if (--entries_[i].uses == 0) {
      queue_->remove_peer(entries_[i].handle);
      entries_.erase(entries_.begin() + static_cast<ptrdiff_t>(i));
    }
    return;
  }
}

namespace {

// Without it the lane takes ordinary memory, which is slower and no reason to refuse a job.
Mapping reserve_pool(const exchange::Settings& settings) {
  auto pool = Mapping::reserve(settings.pool_bytes);
  return pool.ok() ? std::move(*pool) : Mapping();
}

}  // namespace

AttachedJob::AttachedJob(LaneJob job, PeerTable* peers, uint32_t lane_number, Micros now)
    : id(job.id),
      lane_index(lane_number),
      pool(reserve_pool(job.settings)),
      lane(job.settings, now, pool.data()),
      nodes(std::move(job.nodes)) {
  for (uint32_t node = 0; node < nodes.size(); ++node) {
    handles.push_back(node == job.settings.self ? port::kUnknownPeer : peers->hold(nodes[node]));
  }
  for (const LaneClient& view : job.clients) {
    AttachedClient client;
    client.view = view;
    client.descriptors = ipc::descriptor_reader(*view.control, *view.submit, lane_index);
    client.completions = ipc::completion_writer(*view.control, *view.submit, lane_index);
    clients.push_back(std::move(client));
    clients.back().takes.reserve(ipc::kMaxTakes);
  }
  traces_.reserve(kTraces);
}

void AttachedJob::release_peers(PeerTable* peers) {
  for (uint32_t node = 0; node < nodes.size(); ++node) {
    if (node != lane.settings().self) peers->drop(nodes[node]);
  }
}

const char* check_descriptor(const ipc::Descriptor& d, uint64_t arena_bytes, uint64_t max_op_bytes) {
  const bool take = d.request == static_cast<uint32_t>(ipc::Request::kTakeCarry);
  if (!take && d.request != static_cast<uint32_t>(ipc::Request::kAllreduce))
    return "descriptor: unknown request";
  if (d.element_type >= kElementTypes) return "descriptor: unknown element type";
  if (d.wire_type != d.element_type) return "descriptor: wire type differs from element type";
  if (d.kind > static_cast<uint8_t>(ReduceKind::kMean)) return "descriptor: unknown kind";
  if (d.kind == static_cast<uint8_t>(ReduceKind::kMean) &&
      !is_float(static_cast<ElementType>(d.element_type))) {
    return "descriptor: mean of integers";
  }
  if (d.op_class > static_cast<uint8_t>(OpClass::kBestEffort)) return "descriptor: class is not served";
  const bool floating = is_float(static_cast<ElementType>(d.element_type));
  if (d.op_class == static_cast<uint8_t>(OpClass::kBestEffort) && !floating)
    return "descriptor: class best_effort is for floating types, which can be approximated";
  if (!(std::isfinite(d.loss_scale) && d.loss_scale > 0))
    return "descriptor: loss_scale is not a number above 0";
  if (d.loss_scale != 1.0F && !floating) return "descriptor: loss_scale of integers";
  constexpr uint32_t kTakeFlags = ipc::kFlagDrop | ipc::kFlagCorrection;
  if ((d.flags & ~(take ? kTakeFlags : ipc::kFlagScaled)) != 0 || d.flags == kTakeFlags)
    return "descriptor: unknown flags";
  if (d.flags == ipc::kFlagScaled && !floating) return "descriptor: loss_scale of integers";
  const uint64_t size = element_size(static_cast<ElementType>(d.element_type));
  if (d.count > max_op_bytes / size) return "descriptor: tensor is larger than max_op_bytes";
  if (take) {
    if ((d.flags & ipc::kFlagDrop) != 0) return nullptr;
    const uint64_t sums = d.count * element_size(accumulator_type(static_cast<ElementType>(d.element_type)));
    if (d.result % 64 != 0) return "descriptor: slot is not 64-byte aligned";
    if (sums > arena_bytes || d.result > arena_bytes - sums) return "descriptor: slot lies outside the arena";
    return nullptr;
  }
  const uint64_t bytes = d.count * size;
  if (d.contribution % 64 != 0 || d.result % 64 != 0) return "descriptor: slot is not 64-byte aligned";
  if (bytes > arena_bytes || d.contribution > arena_bytes - bytes || d.result > arena_bytes - bytes) {
    return "descriptor: slot lies outside the arena";
  }
  if (bytes > 0 && d.contribution < d.result + bytes && d.result < d.contribution + bytes) {
    return "descriptor: contribution and result overlap";
  }
  return nullptr;
}

namespace {

exchange::Submission submission_of(const LaneClient& client, const ipc::Descriptor& descriptor) {
  exchange::Submission submission;
  submission.op_seq = descriptor.op_seq;
  submission.local_rank = client.local_rank;
  submission.count = descriptor.count;
  submission.tag = descriptor.tag;
  submission.kind = static_cast<ReduceKind>(descriptor.kind);
  submission.type = static_cast<ElementType>(descriptor.element_type);
  submission.op_class = static_cast<OpClass>(descriptor.op_class);
  submission.deadline = descriptor.deadline_us;
  submission.loss_scale = descriptor.loss_scale;
  submission.scaled = (descriptor.flags & ipc::kFlagScaled) != 0;
  submission.contribution = client.arena + descriptor.contribution;
  submission.result = client.arena + descriptor.result;
  submission.cookie = descriptor.cookie;
  return submission;
}

}  // namespace

const char* AttachedJob::submit(AttachedClient* client, const ipc::Descriptor& descriptor, Micros now) {
  if (const char* wrong =
          check_descriptor(descriptor, client->view.arena_bytes, lane.settings().max_op_bytes))
    return wrong;
  if (descriptor.request == static_cast<uint32_t>(ipc::Request::kTakeCarry))
    return take(client, descriptor, now);
  const exchange::Submission submission = submission_of(client->view, descriptor);
  switch (lane.submit(now, submission)) {
    case Status::kOk:
      return nullptr;
    case Status::kNoMemory:
      return "descriptor: tensor is larger than the job's pool allows";
    default:
      return "descriptor: op_seq out of order, or more than 256 ops wait";
  }
}

const char* AttachedJob::take(AttachedClient* client, const ipc::Descriptor& descriptor, Micros now) {
  if (client->takes.size() == ipc::kMaxTakes) return "descriptor: more than 16 kTakeCarry wait";
  Take take;
  take.what = submission_of(client->view, descriptor);
  if ((descriptor.flags & ipc::kFlagDrop) == 0) take.out = client->view.arena + descriptor.result;
  take.correction = (descriptor.flags & ipc::kFlagCorrection) != 0;
  take.deadline = now + descriptor.deadline_us;
  client->takes.push_back(take);
  return nullptr;
}

bool AttachedJob::serve_takes(Micros now) {
  bool any = false;
  for (AttachedClient& client : clients) {
    for (size_t i = 0; i < client.takes.size() && client.live();) {
      const Take& take = client.takes[i];
      ipc::Completion answer;
      if (lane.failed())
        answer.status = static_cast<uint8_t>(lane.failure());
      else if (!(take.correction ? lane.take_correction(now, take.what, take.out)
                                 : lane.take_carry(now, take.what, take.out))) {
        if (now < take.deadline) {
          ++i;
          continue;
        }
        answer.status = static_cast<uint8_t>(Status::kOpTimeout);
      }
      any = true;
      deliver_events();  // slots that are free now: before the word that all of them are
      answer.op_seq = take.what.op_seq;
      answer.cookie = take.what.cookie;
      answer.events = ipc::kEventCarry;
      answer.lane = static_cast<uint16_t>(lane_index);
      client.takes.erase(client.takes.begin() + static_cast<ptrdiff_t>(i));
      // A ring that is full is found out by the next event, which ends the client.
      if (client.live() && client.completions.push(answer) == ipc::RingState::kOk)
        ipc::wake_client(*client.view.control, *client.view.submit);
    }
  }
  return any;
}

Micros AttachedJob::next_take() const {
  Micros next = kNever;
  for (const AttachedClient& client : clients) {
    if (!client.live()) continue;
    for (const Take& take : client.takes) next = std::min(next, take.deadline);
  }
  return next;
}

bool AttachedJob::deliver_events() {
  uint64_t touched = 0;  // bit per local rank below 64; more ranks are woken each
  bool any = false;
  exchange::Event event;
  while (lane.poll_event(&event)) {
    any = true;
    AttachedClient& client = clients[event.local_rank];
    if (!client.live()) continue;
    bool full = false;
    complete(&client, event, &full);
    if (full) {
      client.broken = client.overran = true;
      continue;
    }
    if (event.local_rank < 64)
      touched |= 1ULL << event.local_rank;
    else
      ipc::wake_client(*client.view.control, *client.view.submit);
  }
  for (size_t rank = 0; rank < clients.size() && rank < 64; ++rank) {
    if (((touched >> rank) & 1) != 0 && clients[rank].live()) {
      ipc::wake_client(*clients[rank].view.control, *clients[rank].view.submit);
    }
  }
  return any;
}

void AttachedJob::complete(AttachedClient* client, const exchange::Event& event, bool* full) {
  if (event.text[0] != '\0' || event.ranges > 0) {
    report_.op_seq = event.op_seq;
    report_.ranges = event.ranges;
    report_.ranges_total = event.ranges_total;
    for (uint32_t i = 0; i < event.ranges; ++i) {
      report_.range[i] = {event.range[i].first, event.range[i].count, event.range[i].owner};
    }
    static_assert(sizeof event.text <= ipc::kReportText);
    std::memcpy(report_.text, event.text, sizeof event.text);
    ipc::write_report(*client->view.control, lane_index, report_);
  }
  const auto micros = [](Micros value) {
    return static_cast<uint32_t>(std::clamp<Micros>(value, 0, UINT32_MAX));
  };
  ipc::Completion completion;
  completion.op_seq = event.op_seq;
  completion.events = event.events;
  completion.status = static_cast<uint8_t>(event.status);
  completion.lane = static_cast<uint16_t>(lane_index);
  completion.cookie = event.cookie;
  completion.blocks_expected = event.blocks_expected;
  completion.blocks_received = event.blocks_received;
  completion.blocks_skipped = event.blocks_skipped;
  completion.blocks_uncounted = event.blocks_uncounted;
  completion.total_us = micros(event.total);
  completion.wait_us = micros(event.lag + event.quorum);
  completion.push_us = micros(event.push);
  completion.repaired = event.blocks_repaired;
  completion.late_nodes = static_cast<uint16_t>(std::min(event.late_nodes, 65535U));
  completion.worst_node =
      event.worst_node >= UINT16_MAX ? UINT16_MAX : static_cast<uint16_t>(event.worst_node);
  completion.lag_us = micros(event.lag);
  completion.bytes_sent = event.bytes_sent;
  completion.blocks_filled = event.blocks_filled;
  completion.blocks_discarded = event.blocks_discarded;
  completion.blocks_corrected = event.blocks_corrected;
  *full = client->completions.push(completion) != ipc::RingState::kOk;
}

bool AttachedJob::forget(uint64_t client_id, Micros now, bool left) {
  for (AttachedClient& client : clients) {
    if (client.view.id != client_id || client.gone) continue;
    if (left && (client.descriptors.look() == ipc::RingState::kOk ||  // a call that was not even read
                 !lane.forget_rank(now, client.view.local_rank))) {
      return false;
    }
    // The exchange knows no slot of it any more: by forget_rank, or because the job has failed.
    SLUICE_ASSERT(left || lane.failed());
    deliver_events();
    client.gone = true;
    client.takes.clear();
    client.view.control = nullptr;
    client.view.submit = nullptr;
    client.view.arena = nullptr;
  }
  return true;
}

void AttachedJob::collect_traces() {
  exchange::Trace trace;
  while (lane.poll_trace(&trace)) {
    if (traces_.size() < kTraces)
      traces_.push_back(trace);
    else
      traces_[trace_next_] = trace;
    trace_next_ = (trace_next_ + 1) % kTraces;
    if (trace.result == 0) continue;
    const double seconds = static_cast<double>(trace.result - trace.submitted) / 1e6;
    const auto op_class = static_cast<size_t>(trace.op_class);
    const auto* bucket = std::lower_bound(std::begin(kDurationBuckets), std::end(kDurationBuckets), seconds);
    ++durations_[op_class][bucket - std::begin(kDurationBuckets)];
    duration_sum_[op_class] += seconds;
  }
}

void AttachedJob::publish(JobStats* out) const {
  out->job_id = id;
  out->job = lane.settings().job;
  out->counters = lane.counters();
  out->owed = lane.owed();
  out->bounds = lane.bounds();
  out->peers.resize(handles.size());
  for (uint32_t node = 0; node < handles.size(); ++node) out->peers[node] = lane.peer(node);
  out->traces.clear();
  for (size_t i = 0; i < traces_.size(); ++i) {
    out->traces.push_back(traces_[traces_.size() < kTraces ? i : (trace_next_ + i) % kTraces]);
  }
  out->drained = lane.drained();
  out->failed = lane.failed();
  std::memcpy(out->durations, durations_, sizeof durations_);
  std::memcpy(out->duration_sum, duration_sum_, sizeof duration_sum_);
}

}  // namespace sluice::daemon
