// Keys and tags of packets (protocol, section 2), by OpenSSL 3.
//
// One key per (job, view, sender, phase), known to every node of the job: a packet is sealed once for all receivers,
// and any member can forge another member (the threat model says so). The nonce is (lane, counter); a counter is used
// once per sender and lane and is never reset within a view. After construction nothing is allocated per packet (a new
// phase, once in 2^32 packets or 24 h, derives a key, for which OpenSSL allocates a little). One Sealer and one Opener
// belong to one lane. An Opener takes 2.5 KB per node.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/secret.h"

namespace sluice::wire {

enum class Sealing : uint8_t {
  kNone = 0,  // no tag; refused on routable addresses unless `insecure: true`
  kAuth = 1,  // AES-128-GMAC over header and payload (default)
};

using JobKey = Secret<32>;
using Nonce128 = std::array<uint8_t, 16>;
using ViewHash = std::array<uint8_t, 32>;

struct ViewMember {
  Nonce128 join_nonce{};
};

// SHA-256 over job name and view: generation, ordered members' join nonces, lanes, payload size, ranks per node.
ViewHash view_hash(std::string_view job, uint64_t generation, std::span<const ViewMember> members,
                   std::span<const uint32_t> node_of_rank, uint32_t lanes, uint32_t payload);
// First 32 bits of the hash, little-endian; what every packet carries.
uint32_t epoch_of(const ViewHash& hash);
// The lookup key of a job: first 32 bits of SHA-256 over its name.
uint32_t job_id(std::string_view job);
// HKDF-Extract(salt = job + "sluice1", key) then Expand for the control key (HELLO).
Secret<32> control_key(std::string_view job, const JobKey& key);
// HMAC-SHA-256 cut to 16 bytes, for HELLO and HELLO_ACK.
std::array<std::byte, 16> control_tag(const std::array<uint8_t, 32>& key, std::span<const std::byte> header,
                                      std::span<const std::byte> payload);
// Equal-time comparison.
bool tags_equal(std::span<const std::byte> a, std::span<const std::byte> b);

// Seals what one node sends on one lane.
class Sealer {
 public:
  Sealer(Sealing sealing, std::string_view job, const JobKey& key, const ViewHash& view, uint16_t sender,
         const Nonce128& join_nonce, uint32_t lane);
  ~Sealer();
  Sealer(const Sealer&) = delete;
  Sealer& operator=(const Sealer&) = delete;

  // A new counter: 1, 2, 3 ... Put it into the header before seal().
  uint64_t next_counter() { return ++counter_; }
  // The next counter will be the first of a new phase, under a new key. The lane calls it before a packet when 24 h
  // have passed since the last change; an idle lane so moves by one phase only, which its receivers can follow.
  void next_phase();
  // Tag over header and payload under the header's counter. Counters are sealed in the order in which next_counter()
  // gave them, each at most once (asserted); one may be left out.
  void seal(std::span<const std::byte> header, std::span<const std::byte> payload, uint64_t counter,
            std::byte* tag);

 private:
  struct State;
  std::unique_ptr<State> state_;  // null: sealing is `none`
  uint64_t counter_ = 0;          // given out last
  uint64_t sealed_ = 0;           // sealed last
};

// Checks what all nodes of a view send on one lane.
class Opener {
 public:
  Opener(Sealing sealing, std::string_view job, const JobKey& key, const ViewHash& view,
         std::span<const ViewMember> members, uint32_t lane);
  ~Opener();
  Opener(const Opener&) = delete;
  Opener& operator=(const Opener&) = delete;

  // True when the tag is right, or sealing is `none`. `now_us` (monotonic) ages the previous phase's key.
  bool open(uint16_t sender, uint64_t counter, std::span<const std::byte> header,
            std::span<const std::byte> payload, std::span<const std::byte> tag, int64_t now_us);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Sliding window over the counters of control packets of one (sender, lane), RFC 6479 as in wireguard-go: 8,128 wide.
class ReplayWindow {
 public:
  static constexpr uint64_t kWidth = 8128;
  // False: seen before or too old. Call only after the tag was verified.
  bool accept(uint64_t counter);
  // As accept, but changes nothing: the cheap test before the tag.
  bool would_accept(uint64_t counter) const;

 private:
  std::array<uint64_t, (kWidth + 64) / 64> bits_{};
  uint64_t newest_ = 0;
};

}  // namespace sluice::wire
