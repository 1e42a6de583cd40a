// A datagram as it comes from the network, through the first checks, the tag and the replay window.
//
// Input: one byte of options (bit 0: sealing is not `none`; bit 1: give it a right tag first, so that what lies behind
// the tag is reached), then the datagram.
#include <array>

#include "base/assert.h"
#include "tests/fuzz/fuzz_input.h"
#include "transport/wire/packet.h"
#include "transport/wire/seal.h"

namespace sluice::wire {
namespace {

constexpr uint16_t kNodes = 3;

struct Job {
  JobKey key{};
  std::vector<ViewMember> members{kNodes};
  ViewHash view = view_hash("fuzz", 1, members, {}, 1, 1344);
};
const Job& job() {
  static const Job the_job;
  return the_job;
}

// The tag that sender and counter demand; false where no Sealer can make one.
bool seal_again(std::vector<std::byte>& datagram) {
  Header header;
  std::memcpy(&header, datagram.data(), sizeof(header));
  if (header.sender >= kNodes || header.counter == 0 || header.counter > 1000) return false;
  Sealer sealer(Sealing::kAuth, "fuzz", job().key, job().view, header.sender,
                job().members[header.sender].join_nonce, 0);
  while (sealer.next_counter() < header.counter) {
  }
  const std::span<std::byte> all(datagram);
  sealer.seal(all.first(kHeaderBytes), all.subspan(kHeaderBytes, all.size() - kHeaderBytes - kTagBytes),
              header.counter, datagram.data() + datagram.size() - kTagBytes);
  return true;
}

// Every payload is read as every type: a type is only a byte of the header.
template <typename T>
void read_as(std::span<const std::byte> payload) {
  T value;
  SLUICE_ASSERT(read_payload(payload, &value) == (payload.size() >= sizeof(T)));
}

void run(FuzzInput input) {
  const auto options = input.take<uint8_t>();
  const bool tagged = (options & 1) != 0;
  std::vector<std::byte> datagram = input.rest();
  PacketView packet;
  if (parse(datagram, tagged, &packet) != Drop::kNone) return;
  SLUICE_ASSERT(packet.header_bytes.size() + packet.payload.size() + packet.tag.size() == datagram.size());
  SLUICE_ASSERT(packet.tag.size() == (tagged ? kTagBytes : 0));
  SLUICE_ASSERT(type_name(static_cast<Type>(packet.header.type)) != nullptr);
  SLUICE_ASSERT(packet.header.block < kMaxBlocks && packet.header.total < kMaxBlocks);
  read_as<Announce>(packet.payload);
  read_as<Request>(packet.payload);
  read_as<Feedback>(packet.payload);
  read_as<Ping>(packet.payload);
  read_as<Gone>(packet.payload);
  read_as<Abort>(packet.payload);
  read_as<Hello>(packet.payload);
  if (!tagged) return;

  const bool sealed = (options & 2) != 0 && seal_again(datagram);
  Opener opener(Sealing::kAuth, "fuzz", job().key, job().view, job().members, 0);
  const auto opens = [&] {
    return opener.open(packet.header.sender, packet.header.counter, packet.header_bytes, packet.payload,
                       packet.tag, 0);
  };
  const bool good = opens();
  SLUICE_ASSERT(good || !sealed);
  if (!good) return;
  ReplayWindow window;
  SLUICE_ASSERT(window.accept(packet.header.counter) == (packet.header.counter != 0));
  SLUICE_ASSERT(!window.accept(packet.header.counter));
  // One bit elsewhere, chosen by the input, and it opens no more.
  const size_t bit = (packet.header.stamp ^ packet.header.op_seq) % (datagram.size() * 8);
  datagram[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  SLUICE_ASSERT(!opens());
}

}  // namespace
}  // namespace sluice::wire

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sluice::wire::run(sluice::FuzzInput(data, size));
  return 0;
}
