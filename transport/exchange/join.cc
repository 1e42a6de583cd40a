#include "transport/exchange/join.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "base/assert.h"

namespace sluice::exchange {
namespace {

using wire::Drop;
using wire::Header;
using wire::Hello;
using wire::Nonce128;

// Retransmission (protocol, section 14): the first interval, the longest, and the time in which one round of HELLOs to
// all nodes is spread. With many nodes the intervals grow, as that of PING does, so that a round of n HELLOs to each
// node stays below what a port takes in.
constexpr Micros kFirstInterval = 20'000, kLongestInterval = 200'000;
constexpr Micros kFirstPerNode = 250, kLongestPerNode = 1'000, kSpreadPerNode = 250;
constexpr double kRttFactor = 1.5;  // no size is tried again before an answer could have come

// A size is given up when so many tries went unanswered that, at the loss seen for small HELLOs of the same rounds,
// chance would do it once in 1e8. Without loss that takes 9 rounds. A size given up by chance costs speed, never a sum.
constexpr double kGiveUp = 1e-8;

// A sealed packet with a full payload, which is what is probed.
constexpr uint32_t datagram_of(uint32_t payload) { return payload + wire::kHeaderBytes + wire::kTagBytes; }

template <typename T>
std::span<const std::byte> as_bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

void copy(const Nonce128& from, uint8_t* to) { std::memcpy(to, from.data(), from.size()); }
Nonce128 nonce_at(const uint8_t* from) {
  Nonce128 nonce;
  std::memcpy(nonce.data(), from, nonce.size());
  return nonce;
}
bool equal(const Nonce128& nonce, const uint8_t* other) {
  return wire::tags_equal(std::as_bytes(std::span(nonce)), std::as_bytes(std::span(other, nonce.size())));
}
uint64_t head_of(const Nonce128& nonce) {
  uint64_t head;
  std::memcpy(&head, nonce.data(), sizeof(head));
  return head;
}

}  // namespace

Join::Join(JoinSettings settings) : settings_(std::move(settings)) {
  const size_t nodes = settings_.join_nonces.size();
  SLUICE_ASSERT(nodes >= 1 && nodes <= wire::kMaxNodes && settings_.self < nodes);
  SLUICE_ASSERT(settings_.join_nonces[settings_.self].has_value());
  SLUICE_ASSERT(!settings_.ladder.empty() && settings_.lanes >= 1 && settings_.lanes <= UINT8_MAX);
  key_ = wire::control_key(settings_.job, settings_.key);
  settings_.key.wipe();
  job_ = wire::job_id(settings_.job);
  lanes_ = settings_.lanes;
  peers_.resize(nodes);
  members_.resize(nodes);
  ready_.resize(nodes);

  for (const uint16_t datagram : settings_.ladder) {
    SLUICE_ASSERT(datagram >= kSmallestDatagram);
    rungs_.push_back(static_cast<uint16_t>(wire::payload_for_datagram(datagram)));
  }
  std::sort(rungs_.begin(), rungs_.end(), std::greater<>());
  rungs_.erase(std::unique(rungs_.begin(), rungs_.end()), rungs_.end());
  payload_ = static_cast<uint16_t>(
      std::min<uint32_t>(wire::payload_for_datagram(settings_.largest_datagram), UINT16_MAX));
  buffer_.resize(payload_ + wire::kHeaderBytes + wire::kTagBytes + kHelloBytes);

  // Jitter is seen from outside, so it must not be taken from the secret itself.
  constexpr char kLabel[] = "jitter";
  const auto seed = wire::control_tag(settings_.random, as_bytes_of(kLabel), {});
  std::memcpy(&random_, seed.data(), sizeof(random_));

  if (payload_ < rungs_.back()) {
    fail({JoinFault::Kind::kPayload, settings_.self, datagram_of(rungs_.back()), settings_.largest_datagram});
  } else {
    advance(0);
  }
}

const JoinFault& Join::fault() const {
  SLUICE_ASSERT(state_ == State::kFailed);
  return *fault_;
}
uint32_t Join::payload() const {
  SLUICE_ASSERT(state_ == State::kFinished);
  return payload_;
}
uint32_t Join::lanes() const {
  SLUICE_ASSERT(state_ == State::kFinished);
  return lanes_;
}
std::vector<wire::ViewMember> Join::members() const {
  SLUICE_ASSERT(state_ == State::kFinished);
  return members_;
}

// --- what came ---

// Everything up to the tag. Another version is no reason to stop here: it shall be refused by name, which only a packet
// with the right tag may bring about. So the header and the fields of Hello stay where they are in all versions.
Drop Join::parse(uint32_t from, std::span<const std::byte> datagram, Header* header, Hello* hello) {
  if (datagram.size() < kHelloBytes || datagram.size() > UINT16_MAX) return Drop::kLength;
  std::memcpy(header, datagram.data(), sizeof(*header));
  if (header->magic != wire::kMagic) return Drop::kMagic;
  const auto type = static_cast<wire::Type>(header->type);
  if (type != wire::Type::kHello && type != wire::Type::kHelloAck) return Drop::kType;
  if (header->job != job_) return Drop::kJob;
  if (header->epoch != 0) return Drop::kEpoch;
  if (header->sender != wire::kNoSender) return Drop::kSender;
  if (from >= peers_.size() || from == settings_.self || header->ranks != from) return Drop::kSource;
  if (header->shard != settings_.self) return Drop::kNotMine;
  const size_t payload = datagram.size() - wire::kHeaderBytes - wire::kTagBytes;
  const auto tag = wire::control_tag(key_, datagram.first(wire::kHeaderBytes),
                                     datagram.subspan(wire::kHeaderBytes, payload));
  if (!wire::tags_equal(tag, datagram.last(wire::kTagBytes))) {
    ++peers_[from].wrong_tags;
    return Drop::kTag;
  }
  std::memcpy(hello, datagram.data() + wire::kHeaderBytes, sizeof(*hello));
  return Drop::kNone;
}

Drop Join::on_packet(uint32_t from, std::span<const std::byte> datagram, Micros now) {
  Header header;
  Hello hello;
  if (const Drop drop = parse(from, datagram, &header, &hello); drop != Drop::kNone) return drop;
  Peer& peer = peers_[from];
  ++peer.tagged;
  const bool answer = header.type == static_cast<uint8_t>(wire::Type::kHelloAck);
  // Answered even when it is old or does not fit: it costs no more than what came, and the peer learns why.
  if (!answer) queue_ack(from, header, hello, datagram.size());
  if (!fresh(from, hello)) return answer ? Drop::kReplay : Drop::kNone;

  const bool new_challenge = !equal(peer.challenge, hello.own_challenge);
  peer.challenge = nonce_at(hello.own_challenge);
  newest_generation_ = std::max(newest_generation_, hello.generation);
  if (state_ == State::kFinished) {
    if (!equal(peer.nonce, hello.join_nonce)) peer.restarted = true;
    return Drop::kNone;
  }
  if (state_ == State::kJoining) {
    if (const auto fault = check(from, header, hello)) fail(*fault);
  }
  if (state_ == State::kFailed) {
    // Once more to each peer, to answer its challenge: it may have finished, and shall learn of us as we did of it.
    if (new_challenge) {
      peer.send_hello = true;
      enqueue(from);
    }
    return Drop::kMismatch;
  }
  if (hello.generation < settings_.generation) {
    peer.behind = true;  // it will read the newer view and come back
    return Drop::kNone;
  }
  take(from, hello, datagram.size(), now);
  if (answer) take_answer(from, header.stamp, now);
  advance(now);
  return Drop::kNone;
}

// Whether the peer has sent this after we drew our challenge. A packet with another join nonce than the one we know
// must answer the *next* challenge: what an earlier start of the peer has answered is worth nothing for a later one.
// The known start may answer both, because old HELLOs, sent again by somebody, make us offer it the next one.
bool Join::fresh(uint32_t node, const Hello& hello) const {
  const Peer& peer = peers_[node];
  const bool same = peer.known && equal(peer.nonce, hello.join_nonce);
  if ((same || !peer.known) && equal(challenge_for(node, peer.incarnation), hello.echoed_challenge))
    return true;
  return peer.known && equal(challenge_for(node, peer.incarnation + 1), hello.echoed_challenge);
}

std::optional<JoinFault> Join::check(uint32_t node, const Header& header, const Hello& hello) const {
  using Kind = JoinFault::Kind;
  const auto fault = [node](Kind kind, uint64_t ours, uint64_t theirs) {
    return JoinFault{kind, node, ours, theirs};
  };
  if (header.version != wire::kVersion) return fault(Kind::kVersion, wire::kVersion, header.version);
  if (hello.generation > settings_.generation) {
    return fault(Kind::kGeneration, settings_.generation, hello.generation);
  }
  if (hello.generation < settings_.generation) return std::nullopt;  // of another view, so nothing need fit
  const Nonce128 nonce = nonce_at(hello.join_nonce);
  const auto& expected = settings_.join_nonces[node];
  if (expected && nonce != *expected) return fault(Kind::kNonce, head_of(*expected), head_of(nonce));
  if ((hello.flags & wire::kHelloUnknownStart) != 0) {
    return fault(Kind::kUnknownStart, head_of(*settings_.join_nonces[settings_.self]), 0);
  }
  const auto sealing = static_cast<uint8_t>(settings_.sealing);
  if (hello.sealing != sealing) return fault(Kind::kSealing, sealing, hello.sealing);
  if (hello.config_digest != settings_.config_digest) {
    return fault(Kind::kConfig, settings_.config_digest, hello.config_digest);
  }
  if (hello.lanes == 0 || (expected && hello.lanes != settings_.lanes)) {
    return fault(Kind::kLanes, settings_.lanes, hello.lanes);
  }
  if (hello.payload < rungs_.back() || hello.payload % 64 != 0) {
    return fault(Kind::kPayload, datagram_of(rungs_.back()), datagram_of(hello.payload));
  }
  return std::nullopt;
}

// A fresh packet of our generation that fits.
void Join::take(uint32_t node, const Hello& hello, size_t bytes, Micros now) {
  Peer& peer = peers_[node];
  if (!peer.known || !equal(peer.nonce, hello.join_nonce)) {
    if (peer.known) ++peer.incarnation;
    peer.known = true;
    peer.behind = false;
    peer.nonce = nonce_at(hello.join_nonce);
    peer.phase = 0;
    peer.payload = UINT16_MAX;
    peer.view = 0;
    peer.heard = peer.sent = peer.reach = 0;
    peer.probes = {};
    peer.open_probes = peer.rounds = peer.answered = peer.silent = 0;
    peer.newest_stamp = static_cast<uint32_t>(now) - 1;
    peer.interval = base_interval();
    peer.due = now;
    view_changed_ = true;
  }
  if (peer.lanes != hello.lanes) view_changed_ = true;
  peer.lanes = hello.lanes;
  peer.heard = std::max(peer.heard, static_cast<uint16_t>(bytes));
  // It cannot have got more than was sent to it.
  const uint32_t got = std::min(hello.probe, peer.sent);
  peer.reach = std::max(peer.reach, static_cast<uint16_t>(wire::payload_for_datagram(got)));
  // A packet that was overtaken says less than what is known: phases only rise, payloads only fall.
  if (hello.phase >= peer.phase && hello.payload <= peer.payload) {
    peer.phase = hello.phase;
    peer.payload = hello.payload;
    peer.view = hello.view;
  }
  lower(hello.payload, now);
}

void Join::take_answer(uint32_t node, uint32_t stamp, Micros now) {
  Peer& peer = peers_[node];
  const auto age = static_cast<int32_t>(static_cast<uint32_t>(now) - stamp);
  if (age < 0) return;
  peer.rtt = age;
  if (static_cast<int32_t>(stamp - peer.newest_stamp) <= 0) return;
  peer.newest_stamp = stamp;
  peer.silent = 0;
  if (peer.answered < peer.rounds) ++peer.answered;
}

void Join::queue_ack(uint32_t node, const Header& header, const Hello& hello, size_t bytes) {
  Peer& peer = peers_[node];
  const Nonce128 nonce = nonce_at(hello.join_nonce);
  const bool same = peer.known && nonce == peer.nonce;
  auto got = static_cast<uint16_t>(bytes);
  if (same) got = std::max(got, peer.heard);
  // HELLOs of one round that lie here together have one answer.
  if (peer.send_ack && peer.ack_nonce == nonce) got = std::max(got, peer.ack_probe);
  peer.ack_nonce = nonce;
  peer.ack_echo = nonce_at(hello.own_challenge);
  peer.ack_stamp = header.stamp;
  peer.ack_incarnation = peer.incarnation + (peer.known && !same ? 1 : 0);
  peer.ack_probe = got;
  peer.ack_flags = state_ == State::kFinished && !same ? wire::kHelloUnknownStart : uint8_t{0};
  peer.send_ack = true;
  enqueue(node);
}

// --- what follows from it ---

void Join::fail(const JoinFault& fault) {
  fault_ = fault;
  state_ = State::kFailed;
}

// The smallest payload anybody knows of spreads to all.
void Join::lower(uint16_t payload, Micros now) {
  if (payload >= payload_) return;
  payload_ = payload;
  view_changed_ = true;
  tell_all(now);
}

// Phase 2 begins when every peer is known and gets our datagrams of the payload size; it has ended when all nodes are
// in phase 2 with the same nodes, lanes and payload. That payload is then the smallest of all: a node that reported it
// in phase 2 can lower it only after hearing a smaller one, and nobody is left to say it first.
void Join::advance(Micros now) {
  if (state_ != State::kJoining) return;
  bool proven = true;
  for (uint32_t node = 0; node < peers_.size() && proven; ++node) {
    proven = node == settings_.self || (peers_[node].known && peers_[node].reach >= payload_);
  }
  if (!proven) {
    phase_ = 1;  // again, when a peer has been started anew
    view_ = 0;
    view_changed_ = true;
    return;
  }
  if (view_changed_) {
    view_changed_ = false;
    lanes_ = settings_.lanes;
    for (uint32_t node = 0; node < peers_.size(); ++node) {
      const bool own = node == settings_.self;
      members_[node].join_nonce = own ? *settings_.join_nonces[node] : peers_[node].nonce;
      if (!own) lanes_ = std::min<uint32_t>(lanes_, peers_[node].lanes);
    }
    const uint32_t before = std::exchange(
        view_,
        wire::epoch_of(wire::view_hash(settings_.job, settings_.generation, members_, {}, lanes_, payload_)));
    if (phase_ != 2 || view_ != before) {
      phase_ = 2;
      tell_all(now);
    }
  }
  for (uint32_t node = 0; node < peers_.size(); ++node) {
    if (node != settings_.self && !agrees(peers_[node])) return;
  }
  state_ = State::kFinished;
}

bool Join::agrees(const Peer& peer) const {
  return peer.known && peer.phase == 2 && peer.payload == payload_ && peer.view == view_;
}

bool Join::needs(const Peer& peer) const {
  return peer.tell || !peer.known || peer.reach < payload_ || (phase_ == 2 && !agrees(peer));
}

// One HELLO to each known peer, soon: it would otherwise learn what changed only when it asks.
void Join::tell_all(Micros now) {
  for (uint32_t node = 0; node < peers_.size(); ++node) {
    Peer& peer = peers_[node];
    if (node == settings_.self || !peer.known) continue;
    peer.tell = true;
    peer.interval = base_interval();
    peer.due = soon(now);
  }
}

// --- what goes out ---

Micros Join::base_interval() const {
  return std::max(kFirstInterval, kFirstPerNode * static_cast<Micros>(peers_.size()));
}

// At a time of its own, so that n nodes do not send to one port at once.
Micros Join::soon(Micros now) {
  const double spread = static_cast<double>(kSpreadPerNode) * static_cast<double>(peers_.size());
  return now + 1 + static_cast<Micros>(spread * uniform());
}

void Join::tick(Micros now) {
  for (uint32_t node = 0; node < peers_.size() && state_ != State::kFailed; ++node) {
    Peer& peer = peers_[node];
    if (node == settings_.self) continue;
    if (peer.due == kNever && !peer.known) {  // the first call
      peer.interval = base_interval() / 2;    // round() doubles it
      peer.due = soon(now);
    }
    const bool wanted = state_ == State::kJoining ? needs(peer) : peer.tell;
    if (wanted && peer.due <= now) round(node, now);
  }
}

Micros Join::next_timer() const {
  Micros next = kNever;
  if (state_ == State::kFailed) return next;
  for (uint32_t node = 0; node < peers_.size(); ++node) {
    const Peer& peer = peers_[node];
    if (node == settings_.self) continue;
    if (!peer.known && peer.due == kNever) return 0;  // not started
    if (state_ == State::kJoining ? needs(peer) : peer.tell) next = std::min(next, peer.due);
  }
  return next;
}

void Join::round(uint32_t node, Micros now) {
  Peer& peer = peers_[node];
  const Micros longest = std::max(kLongestInterval, kLongestPerNode * static_cast<Micros>(peers_.size()));
  peer.tell = false;
  peer.stamp = static_cast<uint32_t>(now);
  peer.send_hello = true;
  peer.send_probes = 0;
  if (peer.known) probe(node, now);
  if (state_ == State::kFailed) return;
  if (peer.send_probes != 0 && peer.silent < 4) {
    // While answers come, sizes are tried as fast as answers can tell.
    const auto answer_time =
        static_cast<Micros>(kRttFactor * static_cast<double>(std::max<Micros>(peer.rtt, 0)));
    peer.interval = std::max(base_interval(), answer_time);
  } else {
    peer.interval = std::min(peer.interval * 2, longest);
  }
  if (peer.known) {
    ++peer.rounds;
    ++peer.silent;
  }
  peer.due = now + static_cast<Micros>(static_cast<double>(peer.interval) * (0.75 + 0.5 * uniform()));
  enqueue(node);
}

// Chooses the sizes of this round: the one hoped for, and, one more per answered round, the next ones below it, so that
// a path that swallows large datagrams does not cost the same wait once per size.
void Join::probe(uint32_t node, Micros now) {
  Peer& peer = peers_[node];
  if (peer.rounds > 0 && peer.silent <= 1 && peer.open_probes + 1 < kProbes) ++peer.open_probes;
  while (peer.reach < payload_) {
    const auto hoped = std::find_if(peer.probes.begin(), peer.probes.end(),
                                    [this](const Probe& probe) { return probe.payload == payload_; });
    if (hoped == peer.probes.end()) break;
    const double loss = (peer.rounds - peer.answered + 1.0) / (peer.rounds + 2.0);
    if (std::pow(loss, hoped->tries) > kGiveUp) break;
    const uint16_t next = rung_below(payload_);
    if (next == 0) return fail({JoinFault::Kind::kPayload, node, datagram_of(rungs_.back()), 0});
    lower(next, now);
    peer.tell = false;  // this is the round
  }
  uint16_t size = payload_;
  for (uint32_t i = 0; i <= peer.open_probes && size > peer.reach; ++i, size = rung_below(size)) {
    auto slot = std::find_if(peer.probes.begin(), peer.probes.end(),
                             [size](const Probe& probe) { return probe.payload == size; });
    if (slot == peer.probes.end()) {
      slot = std::find_if(peer.probes.begin(), peer.probes.end(), [this, &peer](const Probe& probe) {
        return probe.payload <= peer.reach || probe.payload > payload_;
      });
      if (slot == peer.probes.end()) break;
      *slot = {size, 0};
    }
    ++slot->tries;
    peer.send_probes |= static_cast<uint8_t>(1U << (slot - peer.probes.begin()));
  }
}

uint16_t Join::rung_below(uint32_t payload) const {
  for (const uint16_t rung : rungs_) {
    if (rung < payload) return rung;
  }
  return 0;
}

void Join::enqueue(uint32_t node) {
  if (peers_[node].queued) return;
  peers_[node].queued = true;
  ready_[(ready_first_ + ready_count_++) % ready_.size()] = node;
}

bool Join::poll_send(Micros /*now*/, Outgoing* out) {
  while (ready_count_ > 0) {
    const uint32_t node = ready_[ready_first_];
    ready_first_ = (ready_first_ + 1) % ready_.size();
    --ready_count_;
    Peer& peer = peers_[node];
    peer.queued = false;
    out->node = node;
    if (std::exchange(peer.send_ack, false)) {
      out->bytes = build(node, true, kHelloBytes);
    } else if (std::exchange(peer.send_hello, false)) {
      out->bytes = build(node, false, kHelloBytes);
    } else if (peer.send_probes != 0) {
      const int which = std::countr_zero(peer.send_probes);
      peer.send_probes &= static_cast<uint8_t>(peer.send_probes - 1);
      out->bytes = build(node, false, datagram_of(peer.probes[which].payload));
    } else {
      continue;
    }
    if (peer.send_hello || peer.send_probes != 0) enqueue(node);
    return true;
  }
  return false;
}

std::span<const std::byte> Join::build(uint32_t node, bool ack, size_t bytes) {
  Peer& peer = peers_[node];
  Header header;
  header.type = static_cast<uint8_t>(ack ? wire::Type::kHelloAck : wire::Type::kHello);
  header.sender = wire::kNoSender;
  header.job = job_;
  header.shard = static_cast<uint16_t>(node);
  header.ranks = static_cast<uint16_t>(settings_.self);
  header.stamp = ack ? peer.ack_stamp : peer.stamp;

  Hello hello;
  copy(*settings_.join_nonces[settings_.self], hello.join_nonce);
  copy(challenge_for(node, ack ? peer.ack_incarnation : peer.incarnation), hello.own_challenge);
  copy(ack ? peer.ack_echo : peer.challenge, hello.echoed_challenge);
  hello.config_digest = settings_.config_digest;
  hello.generation = settings_.generation;
  hello.payload = payload_;
  hello.lanes = static_cast<uint8_t>(settings_.lanes);
  hello.sealing = static_cast<uint8_t>(settings_.sealing);
  hello.phase = phase_;
  hello.flags = ack ? peer.ack_flags : 0;
  hello.probe = ack ? peer.ack_probe : peer.heard;
  hello.view = view_;

  SLUICE_ASSERT(bytes >= kHelloBytes && bytes <= buffer_.size());
  const std::span<std::byte> datagram(buffer_.data(), bytes);
  std::fill(datagram.begin(), datagram.end(), std::byte{0});
  std::memcpy(datagram.data(), &header, sizeof(header));
  std::memcpy(datagram.data() + sizeof(header), &hello, sizeof(hello));
  const auto tag =
      wire::control_tag(key_, datagram.first(wire::kHeaderBytes),
                        datagram.subspan(wire::kHeaderBytes, bytes - wire::kHeaderBytes - wire::kTagBytes));
  std::memcpy(datagram.data() + bytes - wire::kTagBytes, tag.data(), tag.size());
  if (!ack) peer.sent = std::max(peer.sent, static_cast<uint16_t>(bytes));
  return datagram;
}

// Nobody who lacks `random` can tell it in advance.
Nonce128 Join::challenge_for(uint32_t node, uint32_t incarnation) const {
  const uint32_t label[2] = {node, incarnation};
  const auto tag = wire::control_tag(settings_.random, as_bytes_of(label), {});
  Nonce128 challenge;
  std::memcpy(challenge.data(), tag.data(), challenge.size());
  return challenge;
}

double Join::uniform() {  // SplitMix64; only for jitter
  uint64_t x = random_ += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

}  // namespace sluice::exchange
