// Ranks do not agree what an op is: the job ends, and each side is told what the other one was asked for (protocol,
// section 3, ANNOUNCE). Until then nothing of the op goes on.
//
// An ABORT with reason MISMATCH says what the local ranks of its sender were asked for, and names the node that it does
// not agree with. A node without a submit of its own, which sees two others disagree, names both of them instead.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {

using wire::Drop;

namespace {

// What this node was asked for: by the rank after which the op is run here, if it was one of this node's.
const Submission* local_submission(const Op& op) {
  const Submission* any = nullptr;
  for (const Receiver& receiver : op.receivers) {
    if (receiver.state == Receiver::State::kNone) continue;
    const Submission& s = receiver.submission;
    if (wire::fingerprint(s.kind, s.type, s.type, s.count, s.tag) == op.fingerprint &&
        s.op_class == op.op_class) {
      return &s;
    }
    if (any == nullptr) any = &s;
  }
  return any;
}

// "exact mean f32, 1000 elements, tag 00000000000000ff"
void describe_shape(char* text, size_t size, OpClass op_class, ReduceKind kind, ElementType type,
                    uint64_t count, uint64_t tag) {
  static constexpr const char* kClass[] = {"exact", "consistent", "best_effort"};
  std::snprintf(text, size, "%s %s %s, %llu elements, tag %016llx", kClass[static_cast<int>(op_class)],
                kind == ReduceKind::kMean ? "mean" : "sum", element_type_name(type),
                static_cast<unsigned long long>(count), static_cast<unsigned long long>(tag));
}

void describe_shape(char* text, size_t size, const Submission& s) {
  describe_shape(text, size, s.op_class, s.kind, s.type, s.count, s.tag);
}

}  // namespace

// As the local ranks were asked for it.
void LaneImpl::describe_op(char* text, size_t size, const Op& op) const {
  char shape[96] = "not called here";
  if (const Submission* submission = local_submission(op)) describe_shape(shape, sizeof shape, *submission);
  std::snprintf(text, size, "op %u (%s)", op.seq, shape);
}

// Op and packets of `node` differ. Told to all at once.
void LaneImpl::mismatch(Op* op, uint32_t node, Micros now) {
  if (failed || is_pulse(op->seq) || mismatch_at_ != kNever) {
    op->disputed |= op->local;
    return;
  }
  if (!op->local && (node == op->describer || op->describer == self)) return;
  char name[kNameSize], text[sizeof(Event::text)];
  name_node(name, sizeof name, node);
  if (op->local) {
    char here[128];
    describe_op(here, sizeof here, *op);
    std::snprintf(text, sizeof text, "MISMATCH: here %s; %s was asked for something else", here, name);
    dispute(op, std::span(&node, 1), text, now);
  } else {
    char other[kNameSize];
    const uint32_t both[2] = {op->describer, node};
    name_node(other, sizeof other, op->describer);
    std::snprintf(text, sizeof text, "MISMATCH: op %u: %s and %s were asked for different things", op->seq,
                  other, name);
    dispute(op, both, text, now);
  }
}

// Two ranks of this node do not agree. Nobody else need be heard.
void LaneImpl::mismatch_here(Op* op, const Submission& second, Micros now) {
  char first[96] = "", other[96], text[sizeof(Event::text)];
  for (const Receiver& receiver : op->receivers) {
    if (receiver.state == Receiver::State::kNone || receiver.submission.local_rank == second.local_rank)
      continue;
    describe_shape(first, sizeof first, receiver.submission);
    break;
  }
  describe_shape(other, sizeof other, second);
  std::snprintf(text, sizeof text, "MISMATCH: op %u: one rank of this node called %s; another one %s",
                op->seq, first, other);
  if (mismatch_at_ == kNever) dispute(op, std::span(&self, 1), text, now);
  op->disputed = true;
  std::snprintf(mismatch_text_, sizeof mismatch_text_, "%s", text);
  mismatch_at_ = now;  // with the next tick, not in the middle of an admission
}

