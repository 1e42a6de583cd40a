#include "daemon/control/settings.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include "base/unique_fd.h"
#include "config/units.h"
#include "transport/port/endpoint.h"
#include "transport/wire/packet.h"

namespace sluice::daemon {
namespace {

Error invalid(std::string message) { return {EINVAL, std::move(message)}; }

uint64_t fnv1a(uint64_t hash, const void* data, size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ from[i]) * 0x100000001b3ULL;
  return hash;
}

std::vector<uint32_t> ranks_of(const std::vector<uint32_t>& node_of_rank, uint32_t node) {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < node_of_rank.size(); ++rank) {
    if (node_of_rank[rank] == node) ranks.push_back(rank);
  }
  return ranks;
}

const config::PeerGroup* find_group(const config::Config& config, const std::string& job) {
  const config::PeerGroup* any = nullptr;
  for (const config::PeerGroup& group : config.peers) {
    for (const std::string& name : group.jobs) {
      if (name == job) return &group;
      if (name == "*") any = &group;
    }
  }
  return any;
}

// No socket of ours reaches an address of the other family.
Result<void> same_family(const port::Endpoint& endpoint, const std::string& text, const NodeFacts& facts) {
  if (port::is_ipv4(endpoint) == port::is_ipv4(facts.endpoint)) return {};
  return invalid(fmt::format(
      "this node is at {}, another at {}: one is IPv4, the other IPv6; set transport.bind so that "
      "all nodes are of one family",
      facts.endpoint_text, text));
}

}  // namespace

const char* sealing_name(wire::Sealing sealing) { return sealing == wire::Sealing::kNone ? "none" : "auth"; }

Result<Membership> membership_of_view(ipc::View view, const NodeFacts& facts,
                                      const ipc::JoinNonce& own_nonce) {
  Membership membership;
  bool found = false;
  for (uint32_t node = 0; node < view.nodes.size(); ++node) {
    auto endpoint = port::parse_endpoint(view.nodes[node].endpoint);
    if (!endpoint) {
      return invalid(fmt::format("the view's node {} has the address '{}': {}", node,
                                 view.nodes[node].endpoint, endpoint.error().message));
    }
    // Lane l is at port + l, and must not wrap.
    if (endpoint->port == 0 || endpoint->port + view.lanes - 1 > 65'535) {
      return invalid(fmt::format("the view's node {} has port {}, too high for {} lanes", node,
                                 endpoint->port, view.lanes));
    }
    if (auto same = same_family(*endpoint, view.nodes[node].endpoint, facts); !same.ok()) return same.error();
    membership.endpoints.push_back(*endpoint);
    if (view.nodes[node].join_nonce == own_nonce) {
      membership.self = node;
      found = true;
    }
  }
  if (!found)
    return invalid("the view does not have this node's join nonce: it is of another join; get new cards");
  if (view.nodes[membership.self].endpoint != facts.endpoint_text) {
    return invalid(fmt::format("the view has this node at {}, it is at {}",
                               view.nodes[membership.self].endpoint, facts.endpoint_text));
  }
  if (view.lanes > facts.lanes) {
    return invalid(fmt::format("the view has {} lanes, this node {}", view.lanes, facts.lanes));
  }
  membership.local_ranks = ranks_of(view.node_of_rank, membership.self);
  membership.view = std::move(view);
  return membership;
}

Result<Membership> membership_of_config(const config::Config& config, const std::string& job,
                                        uint32_t world_size, const NodeFacts& facts,
                                        const ipc::JoinNonce& own_nonce) {
  const config::PeerGroup* group = find_group(config, job);
  if (group == nullptr) {
    return invalid(fmt::format("job '{}' came without a view, and `peers:` has no entry for it", job));
  }
  Membership membership;
  membership.from_config = true;
  bool found = false;
  std::vector<std::string> addresses;
  for (const config::PeerGroup::Node& node : group->nodes) {
    auto endpoint = port::parse_endpoint(node.address);
    if (!endpoint) return invalid(fmt::format("{}: {}", node.where, endpoint.error().message));
    if (auto same = same_family(*endpoint, node.address, facts); !same.ok()) return same.error();
    const auto index = static_cast<uint32_t>(membership.endpoints.size());
    if (*endpoint == facts.endpoint) {
      membership.self = index;
      found = true;
    }
    membership.endpoints.push_back(*endpoint);
    membership.view.nodes.push_back({{}, node.address, ""});
    membership.view.node_of_rank.insert(membership.view.node_of_rank.end(), node.ranks, index);
    addresses.push_back(node.address);
  }
  if (!found) {
    return invalid(fmt::format("{} does not list this node ({}) but {}", group->where, facts.endpoint_text,
                               fmt::join(addresses, ", ")));
  }
  if (membership.view.node_of_rank.size() != world_size) {
    return invalid(fmt::format("{} lists {} ranks, the client says {}", group->where,
                               membership.view.node_of_rank.size(), world_size));
  }
  membership.view.lanes = static_cast<uint16_t>(facts.lanes);
  membership.view.payload = static_cast<uint16_t>(wire::payload_for_datagram(facts.largest_datagram));
  membership.view.nodes[membership.self].join_nonce = own_nonce;
  membership.local_ranks = ranks_of(membership.view.node_of_rank, membership.self);
  return membership;
}

