#include "lib/client/ops.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/assert.h"

namespace sluice::client {
namespace {

constexpr uint8_t kKnownEvents = kEventResult | kEventResolved;
constexpr size_t kReportedRanges = std::extent_v<decltype(sluice_report::missing)>;

int severity(Status status) {
  if (!is_error(status)) return static_cast<int>(status);
  switch (status) {
    case Status::kAborted:
      return 100;
    case Status::kViewChanged:
      return 101;
    default:
      return 102;
  }
}

}  // namespace

Status worse(Status a, Status b) { return severity(b) > severity(a) ? b : a; }

OpTable::OpTable(uint32_t lanes) : lanes_(lanes), all_lanes_((1U << lanes) - 1) {
  SLUICE_ASSERT(lanes >= 1 && lanes <= ipc::kMaxLanes);
}

OpTable::Op* OpTable::open(uint64_t sequence, uint64_t tag) {
  const size_t slot = sequence % ipc::kWindow;
  if (ops_[slot].open) return nullptr;
  ops_[slot] = Op{};
  ops_[slot].open = true;
  ops_[slot].op_seq = static_cast<uint32_t>(sequence);
  ops_[slot].tag = tag;
  sequence_[slot] = sequence;
  opened_ = sequence + 1;
  return &ops_[slot];
}

OpTable::Op* OpTable::find(sluice_op handle) {
  if (handle == 0) return nullptr;
  const uint64_t sequence = handle - 1;
  Op& op = ops_[sequence % ipc::kWindow];
  return op.open && sequence_[sequence % ipc::kWindow] == sequence ? &op : nullptr;
}

void OpTable::forget(Op* op) { op->open = false; }

bool OpTable::apply(uint32_t lane, const ipc::Completion& completion, const ipc::Report* report) {
  if (lane >= lanes_ || completion.lane != lane) return false;
  if (completion.events == 0 || (completion.events & ~kKnownEvents) != 0) return false;
  Op& op = ops_[completion.op_seq % ipc::kWindow];
  if (!op.open || op.op_seq != completion.op_seq) {
    // A later word about an op that has been waited for (a hole that stayed one) is possible; about one that was never
    // submitted it is not.
    return completion.op_seq < opened_;
  }
  if (op.lost) return true;
  const uint32_t bit = 1U << lane;
  if ((completion.events & kEventResult) != 0) op.lanes_result |= bit;
  if ((completion.events & kEventResolved) != 0) op.lanes_resolved |= bit;
  if ((completion.events & kEventResult) != 0 || (op.lanes_result & bit) == 0) {
    op.lane[lane] = completion;
  } else {  // after its RESULT a lane tells of the contribution only, or of holes that were filled too late
    ipc::Completion& known = op.lane[lane];
    known.blocks_received = std::max(known.blocks_received, completion.blocks_received);
    known.total_us = std::max(known.total_us, completion.total_us);
    known.blocks_uncounted = completion.blocks_uncounted;
    known.blocks_discarded = completion.blocks_discarded;
  }
  op.status[lane] = worse(op.status[lane], static_cast<Status>(completion.status));
  if (report != nullptr) {
    if (op.text.empty()) op.text = report->text;
    if (op.missing_total[lane] == 0) {
      for (uint32_t i = 0; i < report->ranges && op.missing.size() < kReportedRanges; ++i) {
        const ipc::MissingRange& range = report->range[i];
        op.missing.push_back({range.first, range.count, range.owner});
      }
      op.missing_total[lane] = std::max(report->ranges_total, report->ranges);
    }
  }
  return true;
}

void OpTable::fail_all(std::string_view text) {
  for (Op& op : ops_) {
    if (!op.open || (events(op) & SLUICE_EVENT_RESOLVED) != 0) continue;
    op.lost = true;
    op.text = text;
  }
}

uint32_t OpTable::events(const Op& op) const {
  if (op.lost) return SLUICE_EVENT_RESULT | SLUICE_EVENT_RESOLVED;
  return (op.lanes_result == all_lanes_ ? SLUICE_EVENT_RESULT : 0) |
         (op.lanes_result == all_lanes_ && op.lanes_resolved == all_lanes_ ? SLUICE_EVENT_RESOLVED : 0);
}

Status OpTable::status(const Op& op) const {
  if (op.lost) return Status::kDaemonLost;
  Status status = Status::kOk;
  for (uint32_t lane = 0; lane < lanes_; ++lane) status = worse(status, op.status[lane]);
  return status;
}

void OpTable::fill(const Op& op, sluice_report* report) const {
  const size_t size = report->size;
  *report = sluice_report{};
  report->size = size;
  report->status = static_cast<sluice_status>(status(op));
  report->events = events(op);
  report->tag = op.tag;
  report->op_seq = op.op_seq;
  report->worst_node = UINT32_MAX;
  uint32_t longest_wait = 0;
  for (uint32_t lane = 0; lane < lanes_; ++lane) {
    const ipc::Completion& c = op.lane[lane];
    if (((op.lanes_result | op.lanes_resolved) & (1U << lane)) == 0) continue;
    report->blocks_expected += c.blocks_expected;
    report->blocks_received += c.blocks_received;
    report->blocks_skipped += c.blocks_skipped;
    report->blocks_uncounted += c.blocks_uncounted;
    report->blocks_repaired += c.repaired;
    report->blocks_filled += c.blocks_filled;
    report->blocks_discarded += c.blocks_discarded;
    report->blocks_corrected += c.blocks_corrected;
    report->bytes_sent += c.bytes_sent;
    report->total_us = std::max(report->total_us, c.total_us);
    report->wait_us = std::max(report->wait_us, c.wait_us);
    report->lag_us = std::max(report->lag_us, c.lag_us);
    report->push_us = std::max(report->push_us, c.push_us);
    // Lanes may mean the same nodes: the largest is certain, the sum is not.
    report->late_nodes = std::max<uint32_t>(report->late_nodes, c.late_nodes);
    if (c.worst_node != UINT16_MAX && (report->worst_node == UINT32_MAX || c.wait_us > longest_wait)) {
      report->worst_node = c.worst_node;
      longest_wait = c.wait_us;
    }
    report->missing_total += op.missing_total[lane];
  }
  report->missing_count = static_cast<uint32_t>(op.missing.size());
  std::copy(op.missing.begin(), op.missing.end(), report->missing);
  std::snprintf(report->text, sizeof(report->text), "%s", op.text.c_str());
}

bool OpTable::all_have_result() const {
  return std::all_of(ops_.begin(), ops_.end(),
                     [&](const Op& op) { return !op.open || (events(op) & SLUICE_EVENT_RESULT) != 0; });
}

bool OpTable::all_resolved() const {
  return std::all_of(ops_.begin(), ops_.end(),
                     [&](const Op& op) { return !op.open || (events(op) & SLUICE_EVENT_RESOLVED) != 0; });
}

}  // namespace sluice::client