// Stops the op, tells everybody, and waits a moment for the other side's words, which make the message complete: not
// longer than the op itself may take.
void LaneImpl::dispute(Op* op, std::span<const uint32_t> named, const char* text, Micros now) {
  op->disputed |= op->local;
  abort_op_ = op->seq;
  if (const Submission* submission = local_submission(*op)) {
    abort_op_known_ = true;
    abort_class_ = submission->op_class;
    abort_body_.kind = static_cast<uint8_t>(submission->kind);
    abort_body_.element_type = abort_body_.wire_type = static_cast<uint8_t>(submission->type);
    abort_body_.elements = submission->count;
    abort_body_.tag = submission->tag;
  }
  mismatch_at_ = now + kRepairCap;
  for (const Receiver& receiver : op->receivers) {
    if (receiver.state != Receiver::State::kWait) continue;
    mismatch_at_ = std::min(mismatch_at_, receiver.bound);
    const OpClass called_as = receiver.submission.op_class;
    if (called_as != OpClass::kExact) {
      const uint32_t patience = called_as == OpClass::kConsistent ? settings.pull_patience : 0;
      mismatch_at_ = std::min(mismatch_at_, receiver.admitted + op->hard() * (1 + patience));
    }
  }
  std::snprintf(mismatch_text_, sizeof mismatch_text_, "%s", text);
  tell_all(Status::kMismatch, named);
}

Drop LaneImpl::on_mismatch_abort(const wire::PacketView& packet, const wire::Abort& body, Micros now) {
  const wire::Header& header = packet.header;
  uint16_t named[2] = {wire::kNoSender, wire::kNoSender};
  const size_t count = std::min<size_t>(body.count, std::size(named));
  std::memcpy(named, packet.payload.data() + sizeof body, count * sizeof named[0]);
  const bool known =
      count < 2 && body.element_type < kElementTypes && header.op_class() <= OpClass::kBestEffort;
  char name[kNameSize], there[96] = "something else", text[sizeof(Event::text)];
  name_node(name, sizeof name, header.sender);
  const auto kind = body.kind == 1 ? ReduceKind::kMean : ReduceKind::kSum;
  const auto type = static_cast<ElementType>(body.element_type);
  if (known) describe_shape(there, sizeof there, header.op_class(), kind, type, body.elements, body.tag);

  Op* op = find(header.op_seq);
  const Submission* mine = op != nullptr && op->local ? local_submission(*op) : nullptr;
  const bool differs = known && mine != nullptr &&
                       (mine->op_class != header.op_class() || mine->kind != kind || mine->type != type ||
                        mine->count != body.elements || mine->tag != body.tag);
  if (differs) {
    char here[128];
    describe_op(here, sizeof here, *op);
    std::snprintf(text, sizeof text, "MISMATCH: here %s; %s was asked for %s", here, name, there);
    if (mismatch_at_ == kNever) {  // it must hear our side, too
      const uint32_t node = header.sender;
      dispute(op, std::span(&node, 1), text, now);
    }
    fail(now, Status::kMismatch, text, false);
    return Drop::kNone;
  }
  // A witness, or one who agrees with us: somebody else does not.
  char first[kNameSize] = "another node", second[kNameSize] = "another one";
  if (named[0] < n) name_node(first, sizeof first, named[0]);
  if (named[1] < n) name_node(second, sizeof second, named[1]);
  if (known) {
    std::snprintf(text, sizeof text, "MISMATCH: op %u: %s was asked for %s; %s for something else",
                  header.op_seq, name, there, named[0] == header.sender ? "another rank there" : first);
  } else {
    std::snprintf(text, sizeof text, "MISMATCH: op %u: %s and %s were asked for different things, says %s",
                  header.op_seq, first, second, name);
  }
  if (mine != nullptr && mismatch_at_ == kNever) {
    const uint32_t other = named[0] < n && named[0] != self ? named[0] : header.sender;
    dispute(op, std::span(&other, 1), text, now);
  } else if (mine == nullptr) {
    fail(now, Status::kMismatch, text, false);
  }
  return Drop::kNone;
}

}  // namespace sluice::exchange