Result<wire::JobKey> load_key(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (!fd)
    return Error{errno, fmt::format("security.key_file: cannot open {}: {}", path, std::strerror(errno))};
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    return invalid(fmt::format("security.key_file: {} is not a file", path));
  }
  if ((status.st_mode & 0077) != 0) {
    return Error{EPERM, fmt::format("security.key_file: others may read {} (mode {:04o}); chmod 0400 it",
                                    path, status.st_mode & 07777U)};
  }
  Secret<128> text;
  const ssize_t length = ::read(fd.get(), text.data(), text.size());
  if (length < 0)
    return Error{errno, fmt::format("security.key_file: cannot read {}: {}", path, std::strerror(errno))};
  std::string_view bytes(reinterpret_cast<const char*>(text.data()), static_cast<size_t>(length));
  wire::JobKey key{};
  if (bytes.size() == key.size()) {
    std::copy(bytes.begin(), bytes.end(), key.begin());
    return key;
  }
  while (!bytes.empty() && std::isspace(static_cast<unsigned char>(bytes.back())) != 0)
    bytes.remove_suffix(1);
  const bool hexadecimal =
      bytes.size() == 2 * key.size() &&
      std::all_of(bytes.begin(), bytes.end(), [](unsigned char c) { return std::isxdigit(c) != 0; });
  if (!hexadecimal) {
    return invalid(
        fmt::format("security.key_file: {} holds neither 32 bytes nor 64 hexadecimal digits", path));
  }
  const auto digit = [](char c) { return static_cast<uint8_t>(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10); };
  for (size_t i = 0; i < key.size(); ++i) {
    key[i] = static_cast<uint8_t>(digit(bytes[2 * i]) << 4 | digit(bytes[2 * i + 1]));
  }
  return key;
}

exchange::Settings make_settings(const config::Config& config, const NodeFacts& facts, const std::string& job,
                                 const Membership& membership, const wire::JobKey& key,
                                 const ipc::Message& request) {
  exchange::Settings settings;
  settings.job = job;
  settings.key = key;
  settings.sealing = facts.sealing;
  settings.generation = membership.view.generation;
  for (const ipc::View::Node& node : membership.view.nodes) {
    settings.members.push_back({node.join_nonce});
    settings.node_names.push_back(node.name.empty() ? node.endpoint : node.name + " at " + node.endpoint);
  }
  settings.node_of_rank = membership.view.node_of_rank;
  settings.self = membership.self;
  settings.lanes = membership.view.lanes;
  settings.payload = membership.view.payload;
  const auto& exchange = config.exchange;
  settings.adaptive = request.deadline_us == 0 && exchange.deadline == 0;
  settings.hard_deadline = request.deadline_us != 0 ? request.deadline_us
                           : settings.adaptive      ? exchange.hard_deadline_max
                                                    : exchange.deadline;
  settings.hard_deadline_min = std::min(exchange.hard_deadline_min, settings.hard_deadline);
  settings.warmup_ops = exchange.warmup_ops;
  settings.h_factor = exchange.h_factor;
  settings.link_bits_per_second =
      config.transport.link_rate != 0 ? config.transport.link_rate : facts.link_bits;
  settings.carry_over = exchange.carry_over;
  settings.carry_max_ops = exchange.carry_max_ops;
  settings.carry_max_norm = exchange.carry_max_norm;
  // These concern this node only, and need not be the same on all.
  settings.on_incomplete = exchange.on_incomplete == config::OnIncomplete::kCorrect
                               ? exchange::OnIncomplete::kCorrect
                               : exchange::OnIncomplete::kResync;
  settings.correction_bytes = exchange.correction_bytes;
  settings.fill_own = exchange.fill == config::Fill::kOwn;
  settings.op_timeout = exchange.op_timeout;
  settings.rank_timeout = exchange.rank_timeout;
  // A ping for everybody every `peer_interval` is a load that grows with the nodes (protocol, section 2).
  settings.peer_interval =
      std::max<Micros>(exchange.peer_interval, 1'000 * static_cast<Micros>(settings.members.size()));
  settings.peer_timeout = exchange.peer_timeout;
  settings.pull_patience = exchange.pull_patience;
  settings.min_contribution = exchange.min_contribution;
  settings.max_lag = exchange.max_lag;
  settings.incast = exchange.incast;
  settings.flow_window = static_cast<uint32_t>(exchange.flow_window);
  settings.flow_window_min = static_cast<uint32_t>(exchange.flow_window_min);
  // Half of what the kernel granted is payload; the rest is its bookkeeping (2,304 bytes for a datagram of 1,500).
  settings.receive_budget =
      static_cast<uint32_t>(std::clamp<uint64_t>(facts.receive_buffer / 2, 64 << 10, 64 << 20));
  settings.max_op_bytes = request.max_op_bytes;
  settings.pool_bytes = config.memory.job_pool;
  return settings;
}

std::string common_settings(const exchange::Settings& settings) {
  const std::string text = fmt::format(
      "deadline={} op_timeout={} pull_patience={} min_contribution={} max_lag={} max_op_bytes={} "
      "carry_over={} "
      "carry_max_ops={}",
      settings.adaptive ? "auto" : config::format_duration(settings.hard_deadline),
      config::format_duration(settings.op_timeout), settings.pull_patience, settings.min_contribution,
      settings.max_lag, config::format_bytes(settings.max_op_bytes), settings.carry_over,
      settings.carry_max_ops == 0 ? "auto" : fmt::format("{}", settings.carry_max_ops));
  if (!settings.adaptive) return text;
  // Every node makes the policy of the same numbers (protocol, section 10).
  return text + fmt::format(" hard_deadline_max={} hard_deadline_min={} warmup_ops={} h_factor={}",
                            config::format_duration(settings.hard_deadline),
                            config::format_duration(settings.hard_deadline_min), settings.warmup_ops,
                            settings.h_factor);
}

uint64_t config_digest(const exchange::Settings& settings) {
  const std::string text = common_settings(settings);
  uint64_t hash = fnv1a(0xcbf29ce484222325ULL, text.data(), text.size());
  return fnv1a(hash, settings.node_of_rank.data(), settings.node_of_rank.size() * sizeof(uint32_t));
}

}  // namespace sluice::daemon
