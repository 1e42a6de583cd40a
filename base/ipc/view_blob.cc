#include "base/ipc/view_blob.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <set>
#include <string_view>

namespace sluice::ipc {
namespace {

static_assert(std::endian::native == std::endian::little,
              "views and cards are little-endian as they lie in memory");

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

Error bad(const std::string& what) { return Error{EINVAL, "the view of the job is wrong: " + what}; }

size_t blob_size(uint32_t nodes, uint32_t ranks) {
  return sizeof(ViewHeader) + size_t{nodes} * sizeof(ViewNode) + size_t{ranks} * sizeof(uint32_t);
}
constexpr size_t kMaxBlobSize =
    sizeof(ViewHeader) + kMaxNodes * sizeof(ViewNode) + kMaxRanks * sizeof(uint32_t);

// The text of a field that must be terminated and zero behind its end (canonical bytes). False when it is
// not.
bool take_text(const char* field, size_t size, std::string* text) {
  const size_t length = ::strnlen(field, size);
  if (length == size || !std::all_of(field + length, field + size, [](char c) { return c == '\0'; }))
    return false;
  text->assign(field, length);
  return true;
}

bool printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 0x7F; });
}

std::string number(uint64_t value) { return std::to_string(value); }

}  // namespace

uint32_t View::ranks_of(uint32_t node) const {
  return static_cast<uint32_t>(std::count(node_of_rank.begin(), node_of_rank.end(), node));
}

Result<void> check_view(const View& view) {
  if (view.nodes.empty() || view.nodes.size() > kMaxNodes) {
    return bad(number(view.nodes.size()) + " nodes; 1 to " + number(kMaxNodes) + " are possible");
  }
  if (view.node_of_rank.empty() || view.node_of_rank.size() > kMaxRanks) {
    return bad(number(view.node_of_rank.size()) + " ranks; 1 to " + number(kMaxRanks) + " are possible");
  }
  if (view.lanes == 0 || view.lanes > kMaxLanes) {
    return bad(number(view.lanes) + " lanes; 1 to " + number(kMaxLanes) + " are possible");
  }
  if (!valid_payload(view.payload)) return bad("payload of " + number(view.payload) + " bytes");
  std::set<std::string_view> endpoints;
  for (size_t i = 0; i < view.nodes.size(); ++i) {
    const std::string& endpoint = view.nodes[i].endpoint;
    if (endpoint.empty() || endpoint.size() >= sizeof(ViewNode::endpoint) || !printable(endpoint)) {
      return bad("node " + number(i) + " has no usable endpoint");
    }
    const std::string& name = view.nodes[i].name;
    if (name.size() >= sizeof(ViewNode::name) || !printable(name)) {
      return bad("node " + number(i) + " has no usable name");
    }
    if (!endpoints.insert(endpoint).second) return bad("two nodes have the endpoint " + endpoint);
  }
  uint32_t seen = 0;  // nodes 0 .. seen-1 have had their lowest rank
  for (size_t rank = 0; rank < view.node_of_rank.size(); ++rank) {
    const uint32_t node = view.node_of_rank[rank];
    if (node > seen || node >= view.nodes.size()) {
      return bad("rank " + number(rank) + " is said to be on node " + number(node) +
                 "; nodes must stand in the order of their lowest rank");
    }
    if (node == seen) ++seen;
  }
  if (seen != view.nodes.size()) return bad("node " + number(seen) + " has no rank");
  return {};
}

Result<UniqueFd> encode_view(const View& view) {
  if (auto checked = check_view(view); !checked.ok()) return checked.error();
  const auto nodes = static_cast<uint32_t>(view.nodes.size());
  const auto ranks = static_cast<uint32_t>(view.node_of_rank.size());
  std::vector<std::byte> bytes(blob_size(nodes, ranks));
  const ViewHeader header{view.generation, nodes, ranks, view.lanes, view.payload};
  std::byte* to = bytes.data();
  std::memcpy(to, &header, sizeof(header));
  to += sizeof(header);
  for (const View::Node& node : view.nodes) {
    ViewNode record;
    std::copy(node.join_nonce.begin(), node.join_nonce.end(), record.join_nonce);
    std::memcpy(record.endpoint, node.endpoint.data(), node.endpoint.size());
    std::memcpy(record.name, node.name.data(), node.name.size());
    std::memcpy(to, &record, sizeof(record));
    to += sizeof(record);
  }
  std::memcpy(to, view.node_of_rank.data(), ranks * sizeof(uint32_t));

  UniqueFd fd(::memfd_create("sluice-view", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd)
    return Error{errno, std::string("cannot create shared memory for the view: ") + std::strerror(errno)};
  const ssize_t written = ::pwrite(fd.get(), bytes.data(), bytes.size(), 0);
  if (written != static_cast<ssize_t>(bytes.size())) {
    const int code = written < 0 ? errno : ENOSPC;
    return Error{code, std::string("cannot write the view to shared memory: ") + std::strerror(code)};
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) {
    return Error{errno, std::string("cannot seal the view: ") + std::strerror(errno)};
  }
  return fd;
}

Result<View> decode_view(int fd) {
  // Seals exist on memfds only: neither a pipe nor a file of a slow or hostile file system can stop the
  // reader here.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return bad("it is not a sealed memfd");
  struct stat status {};
  if (::fstat(fd, &status) != 0) return bad(std::string("fstat: ") + std::strerror(errno));
  if (status.st_size < static_cast<off_t>(sizeof(ViewHeader)) ||
      status.st_size > static_cast<off_t>(kMaxBlobSize)) {
    return bad(number(static_cast<uint64_t>(status.st_size)) + " bytes cannot be a view");
  }
  std::vector<std::byte> bytes(static_cast<size_t>(status.st_size));
  const ssize_t length = ::pread(fd, bytes.data(), bytes.size(), 0);
  if (length != static_cast<ssize_t>(bytes.size())) return bad("it could not be read in full");
  return decode_view_bytes(bytes);
}

Result<View> decode_view_bytes(const std::vector<std::byte>& bytes) {
  if (bytes.size() < sizeof(ViewHeader)) return bad(number(bytes.size()) + " bytes cannot be a view");
  ViewHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.nodes == 0 || header.ranks == 0) return bad("it has no node or no rank");
  if (header.nodes > kMaxNodes || header.ranks > kMaxRanks ||
      bytes.size() != blob_size(header.nodes, header.ranks)) {
    return bad(number(bytes.size()) + " bytes do not fit " + number(header.nodes) + " nodes and " +
               number(header.ranks) + " ranks");
  }
  View view;
  view.generation = header.generation;
  view.lanes = header.lanes;
  view.payload = header.payload;
  const std::byte* from = bytes.data() + sizeof(header);
  view.nodes.resize(header.nodes);
  for (size_t i = 0; i < view.nodes.size(); ++i) {
    ViewNode record;
    std::memcpy(&record, from, sizeof(record));
    from += sizeof(record);
    std::copy(std::begin(record.join_nonce), std::end(record.join_nonce), view.nodes[i].join_nonce.begin());
    if (!take_text(record.endpoint, sizeof(record.endpoint), &view.nodes[i].endpoint)) {
      return bad("node " + number(i) + " has no usable endpoint");
    }
    if (!take_text(record.name, sizeof(record.name), &view.nodes[i].name)) {
      return bad("node " + number(i) + " has no usable name");
    }
  }
  view.node_of_rank.resize(header.ranks);
  std::memcpy(view.node_of_rank.data(), from, header.ranks * sizeof(uint32_t));
  if (auto checked = check_view(view); !checked.ok()) return checked.error();
  return view;
}

}  // namespace sluice::ipc
