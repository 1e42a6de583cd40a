#include "transport/wire/seal.h"

#include <openssl/crypto.h>

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "base/assert.h"
#include "transport/wire/derive.h"
#include "transport/wire/gmac.h"
#include "transport/wire/packet.h"

namespace sluice::wire {
namespace {

constexpr int kPhaseShift = 32;                    // phase = counter div 2^32 (protocol, section 2)
constexpr int64_t kOldPhaseUs = 10 * 1000 * 1000;  // phase p-1 is accepted for 10 s (protocol, section 2)

ByteSpan bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}
ByteSpan bytes_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}
// As it lies in memory: little-endian, asserted in packet.h.
template <typename T>
ByteSpan bytes_of_value(const T& value) {
  static_assert(std::is_integral_v<T>);
  return {reinterpret_cast<const uint8_t*>(&value), sizeof(T)};
}

Bytes32 extract(std::string_view job, const JobKey& key) {
  std::string salt(job);
  salt += "sluice1";
  return hkdf_extract(bytes_of(salt), key);
}

// K(sender, phase) of the protocol, and what it is derived from.
struct KeySource {
  Bytes32 prk;
  ViewHash view;
  KeySource(std::string_view job, const JobKey& key, const ViewHash& hash)
      : prk(extract(job, key)), view(hash) {}
  ~KeySource() { OPENSSL_cleanse(prk.data(), prk.size()); }
  KeySource(const KeySource&) = delete;
  KeySource& operator=(const KeySource&) = delete;

  void derive(uint16_t sender, const Nonce128& join_nonce, uint32_t phase, DataKey* out) const {
    std::array<uint8_t, 4 + 32 + 2 + 16 + 4> info;
    uint8_t* at = info.data();
    const auto put = [&at](const void* from, size_t length) {
      std::memcpy(at, from, length);
      at += length;
    };
    put("data", 4);
    put(view.data(), view.size());
    put(&sender, sizeof(sender));
    put(join_nonce.data(), join_nonce.size());
    put(&phase, sizeof(phase));
    hkdf_expand(prk, info, *out);
  }
};

}  // namespace

ViewHash view_hash(std::string_view job, uint64_t generation, std::span<const ViewMember> members,
                   std::span<const uint32_t> node_of_rank, uint32_t lanes, uint32_t payload) {
  static_assert(sizeof(ViewMember) == sizeof(Nonce128));
  const uint32_t name_length = static_cast<uint32_t>(job.size());
  const uint32_t nodes = static_cast<uint32_t>(members.size());
  const uint32_t ranks = static_cast<uint32_t>(node_of_rank.size());
  // Each list behind its length, so that no two different views are the same bytes.
  return sha256({bytes_of(std::string_view("sluice1 view")), bytes_of_value(name_length), bytes_of(job),
                 bytes_of_value(generation), bytes_of_value(nodes), bytes_of(std::as_bytes(members)),
                 bytes_of_value(ranks), bytes_of(std::as_bytes(node_of_rank)), bytes_of_value(lanes),
                 bytes_of_value(payload)});
}

uint32_t epoch_of(const ViewHash& hash) {
  uint32_t epoch;
  std::memcpy(&epoch, hash.data(), sizeof(epoch));
  return epoch;
}

uint32_t job_id(std::string_view job) { return epoch_of(sha256({bytes_of(job)})); }

Secret<32> control_key(std::string_view job, const JobKey& key) {
  Bytes32 prk = extract(job, key);
  Secret<32> out;
  hkdf_expand(prk, bytes_of(std::string_view("ctl")), out);
  OPENSSL_cleanse(prk.data(), prk.size());
  return out;
}

std::array<std::byte, 16> control_tag(const std::array<uint8_t, 32>& key, std::span<const std::byte> header,
                                      std::span<const std::byte> payload) {
  const Bytes32 whole = hmac_sha256(key, {bytes_of(header), bytes_of(payload)});
  std::array<std::byte, 16> tag;
  std::memcpy(tag.data(), whole.data(), tag.size());
  return tag;
}

bool tags_equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

// --- Sealer ---

struct Sealer::State {
  KeySource source;
  uint16_t sender;
  Nonce128 join_nonce;
  uint32_t lane;
  uint32_t phase = 0;
  Gmac gmac;

  State(std::string_view job, const JobKey& key, const ViewHash& view, uint16_t sender_index,
        const Nonce128& nonce, uint32_t lane_index)
      : source(job, key, view), sender(sender_index), join_nonce(nonce), lane(lane_index), gmac(key_of(0)) {}

