// Layout of packets by literal bytes, the first checks, names, fingerprints.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "transport/wire/packet.h"

namespace sluice::wire {
namespace {

template <typename T>
std::vector<uint8_t> bytes_of(const T& value) {
  std::vector<uint8_t> bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

Header sample_header() {
  Header header;
  header.type = static_cast<uint8_t>(Type::kPush);
  header.flags = kFlagTail | static_cast<uint8_t>(OpClass::kConsistent) << kFlagClassShift;
  header.sender = 0x0201;
  header.lane = 3;
  header.policy = 4;
  header.job = 0x08070605;
  header.epoch = 0x0C0B0A09;
  header.op_seq = 0x800F0E0D;
  header.shard = 0x1211;
  header.elements = 0x1413;
  header.block = 0x171615;
  header.total = 0x1A1918;
  header.ranks = 0x1C1B;
  header.fingerprint = 0x201F1E1D;
  header.stamp = 0x24232221;
  header.counter = 0x2C2B2A2928272625;
  return header;
}

TEST(WirePacket, HeaderLiesAsTheProtocolSays) {
  const std::vector<uint8_t> expected = {
      0x53, 1,    6,    0x03,                          // magic, version, type, flags
      0x01, 0x02, 3,    4,                             // sender, lane, policy
      0x05, 0x06, 0x07, 0x08, 0x09, 0x0A, 0x0B, 0x0C,  // job, epoch
      0x0D, 0x0E, 0x0F, 0x80,                          // op_seq
      0x11, 0x12, 0x13, 0x14,                          // shard, elements
      0x15, 0x16, 0x17, 0x18, 0x19, 0x1A, 0x1B, 0x1C,  // block, total, ranks
      0x1D, 0x1E, 0x1F, 0x20, 0x21, 0x22, 0x23, 0x24,  // fingerprint, stamp
      0x25, 0x26, 0x27, 0x28, 0x29, 0x2A, 0x2B, 0x2C,  // counter
  };
  EXPECT_EQ(bytes_of(sample_header()), expected);
  EXPECT_EQ(sample_header().op_class(), OpClass::kConsistent);
}

TEST(WirePacket, PayloadsLieAsTheProtocolSays) {
  EXPECT_EQ(bytes_of(Announce{1, 2, 3, 4, 8.0F}),
            (std::vector<uint8_t>{1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0x41}));
  EXPECT_EQ(bytes_of(Request{1, 2}), (std::vector<uint8_t>{1, 0, 0, 0, 2, 0, 0, 0}));
  EXPECT_EQ(bytes_of(Feedback{1, 2, 3, 4}),
            (std::vector<uint8_t>{1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0}));
  EXPECT_EQ(bytes_of(Ping{1, 2, 3, 4, 5, 6, 7, 8}),
            (std::vector<uint8_t>{1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0,
                                  5, 0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0}));
  EXPECT_EQ(bytes_of(Gone{0x04030201}), (std::vector<uint8_t>{1, 2, 3, 4}));
  EXPECT_EQ(bytes_of(Abort{0x0201, 0x0403, 5, 6, 7, 0, 0x0F0E0D0C0B0A0908, 0x1716151413121110}),
            (std::vector<uint8_t>{1,  2,  3,  4,  5,  6,  7,  0,  8,  9,  10, 11,
                                  12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23}));
}

TEST(WirePacket, HelloLiesAsTheProtocolSays) {
  Hello hello;
  for (int i = 0; i < 16; ++i) {
    hello.join_nonce[i] = static_cast<uint8_t>(i);
    hello.own_challenge[i] = static_cast<uint8_t>(16 + i);
    hello.echoed_challenge[i] = static_cast<uint8_t>(32 + i);
  }
  hello.config_digest = 0x3736353433323130;
  hello.generation = 0x3F3E3D3C3B3A3938;
  hello.payload = 0x4140;
  hello.lanes = 0x42;
  hello.sealing = 0x43;
  hello.phase = 0x44;
  hello.flags = 0x45;
  hello.probe = 0x4746;
  hello.view = 0x4B4A4948;
  const std::vector<uint8_t> bytes = bytes_of(hello);
  ASSERT_EQ(bytes.size(), 80U);
  for (uint8_t i = 0; i < 76; ++i) EXPECT_EQ(bytes[i], i) << static_cast<int>(i);
  for (uint8_t i = 76; i < 80; ++i) EXPECT_EQ(bytes[i], 0);
}

TEST(WirePacket, Uint24HoldsItsRange) {
  for (uint32_t value : {0U, 1U, 0xFFU, 0x100U, 0xFFFFU, 0x10000U, 0x123456U, 0xFFFFFFU}) {
    EXPECT_EQ(static_cast<uint32_t>(Uint24(value)), value);
  }
  EXPECT_EQ(static_cast<uint32_t>(Uint24(kMaxBlocks)),
            0U);  // one too many wraps: callers check against kMaxBlocks
}

// A valid datagram of `payload` bytes.
std::vector<std::byte> datagram(size_t payload, bool tagged) {
  std::vector<std::byte> bytes(kHeaderBytes + payload + (tagged ? kTagBytes : 0));
  const Header header = sample_header();
  std::memcpy(bytes.data(), &header, sizeof(header));
  for (size_t i = kHeaderBytes; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  return bytes;
}

TEST(WirePacket, ParseFindsHeaderPayloadAndTag) {
  for (const bool tagged : {false, true}) {
    for (const size_t payload : {size_t{0}, size_t{1}, size_t{1344}, size_t{65000}}) {
      const std::vector<std::byte> bytes = datagram(payload, tagged);
      PacketView view;
      ASSERT_EQ(parse(bytes, tagged, &view), Drop::kNone);
      EXPECT_EQ(bytes_of(view.header), bytes_of(sample_header()));
      EXPECT_EQ(view.header_bytes.data(), bytes.data());
      EXPECT_EQ(view.header_bytes.size(), kHeaderBytes);
      EXPECT_EQ(view.payload.data(), bytes.data() + kHeaderBytes);
      EXPECT_EQ(view.payload.size(), payload);
      EXPECT_EQ(view.tag.data(), bytes.data() + kHeaderBytes + payload);
      EXPECT_EQ(view.tag.size(), tagged ? kTagBytes : 0);
    }
  }
}

TEST(WirePacket, ParseRefusesEveryShorterDatagram) {
  for (const bool tagged : {false, true}) {
    const std::vector<std::byte> bytes = datagram(0, tagged);
    for (size_t length = 0; length < bytes.size(); ++length) {
      // A buffer of exactly this length, so that a sanitizer sees a read beyond it.
      const std::vector<std::byte> cut(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(length));
      PacketView view;
      EXPECT_EQ(parse(cut, tagged, &view), Drop::kLength) << length;
    }
  }
}

TEST(WirePacket, ParseTriesEveryValueOfTheFirstThreeBytes) {
  for (int at = 0; at < 3; ++at) {
    for (int value = 0; value < 256; ++value) {
      std::vector<std::byte> bytes = datagram(8, true);
      bytes[at] = static_cast<std::byte>(value);
      PacketView view;
      const Drop drop = parse(bytes, true, &view);
      const Drop expected[3] = {value == kMagic ? Drop::kNone : Drop::kMagic,
                                value == kVersion ? Drop::kNone : Drop::kVersion,
                                value >= 1 && value <= 15 ? Drop::kNone : Drop::kType};
      EXPECT_EQ(drop, expected[at]) << at << " " << value;
    }
  }
}

TEST(WirePacket, ReadPayloadRefusesWhatIsTooShort) {
  const std::vector<std::byte> bytes(sizeof(Ping));
  Ping ping;
  EXPECT_TRUE(read_payload(bytes, &ping));
  EXPECT_FALSE(read_payload(std::span(bytes).first(sizeof(Ping) - 1), &ping));
  EXPECT_FALSE(read_payload({}, &ping));
}

TEST(WirePacket, NamesAreCompleteAndDistinct) {
  std::set<std::string> names;
  for (int i = 0; i < static_cast<int>(Drop::kCount); ++i) {
    const std::string name = drop_name(static_cast<Drop>(i));
    EXPECT_NE(name, "unknown") << i;
    EXPECT_TRUE(names.insert(name).second) << name;
    // It becomes the value of a Prometheus label and a word in messages.
    EXPECT_EQ(name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_"), std::string::npos) << name;
  }
  names.clear();
  for (uint8_t i = 1; i < kTypes; ++i) {
    const std::string name = type_name(static_cast<Type>(i));
    EXPECT_NE(name, "unknown") << static_cast<int>(i);
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_STREQ(type_name(static_cast<Type>(0)), "unknown");
  EXPECT_STREQ(type_name(static_cast<Type>(kTypes)), "unknown");
}

TEST(WirePacket, PayloadAndBlockSizes) {
  EXPECT_EQ(payload_for_datagram(1472), 1408U);  // 1472 - 64, already a multiple of 64
  EXPECT_EQ(payload_for_datagram(1471), 1344U);
  EXPECT_EQ(payload_for_datagram(8972), 8896U);
  EXPECT_EQ(payload_for_datagram(192), 128U);
  EXPECT_EQ(payload_for_datagram(191), 0U);
  EXPECT_EQ(payload_for_datagram(0), 0U);
  EXPECT_EQ(elements_per_block(1408, ElementType::kF32), 336U);
  EXPECT_EQ(elements_per_block(1408, ElementType::kBf16), 672U);
  for (uint32_t size = 192; size <= 65507; ++size) {
    const uint32_t payload = payload_for_datagram(size);
    ASSERT_EQ(payload % 64, 0U);
    ASSERT_LE(payload + kHeaderBytes + kTagBytes, size);
    ASSERT_GT(payload + 64 + kHeaderBytes + kTagBytes, size);
    ASSERT_LE(elements_per_block(payload, ElementType::kU8), 65535U);  // the field `elements` has 16 bits
  }
}

TEST(WirePacket, FingerprintIsFixed) {
  // Computed by an independent implementation: nodes of two builds must agree on it.
  EXPECT_EQ(fingerprint(ReduceKind::kSum, ElementType::kF32, ElementType::kF32, 0, 0), 0x238275BCU);
  EXPECT_EQ(
      fingerprint(ReduceKind::kMean, ElementType::kF32, ElementType::kBf16, 25'000'000, 0x123456789ABCDEF0),
      0xC7FAB089U);
  for (uint64_t tag = 0; tag < 1000; ++tag)
    EXPECT_EQ(tagged(fingerprint(ReduceKind::kSum, ElementType::kF32, ElementType::kF32, 9, tag)), tag != 0);
}

TEST(WirePacket, FingerprintTellsNearOpsApart) {
  std::set<uint32_t> seen;
  size_t inputs = 0;
  const auto add = [&](ReduceKind kind, ElementType type, ElementType wire, uint64_t count, uint64_t tag) {
    seen.insert(fingerprint(kind, type, wire, count, tag));
    ++inputs;
  };
  for (const ReduceKind kind : {ReduceKind::kSum, ReduceKind::kMean}) {
    for (uint8_t type = 0; type < kElementTypes; ++type) {
      for (uint8_t wire = 0; wire < kElementTypes; ++wire) {
        for (uint64_t count = 0; count < 20; ++count) {
          add(kind, static_cast<ElementType>(type), static_cast<ElementType>(wire), count, 7);
        }
      }
    }
  }
  for (int bit = 0; bit < 64; ++bit) {
    add(ReduceKind::kSum, ElementType::kF32, ElementType::kF32, uint64_t{1} << bit, 0x5555);
    add(ReduceKind::kSum, ElementType::kF32, ElementType::kF32, 1000, 0x5555 ^ uint64_t{1} << bit);
  }
  add(ReduceKind::kSum, ElementType::kF32, ElementType::kF32, 5, 9);
  add(ReduceKind::kSum, ElementType::kF32, ElementType::kF32, 9, 5);
  EXPECT_EQ(seen.size(),
            inputs);  // 2,090 values of 32 bits: one collision by chance has a probability of 1 in 2,000
}

// Each of the 128 input bits of count and tag flips each output bit about half of the time.
TEST(WirePacket, FingerprintMixesEveryBit) {
  constexpr int kTrials = 400;
  uint64_t state = 1;
  const auto next = [&state] {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return state ^ state >> 29;
  };
  for (int bit = 0; bit < 128; ++bit) {
    std::array<int, 32> flips{};
    for (int trial = 0; trial < kTrials; ++trial) {
      const uint64_t count = next(), tag = next();
      const uint64_t flip_count = bit < 64 ? uint64_t{1} << bit : 0;
      const uint64_t flip_tag = bit < 64 ? 0 : uint64_t{1} << (bit - 64);
      const uint32_t changed =
          fingerprint(ReduceKind::kSum, ElementType::kF32, ElementType::kF32, count, tag) ^
          fingerprint(ReduceKind::kSum, ElementType::kF32, ElementType::kF32, count ^ flip_count,
                      tag ^ flip_tag);
      for (int out = 1; out < 32; ++out) flips[out] += static_cast<int>(changed >> out & 1);
    }
    for (int out = 1; out < 32; ++out) {  // (bit 0: there is a tag)
      // 200 +- 6 standard deviations of 10.
      EXPECT_GT(flips[out], 140) << bit << " " << out;
      EXPECT_LT(flips[out], 260) << bit << " " << out;
    }
  }
}

}  // namespace
}  // namespace sluice::wire
