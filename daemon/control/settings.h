// From the configuration and what clients ask for to what the exchange protocol runs with. Control thread.
#pragma once

#include <string>
#include <vector>

#include "base/ipc/layout.h"
#include "base/ipc/view_blob.h"
#include "base/result.h"
#include "config/config.h"
#include "daemon/control/facts.h"
#include "transport/exchange/join.h"
#include "transport/exchange/lane.h"

namespace sluice::daemon {

// Who is in a job: from the clients' view, or from `peers:`.
struct Membership {
  bool from_config = false;
  ipc::View view;                         // join nonces of other nodes are unknown when from_config
  std::vector<port::Endpoint> endpoints;  // lane 0 of each node
  uint32_t self = 0;
  std::vector<uint32_t> local_ranks;  // of this node, ascending
};

// The membership that a client's view describes, checked against this node. Errors: code EINVAL.
Result<Membership> membership_of_view(ipc::View view, const NodeFacts& facts,
                                      const ipc::JoinNonce& own_nonce);
// The one that `peers:` has for the job; `own_nonce` is put in place of this node's.
Result<Membership> membership_of_config(const config::Config& config, const std::string& job,
                                        uint32_t world_size, const NodeFacts& facts,
                                        const ipc::JoinNonce& own_nonce);

// 32 bytes, or 64 hexadecimal digits. Refuses files that others can read, and says so.
Result<wire::JobKey> load_key(const std::string& path);

// Settings of lane 0 before the handshake: lanes and payload are upper bounds, other nodes' nonces may be missing.
exchange::Settings make_settings(const config::Config& config, const NodeFacts& facts, const std::string& job,
                                 const Membership& membership, const wire::JobKey& key,
                                 const ipc::Message& request);

// What must be the same on all nodes, as a line for people, and a digest of it for HELLO.
std::string common_settings(const exchange::Settings& settings);
uint64_t config_digest(const exchange::Settings& settings);

}  // namespace sluice::daemon