  DataKey key_of(uint32_t of_phase) const {
    DataKey key;
    source.derive(sender, join_nonce, of_phase, &key);
    return key;
  }
};

Sealer::Sealer(Sealing sealing, std::string_view job, const JobKey& key, const ViewHash& view,
               uint16_t sender, const Nonce128& join_nonce, uint32_t lane) {
  if (sealing != Sealing::kNone) state_ = std::make_unique<State>(job, key, view, sender, join_nonce, lane);
}
Sealer::~Sealer() = default;

void Sealer::next_phase() { counter_ = (((counter_ >> kPhaseShift) + 1) << kPhaseShift) - 1; }

void Sealer::seal(std::span<const std::byte> header, std::span<const std::byte> payload, uint64_t counter,
                  std::byte* tag) {
  SLUICE_ASSERT(counter > sealed_ && counter <= counter_);
  sealed_ = counter;
  if (!state_) return;
  const auto phase = static_cast<uint32_t>(counter >> kPhaseShift);
  if (phase != state_->phase) {
    state_->gmac.rekey(state_->key_of(phase));
    state_->phase = phase;
  }
  state_->gmac.compute(state_->lane, counter, header, payload, tag);
}

// --- Opener ---

struct Opener::State {
  struct Sender {
    Nonce128 join_nonce;
    uint32_t phase = 0;        // of `current`: the newest from which a tag was right
    uint32_t spare_phase = 0;  // of `spare`; equal to `phase` when it holds nothing
    int64_t changed_us = 0;    // when `phase` became current
    Gmac current, spare;
  };
  KeySource source;
  uint32_t lane;
  std::vector<Sender> senders;

  State(std::string_view job, const JobKey& key, const ViewHash& view, std::span<const ViewMember> members,
        uint32_t lane_index)
      : source(job, key, view), lane(lane_index) {
    senders.reserve(members.size());
    for (const ViewMember& member : members) {
      const DataKey first = key_of(senders.size(), member.join_nonce, 0);
      senders.push_back({.join_nonce = member.join_nonce, .current = Gmac(first), .spare = Gmac(first)});
    }
  }

  DataKey key_of(size_t sender, const Nonce128& join_nonce, uint32_t phase) const {
    DataKey key;
    source.derive(static_cast<uint16_t>(sender), join_nonce, phase, &key);
    return key;
  }
};

Opener::Opener(Sealing sealing, std::string_view job, const JobKey& key, const ViewHash& view,
               std::span<const ViewMember> members, uint32_t lane) {
  if (sealing != Sealing::kNone) state_ = std::make_unique<State>(job, key, view, members, lane);
}
Opener::~Opener() = default;

bool Opener::open(uint16_t sender, uint64_t counter, std::span<const std::byte> header,
                  std::span<const std::byte> payload, std::span<const std::byte> tag, int64_t now_us) {
  if (!state_) return true;
  if (sender >= state_->senders.size() || tag.size() != kTagBytes) return false;
  State::Sender& from = state_->senders[sender];
  const uint64_t phase = counter >> kPhaseShift;

  Gmac* gmac = &from.current;
  if (phase != from.phase) {
    // The spare context holds p-1 for 10 s after a change, else p+1 once somebody asked for it. Two changes
    // within 10 s would take 2^32 packets, and a forged p+1 must not cost a derivation per packet, nor throw
    // out p-1.
    const bool old_lives = from.spare_phase < from.phase && now_us - from.changed_us < kOldPhaseUs;
    if (phase != uint64_t{from.phase} + 1 && !(old_lives && phase == from.spare_phase)) return false;
    if (phase > from.phase) {
      if (old_lives) return false;
      if (from.spare_phase != phase) {
        from.spare.rekey(state_->key_of(sender, from.join_nonce, static_cast<uint32_t>(phase)));
        from.spare_phase = static_cast<uint32_t>(phase);
      }
    }
    gmac = &from.spare;
  }

  std::array<std::byte, kTagBytes> right;
  gmac->compute(state_->lane, counter, header, payload, right.data());
  if (!tags_equal(right, tag)) return false;
  if (phase > from.phase) {
    std::swap(from.current, from.spare);
    std::swap(from.phase, from.spare_phase);
    from.changed_us = now_us;
  }
  return true;
}

}  // namespace sluice::wire
