// One node's Join against three peers that send what they like.
//
// Input: one byte of options (bit 0: nonces are learned), then steps, each { node u8, options u8, ms u8, length u16,
// datagram }. Options of a step: bit 0: address it to us, from that node; bit 1: echo our last challenge to that node;
// bit 2: a right tag. With all three the step is what a member of the job could send, with none it is noise.
#include <algorithm>
#include <array>

#include "base/assert.h"
#include "tests/fuzz/fuzz_input.h"
#include "transport/exchange/join.h"

namespace sluice::exchange {
namespace {

constexpr uint32_t kNodes = 4, kSelf = 0;

class Peers {
 public:
  explicit Peers(bool learn) : join_(settings(learn)) {}

  void step(FuzzInput& input) {
    const auto node = input.take<uint8_t>();
    const auto options = input.take<uint8_t>();
    now_ += Micros{1000} * input.take<uint8_t>();
    std::vector<std::byte> datagram = input.bytes(input.take<uint16_t>());
    if (datagram.size() >= kHelloBytes) dress(datagram, node, options);

    const Join::State before = join_.state();
    const bool hello = datagram.size() > 2 && datagram[2] == static_cast<std::byte>(wire::Type::kHello);
    const wire::Drop drop = join_.on_packet(node, datagram, now_);
    SLUICE_ASSERT(drop < wire::Drop::kCount);
    const bool tagged =
        drop == wire::Drop::kNone || drop == wire::Drop::kMismatch || drop == wire::Drop::kReplay;
    drain(tagged && hello ? datagram.size() : 0);
    if (!tagged) SLUICE_ASSERT(join_.state() == before);
    if (join_.next_timer() <= now_) join_.tick(now_);
    drain(0);
    SLUICE_ASSERT(join_.next_timer() > now_);
    SLUICE_ASSERT(!join_.text().empty());
    SLUICE_ASSERT(join_.peers().size() == kNodes - 1);
    if (before != Join::State::kJoining) SLUICE_ASSERT(join_.state() == before);
    if (join_.state() == Join::State::kFailed) SLUICE_ASSERT(!join_.fault().text().empty());
    if (join_.state() == Join::State::kFinished) {
      SLUICE_ASSERT(join_.payload() >= 448 && join_.payload() <= 8896);
      SLUICE_ASSERT(join_.lanes() >= 1 && join_.lanes() <= 2 && join_.members().size() == kNodes);
    }
  }

 private:
  static JoinSettings settings(bool learn) {
    JoinSettings s;
    s.job = "fuzz";
    s.self = kSelf;
    s.generation = 1;
    s.lanes = 2;
    s.largest_datagram = 8972;
    for (uint32_t node = 0; node < kNodes; ++node) {
      s.join_nonces.emplace_back();
      if (learn && node != kSelf) continue;
      s.join_nonces.back().emplace();
      s.join_nonces.back()->fill(static_cast<uint8_t>(node));
    }
    return s;
  }

  void dress(std::vector<std::byte>& datagram, uint8_t node, uint8_t options) {
    const std::span<std::byte> all(datagram);
    wire::Header header;
    wire::Hello hello;
    std::memcpy(&header, all.data(), sizeof(header));
    std::memcpy(&hello, all.data() + sizeof(header), sizeof(hello));
    if ((options & 1) != 0) {
      header.magic = wire::kMagic;
      header.job = wire::job_id("fuzz");
      header.sender = wire::kNoSender;
      header.epoch = 0;
      header.shard = kSelf;
      header.ranks = node;
    }
    if ((options & 2) != 0) {
      std::copy(offered_[node % kNodes].begin(), offered_[node % kNodes].end(), hello.echoed_challenge);
    }
    std::memcpy(all.data(), &header, sizeof(header));
    std::memcpy(all.data() + sizeof(header), &hello, sizeof(hello));
    if ((options & 4) == 0) return;
    static const auto key = wire::control_key("fuzz", {});
    const auto tag =
        wire::control_tag(key, all.first(wire::kHeaderBytes),
                          all.subspan(wire::kHeaderBytes, all.size() - wire::kHeaderBytes - wire::kTagBytes));
    std::copy(tag.begin(), tag.end(), datagram.end() - wire::kTagBytes);
  }

  // Takes what wants to leave. `answered`: bytes that came and may be answered, 0 when nothing may.
  void drain(size_t answered) {
    Join::Outgoing out;
    int answers = 0, rest = 0;
    while (join_.poll_send(now_, &out)) {
      SLUICE_ASSERT(++rest < 100);
      SLUICE_ASSERT(out.node < kNodes && out.node != kSelf && out.bytes.size() >= kHelloBytes);
      if (out.bytes[2] == static_cast<std::byte>(wire::Type::kHelloAck)) {
        SLUICE_ASSERT(++answers == 1 && out.bytes.size() <= answered);
      }
      wire::Hello hello;
      std::memcpy(&hello, out.bytes.data() + wire::kHeaderBytes, sizeof(hello));
      std::copy(std::begin(hello.own_challenge), std::end(hello.own_challenge), offered_[out.node].begin());
    }
  }

  Join join_;
  Micros now_ = 1;
  std::array<wire::Nonce128, kNodes> offered_{};  // our challenge, as each node saw it last
};

}  // namespace
}  // namespace sluice::exchange

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 64 * 1024) return 0;  // longer ones find nothing that these do not
  sluice::FuzzInput input(data, size);
  sluice::exchange::Peers peers((input.take<uint8_t>() & 1) != 0);
  while (!input.empty()) peers.step(input);
  return 0;
}
