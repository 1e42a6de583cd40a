// The view that a client sends with JOIN, and the cards from which clients make it.
//
// Input: one byte of options, then the bytes. Bit 0: they are cards of 192 bytes each, else a view as it lies in its
// memfd. Bit 1: the cards get right checksums, so that what lies behind that check is reached.
#include <unistd.h>

#include <cstring>

#include "base/assert.h"
#include "base/ipc/card.h"
#include "base/ipc/view_blob.h"
#include "tests/fuzz/fuzz_input.h"

namespace sluice::ipc {
namespace {

std::vector<std::byte> encoded(const View& view) {
  auto fd = encode_view(view);
  SLUICE_ASSERT(fd.ok());
  std::vector<std::byte> bytes(sizeof(ViewHeader) + view.nodes.size() * sizeof(ViewNode) +
                               view.node_of_rank.size() * sizeof(uint32_t));
  SLUICE_ASSERT(::pread(fd->get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  return bytes;
}

void decode(const std::vector<std::byte>& bytes) {
  auto view = decode_view_bytes(bytes);
  if (!view.ok()) {
    SLUICE_ASSERT(!view.error().message.empty());
    return;
  }
  SLUICE_ASSERT(check_view(*view).ok());
  SLUICE_ASSERT(encoded(*view) == bytes);  // canonical: one view has one form
}

void build(std::vector<std::byte> bytes, bool right_checksums) {
  std::vector<CardBytes> cards(bytes.size() / kCardBytes);
  for (size_t i = 0; i < cards.size(); ++i) {
    std::memcpy(cards[i].data(), bytes.data() + i * kCardBytes, kCardBytes);
    if (!right_checksums) continue;
    const uint64_t sum = hash_job_name({reinterpret_cast<const char*>(cards[i].data()), kCardBytes - 8});
    std::memcpy(cards[i].data() + kCardBytes - 8, &sum, sizeof(sum));
  }
  auto view = build_view("fuzz", cards);
  if (!view.ok()) {
    SLUICE_ASSERT(!view.error().message.empty());
    return;
  }
  SLUICE_ASSERT(view->node_of_rank.size() == cards.size());
  decode(encoded(*view));
}

}  // namespace
}  // namespace sluice::ipc

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t options = data[0];
  const auto* begin = reinterpret_cast<const std::byte*>(data + 1);
  std::vector<std::byte> bytes(begin, begin + (size - 1));
  if ((options & 1) != 0) {
    sluice::ipc::build(std::move(bytes), (options & 2) != 0);
  } else {
    sluice::ipc::decode(bytes);
  }
  return 0;
}
