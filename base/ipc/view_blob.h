// The view of a job as its clients agreed on it through their own rendezvous, and how it travels: JOIN
// carries a sealed memfd with ViewHeader, the ViewNodes and the node of each rank (layout.h). The bytes of a
// view are canonical: two clients with the same view send the same bytes.
//
// Any thread. encode_view is the client's, decode_view the daemon's: it trusts nothing in the descriptor.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/ipc/layout.h"
#include "base/result.h"
#include "base/unique_fd.h"

namespace sluice::ipc {

inline constexpr uint32_t kMaxNodes =
    1024;  // what the protocol is designed and tested for (protocol, section 17)
inline constexpr uint32_t kMaxRanks =
    65'535;  // `ranks` in the packet header has 16 bits (protocol, section 14)
// Payload sizes are multiples of 64 (protocol, section 14); those of datagrams of 256 bytes are the smallest that anything
// is computed with (wire::payload_for_datagram).
inline constexpr uint16_t kMinPayload = 192;
constexpr bool valid_payload(uint32_t bytes) {
  return bytes >= kMinPayload && bytes <= UINT16_MAX && bytes % 64 == 0;
}

using JoinNonce = std::array<uint8_t, 16>;

struct View {
  struct Node {
    JoinNonce join_nonce{};
    std::string endpoint;  // "ip:port" of lane 0, 1-63 printable characters
    std::string name;      // for people: 0-63 printable characters; enters no hash
    bool operator==(const Node&) const = default;
  };
  uint32_t generation = 0;
  uint16_t lanes = 0;                  // 1 .. kMaxLanes: the smallest of all nodes
  uint16_t payload = 0;                // bytes of one datagram's payload: the smallest of all nodes
  std::vector<Node> nodes;             // in the order of the lowest rank of each
  std::vector<uint32_t> node_of_rank;  // index into `nodes`, one per rank
  bool operator==(const View&) const = default;

  uint32_t ranks_of(uint32_t node) const;
};

// Checks everything that makes a view usable: counts within the limits above, endpoints printable and no two
// alike, every node with at least one rank, nodes in the order of their lowest rank. The error names the
// first fault.
Result<void> check_view(const View& view);

// A sealed memfd with the view, which passes check_view().
Result<UniqueFd> encode_view(const View& view);

// Reads a view from a descriptor that a client sent: must be a memfd sealed against shrinking, growing and
// writing, of exactly the size that its header gives; copied first, then checked in full. The code of every
// refusal is EINVAL.
Result<View> decode_view(int fd);

// The same from bytes, for tests and fuzzing.
Result<View> decode_view_bytes(const std::vector<std::byte>& bytes);

}  // namespace sluice::ipc
