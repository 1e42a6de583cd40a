#include "base/ipc/card.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>

namespace sluice::ipc {
namespace {

// As it lies in the card, little-endian (view_blob.cc asserts that the machine is).
struct PackedCard {
  uint32_t magic = 0;
  uint32_t abi_version = 0;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  uint16_t lanes = 0;
  uint16_t payload = 0;
  uint32_t version = 0;
  uint8_t join_nonce[16] = {};
  char endpoint[64] = {};
  char name[64] = {};
  uint64_t job_hash = 0;
  uint64_t reserved = 0;  // zero
  uint64_t checksum = 0;  // FNV-1a of the bytes before it
};
static_assert(sizeof(PackedCard) == kCardBytes && offsetof(PackedCard, checksum) == kCardBytes - 8);
static_assert(sizeof(PackedCard::endpoint) == sizeof(ViewNode::endpoint));
static_assert(sizeof(PackedCard::name) == sizeof(ViewNode::name));

constexpr uint32_t kMagic = 0x31434C53;  // "SLC1"

uint64_t fnv1a(const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t hash = 14695981039346656037ULL;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 1099511628211ULL;
  return hash;
}

std::string number(uint64_t value) { return std::to_string(value); }

Error of_rank(size_t rank, const std::string& what, int code = EINVAL) {
  return Error{code, "the card of rank " + number(rank) + " is wrong: " + what};
}

}  // namespace

uint64_t hash_job_name(std::string_view job) { return fnv1a(job.data(), job.size()); }

CardBytes encode_card(const Card& card) {
  PackedCard packed;
  packed.magic = kMagic;
  packed.abi_version = kAbiVersion;
  packed.rank = card.rank;
  packed.world_size = card.world_size;
  packed.lanes = card.lanes;
  packed.payload = card.payload;
  packed.version = card.version;
  std::copy(card.join_nonce.begin(), card.join_nonce.end(), packed.join_nonce);
  std::memcpy(packed.endpoint, card.endpoint.data(),
              std::min(card.endpoint.size(), sizeof(packed.endpoint) - 1));
  std::memcpy(packed.name, card.name.data(), std::min(card.name.size(), sizeof(packed.name) - 1));
  packed.job_hash = card.job_hash;
  packed.checksum = fnv1a(&packed, offsetof(PackedCard, checksum));
  CardBytes bytes;
  std::memcpy(bytes.data(), &packed, sizeof(packed));
  return bytes;
}

Result<Card> decode_card(std::span<const std::byte, kCardBytes> bytes) {
  PackedCard packed;
  std::memcpy(&packed, bytes.data(), sizeof(packed));
  if (packed.magic != kMagic)
    return Error{EINVAL, "these are not the bytes of a card (sluice_card_get makes one)"};
  if (packed.checksum != fnv1a(&packed, offsetof(PackedCard, checksum))) {
    return Error{EINVAL, "its checksum is wrong: it was cut or changed on its way"};
  }
  if (packed.abi_version != kAbiVersion) {
    return Error{EPROTO, "it was made by libsluice with ABI version " + number(packed.abi_version) +
                             ", this one has " + number(kAbiVersion) +
                             "; install the same release on all nodes"};
  }
  if (packed.world_size == 0 || packed.world_size > kMaxRanks || packed.rank >= packed.world_size) {
    return Error{EINVAL, "rank " + number(packed.rank) + " of " + number(packed.world_size) + " ranks"};
  }
  if (packed.lanes == 0 || packed.lanes > kMaxLanes) return Error{EINVAL, number(packed.lanes) + " lanes"};
  if (!valid_payload(packed.payload)) return Error{EINVAL, "payload of " + number(packed.payload) + " bytes"};
  if (packed.endpoint[sizeof(packed.endpoint) - 1] != '\0' || packed.endpoint[0] == '\0') {
    return Error{EINVAL, "it has no endpoint"};
  }
  if (packed.name[sizeof(packed.name) - 1] != '\0') return Error{EINVAL, "the name of its node has no end"};
  Card card;
  card.rank = packed.rank;
  card.world_size = packed.world_size;
  card.lanes = packed.lanes;
  card.payload = packed.payload;
  card.version = packed.version;
  std::copy(std::begin(packed.join_nonce), std::end(packed.join_nonce), card.join_nonce.begin());
  card.endpoint = packed.endpoint;
  card.name = packed.name;
  card.job_hash = packed.job_hash;
  return card;
}

Result<View> build_view(std::string_view job, std::span<const CardBytes> cards) {
  if (cards.empty() || cards.size() > kMaxRanks) {
    return Error{EINVAL, number(cards.size()) + " cards; 1 to " + number(kMaxRanks) + " are possible"};
  }
  View view;
  view.lanes = kMaxLanes;
  view.payload = UINT16_MAX;
  view.node_of_rank.reserve(cards.size());
  struct Known {
    uint32_t node;
    size_t rank;  // the first one seen there
  };
  std::map<std::string, Known> nodes;
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    auto decoded = decode_card(cards[rank]);
    if (!decoded.ok()) return of_rank(rank, decoded.error().message, decoded.error().code);
    const Card& card = *decoded;
    if (card.rank != rank) {
      return of_rank(rank, "it is the one of rank " + number(card.rank) + "; cards must stand in rank order");
    }
    if (card.world_size != cards.size()) {
      return of_rank(rank, "it is for a job of " + number(card.world_size) + " ranks, this job has " +
                               number(cards.size()));
    }
    if (card.job_hash != hash_job_name(job)) {
      return of_rank(rank, "it is for another job than '" + std::string(job) + "'");
    }
    const auto [place, added] =
        nodes.try_emplace(card.endpoint, Known{static_cast<uint32_t>(view.nodes.size()), rank});
    if (added) {
      view.nodes.push_back({card.join_nonce, card.endpoint, card.name});
    } else if (view.nodes[place->second.node].join_nonce != card.join_nonce) {
      return of_rank(rank, "the daemon at " + card.endpoint +
                               " made it for another join than the card of rank " +
                               number(place->second.rank) +
                               " (it was restarted in between, or one card is old); get new cards on both");
    }
    view.node_of_rank.push_back(place->second.node);
    view.lanes = std::min(view.lanes, card.lanes);
    view.payload = std::min(view.payload, card.payload);
  }
  if (auto checked = check_view(view); !checked.ok()) return checked.error();
  return view;
}

}  // namespace sluice::ipc
