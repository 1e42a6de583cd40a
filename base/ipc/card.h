// A rank's card: what it tells all other ranks of its job before they join together, 192 bytes that the
// caller's own rendezvous carries (a store, MPI, a file). From the cards of all ranks each rank computes the
// same view by itself.
//
// A card holds what the node's daemon said in WELCOME. It is not secret and proves nothing: the job key does
// that. Its checksum is against accidents (cut, mixed up, of another job), not against attackers.
//
// Pure functions, any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/ipc/view_blob.h"
#include "base/result.h"

namespace sluice::ipc {

inline constexpr size_t kCardBytes = 192;
using CardBytes = std::array<std::byte, kCardBytes>;

struct Card {
  uint32_t rank = 0;
  uint32_t world_size = 0;
  uint16_t lanes = 0;    // of the rank's node
  uint16_t payload = 0;  // likewise
  uint32_t version = 0;  // of libsluice: major << 16 | minor << 8 | patch
  JoinNonce join_nonce{};
  std::string endpoint;   // "ip:port" of lane 0 of the rank's node, at most 63 characters
  std::string name;       // of the rank's node, for people; at most 63 characters, may be empty
  uint64_t job_hash = 0;  // hash_job_name of the job
  bool operator==(const Card&) const = default;
};

uint64_t hash_job_name(std::string_view job);  // FNV-1a

CardBytes encode_card(const Card& card);
// Checks magic, ABI version, checksum, ranges and strings. Errors begin with what is wrong and name no rank
// (the caller knows whose card it is). Code: EINVAL; EPROTO when the ABI version differs.
Result<Card> decode_card(std::span<const std::byte, kCardBytes> bytes);

// The view of job `job` from the cards of all its ranks, in rank order. Ranks with the same endpoint and join
// nonce are one node; nodes stand in the order of their lowest rank; lanes and payload are the smallest of
// all. Errors name the rank whose card is wrong, and the other one when two do not fit.
Result<View> build_view(std::string_view job, std::span<const CardBytes> cards);

}  // namespace sluice::ipc
