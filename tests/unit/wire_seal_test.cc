// Keys and tags: known answers, and everything that must make a tag wrong.
#include <gtest/gtest.h>
#include <openssl/crypto.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "transport/wire/derive.h"
#include "transport/wire/gmac.h"
#include "transport/wire/packet.h"
#include "transport/wire/seal.h"

// Counts what OpenSSL and C++ allocate, for the promise that a lane allocates nothing per packet.
namespace {
long g_allocations = 0;
void* counted_malloc(size_t size, const char* /*file*/, int /*line*/) {
  ++g_allocations;
  return std::malloc(size);
}
void* counted_realloc(void* memory, size_t size, const char* /*file*/, int /*line*/) {
  ++g_allocations;
  return std::realloc(memory, size);
}
void counted_free(void* memory, const char* /*file*/, int /*line*/) { std::free(memory); }
// Before main: OpenSSL refuses it after its first own allocation.
const int g_counting = CRYPTO_set_mem_functions(counted_malloc, counted_realloc, counted_free);
}  // namespace

// Not inlined: GCC would take malloc and free apart from new and delete and warn that they do not match.
[[gnu::noinline]] void* operator new(size_t size) {
  ++g_allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t /*size*/) noexcept { std::free(memory); }

namespace sluice::wire {
namespace {

std::vector<uint8_t> from_hex(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}
template <typename Bytes>
std::string to_hex(const Bytes& bytes) {
  std::string hex;
  for (const auto byte : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    hex += kDigits[static_cast<uint8_t>(byte) >> 4];
    hex += kDigits[static_cast<uint8_t>(byte) & 15];
  }
  return hex;
}
Bytes32 as_32(const std::vector<uint8_t>& bytes) {
  Bytes32 out{};
  std::memcpy(out.data(), bytes.data(), out.size());
  return out;
}
std::span<const std::byte> raw(const std::vector<uint8_t>& bytes) { return std::as_bytes(std::span(bytes)); }

// --- known answers ---

TEST(WireDerive, Rfc5869Vectors) {
  struct {
    std::string key, salt, info, prk, out;
  } const cases[] = {
      {"0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b", "000102030405060708090a0b0c", "f0f1f2f3f4f5f6f7f8f9",
       "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
       "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"},
      {"0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b", "", "",
       "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
       "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"},
  };
  for (const auto& test : cases) {
    const Bytes32 prk = hkdf_extract(from_hex(test.salt), from_hex(test.key));
    EXPECT_EQ(to_hex(prk), test.prk);
    std::vector<uint8_t> out(test.out.size() / 2);
    hkdf_expand(as_32(from_hex(test.prk)), from_hex(test.info), out);
    EXPECT_EQ(to_hex(out), test.out);
  }
}

TEST(WireDerive, Rfc4231AndFips180Vectors) {
  const std::string data = "what do ya want for nothing?";
  const std::string key = "Jefe";
  const auto part = [](const std::string& text) {
    return ByteSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  };
  const std::string expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
  EXPECT_EQ(to_hex(hmac_sha256(part(key), {part(data)})), expected);
  EXPECT_EQ(to_hex(hmac_sha256(part(key), {part(data.substr(0, 5)), {}, part(data.substr(5))})), expected);
  EXPECT_EQ(to_hex(sha256({part("a"), part("bc")})),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(WireGmac, NistVectors) {
  struct {
    std::string key, iv, aad, tag;
  } const cases[] = {
      // gcmEncryptExtIV128.rsp of NIST's CAVP: IV 96 bit, no plaintext, AAD 128 bit, count 0.
      {"77be63708971c4e240d1cb79e8d77feb", "e0e00f19fed7ba0136a797f3", "7a43ec1d9c0a5a78a0b16533a6213cab",
       "209fcc8d3675ed938e9c7166709dd946"},
      // Test case 1 of the GCM specification: everything zero, no AAD.
      {"00000000000000000000000000000000", "000000000000000000000000", "",
       "58e2fccefa7e3061367f1d57a4e7455a"},
  };
  for (const auto& test : cases) {
    DataKey key{};
    std::memcpy(key.data(), from_hex(test.key).data(), key.size());
    const std::vector<uint8_t> iv = from_hex(test.iv), aad = from_hex(test.aad);
    uint32_t lane;
    uint64_t counter;
    std::memcpy(&lane, iv.data(), 4);
    std::memcpy(&counter, iv.data() + 4, 8);
    for (size_t split = 0; split <= aad.size(); ++split) {
      Gmac gmac(key);
      std::array<std::byte, kTagBytes> tag{};
      gmac.compute(lane, counter, raw(aad).first(split), raw(aad).subspan(split), tag.data());
      EXPECT_EQ(to_hex(tag), test.tag) << split;
    }
  }
}

// --- a job of three nodes ---

struct Job {
  std::string name = "golden";
  JobKey key{};
  std::vector<ViewMember> members{3};
  std::vector<uint32_t> node_of_rank{0, 0, 1, 2};
  uint64_t generation = 7;

  Job() {
    for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(i);
    for (size_t i = 0; i < members.size(); ++i) members[i].join_nonce.fill(static_cast<uint8_t>(0xA0 + i));
  }
  ViewHash view() const { return view_hash(name, generation, members, node_of_rank, 2, 1344); }
  Sealer sealer(uint16_t sender, uint32_t lane, Sealing sealing = Sealing::kAuth) const {
    return Sealer(sealing, name, key, view(), sender, members[sender].join_nonce, lane);
  }
  Opener opener(uint32_t lane, Sealing sealing = Sealing::kAuth) const {
    return Opener(sealing, name, key, view(), members, lane);
  }
};

struct Sealed {
  Header header;
  std::vector<uint8_t> payload;
  std::array<std::byte, kTagBytes> tag{};

  std::span<const std::byte> header_bytes() const { return std::as_bytes(std::span(&header, 1)); }
  bool opens(Opener& opener, uint16_t sender, int64_t now_us = 0) const {
    return opener.open(sender, header.counter, header_bytes(), raw(payload), tag, now_us);
  }
};

Sealed make(const Job& job, Sealer& sealer, uint16_t sender, uint8_t lane, size_t payload) {
  Sealed packet;
  packet.header.type = static_cast<uint8_t>(Type::kPush);
  packet.header.flags = 3;
  packet.header.sender = sender;
  packet.header.lane = lane;
  packet.header.policy = 9;
  packet.header.job = job_id(job.name);
  packet.header.epoch = epoch_of(job.view());
  packet.header.op_seq = 0x01020304;
  packet.header.shard = 2;
  packet.header.elements = 5;
  packet.header.block = 0x030201;
  packet.header.total = 0x060504;
  packet.header.ranks = 2;
  packet.header.fingerprint = 0xCAFEF00D;
  packet.header.stamp = 0x11223344;
  packet.header.counter = sealer.next_counter();
  for (size_t i = 0; i < payload; ++i) packet.payload.push_back(static_cast<uint8_t>(i));
  sealer.seal(packet.header_bytes(), raw(packet.payload), packet.header.counter, packet.tag.data());
  return packet;
}

// Packets of another implementation (Python, hashlib and AESGCM of `cryptography`), byte by byte. If one of
// these changes, nodes of two builds no longer understand each other: that needs a new version of the
// protocol.
TEST(WireSeal, GoldenPackets) {
  const Job job;
  EXPECT_EQ(to_hex(job.view()), "dc71a7705345234d79e7c06459b0be2969476efff667d16a63bb62e53ad200ba");
  EXPECT_EQ(epoch_of(job.view()), 0x70A771DCU);
  EXPECT_EQ(job_id(job.name), 0x41DE56DDU);
  Sealer sealer = job.sealer(1, 1);
  const Sealed first = make(job, sealer, 1, 1, 20);
  EXPECT_EQ(
      to_hex(first.header_bytes()),
      "5301060301000109dd56de41dc71a770040302010200050001020304050602000df0feca443322110100000000000000");
  EXPECT_EQ(to_hex(first.tag), "3ec6a038fc87da491f5e96e60fbb19df");
  sealer.next_phase();
  for (int i = 0; i < 5; ++i) sealer.next_counter();
  const Sealed later = make(job, sealer, 1, 1, 20);
  EXPECT_EQ(later.header.counter, (uint64_t{1} << 32) + 5);
  EXPECT_EQ(to_hex(later.tag), "4452faa949d551ee54baaa6bb603de48");

  const auto control = control_key(job.name, job.key);
  EXPECT_EQ(to_hex(control), "6379336b8ad72185a919214ec713aacae4e363bf4d3623e38a13ec6cdd9755dd");
  EXPECT_EQ(to_hex(control_tag(control, first.header_bytes(), raw(first.payload))),
            "057ac07248b98a3c629bcaa06392cbc1");
}

TEST(WireSeal, EverySenderAndSizeOpens) {
  const Job job;
  for (const uint8_t lane : {0, 1}) {
    Opener opener = job.opener(lane);
    for (uint16_t sender = 0; sender < 3; ++sender) {
      Sealer sealer = job.sealer(sender, lane);
      for (const size_t payload : {0, 1, 15, 16, 17, 1344, 1408, 8896, 65000}) {
        const Sealed packet = make(job, sealer, sender, lane, payload);
        EXPECT_TRUE(packet.opens(opener, sender)) << payload;
        EXPECT_TRUE(packet.opens(opener, sender)) << "opening changes nothing; replay is another test";
      }
    }
  }
}

TEST(WireSeal, AnySingleBitFlipFails) {
  const Job job;
  Sealer sealer = job.sealer(1, 0);
  Opener opener = job.opener(0);
  const Sealed good = make(job, sealer, 1, 0, 200);
  ASSERT_TRUE(good.opens(opener, 1));
  for (size_t bit = 0; bit < kHeaderBytes * 8; ++bit) {
    Sealed bad = good;
    reinterpret_cast<uint8_t*>(&bad.header)[bit / 8] ^= 1 << bit % 8;
    EXPECT_FALSE(bad.opens(opener, 1)) << "header bit " << bit;
    // The header's own bytes alone too: same nonce, another header.
    EXPECT_FALSE(opener.open(1, good.header.counter, bad.header_bytes(), raw(good.payload), good.tag, 0));
  }
  for (size_t bit = 0; bit < good.payload.size() * 8; ++bit) {
    Sealed bad = good;
    bad.payload[bit / 8] ^= 1 << bit % 8;
    EXPECT_FALSE(bad.opens(opener, 1)) << "payload bit " << bit;
  }
  for (size_t bit = 0; bit < kTagBytes * 8; ++bit) {
    Sealed bad = good;
    bad.tag[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_FALSE(bad.opens(opener, 1)) << "tag bit " << bit;
  }
  EXPECT_TRUE(good.opens(opener, 1)) << "failed attempts change nothing";
}

TEST(WireSeal, LengthChangesFail) {
  const Job job;
  Sealer sealer = job.sealer(1, 0);
  Opener opener = job.opener(0);
  const Sealed good = make(job, sealer, 1, 0, 64);
  Sealed bad = good;
  bad.payload.pop_back();
  EXPECT_FALSE(bad.opens(opener, 1));
  bad = good;
  bad.payload.push_back(0);
  EXPECT_FALSE(bad.opens(opener, 1));
  EXPECT_FALSE(opener.open(1, good.header.counter, good.header_bytes(), raw(good.payload),
                           std::span(good.tag).first(15), 0));
  EXPECT_FALSE(opener.open(1, good.header.counter, good.header_bytes(), raw(good.payload), {}, 0));
}

TEST(WireSeal, EveryPartOfTheKeyCounts) {
  const Job job;
  Sealer sealer = job.sealer(1, 0);
  const Sealed packet = make(job, sealer, 1, 0, 64);
  const auto opens_with = [&packet](const Job& other, uint32_t lane, uint16_t sender) {
    Opener opener = other.opener(lane);
    return packet.opens(opener, sender);
  };
  ASSERT_TRUE(opens_with(job, 0, 1));
  EXPECT_FALSE(opens_with(job, 0, 0)) << "another sender";
  EXPECT_FALSE(opens_with(job, 0, 2)) << "another sender";
  EXPECT_FALSE(opens_with(job, 0, 3)) << "a sender outside of the view";
  EXPECT_FALSE(opens_with(job, 0, kNoSender)) << "a sender outside of the view";
  EXPECT_FALSE(opens_with(job, 1, 1)) << "another lane";
  Job other = job;
  other.name = "golden2";
  EXPECT_FALSE(opens_with(other, 0, 1)) << "another job name";
  other = job;
  other.key[31] ^= 1;
  EXPECT_FALSE(opens_with(other, 0, 1)) << "another job key";
  other = job;
  other.generation = 8;
  EXPECT_FALSE(opens_with(other, 0, 1)) << "the next view of the same nodes";
  other = job;
  other.members[1].join_nonce[0] ^= 1;
  EXPECT_FALSE(opens_with(other, 0, 1)) << "the sender has joined again";
  other = job;
  other.members[2].join_nonce[0] ^= 1;
  EXPECT_FALSE(opens_with(other, 0, 1)) << "another node has joined again";
  // The sender's nonce is in its key by itself, not only through the view.
  Opener same_view(Sealing::kAuth, job.name, job.key, job.view(), other.members, 0);
  EXPECT_TRUE(packet.opens(same_view, 1));
  std::vector<ViewMember> wrong = job.members;
  wrong[1].join_nonce[5] ^= 1;
  Opener wrong_nonce(Sealing::kAuth, job.name, job.key, job.view(), wrong, 0);
  EXPECT_FALSE(packet.opens(wrong_nonce, 1));
}

TEST(WireSeal, ViewHashSeesEveryField) {
  const Job job;
  const ViewHash base = job.view();
  EXPECT_EQ(base, job.view());
  std::vector<ViewHash> others;
  others.push_back(view_hash("golden2", 7, job.members, job.node_of_rank, 2, 1344));
  others.push_back(view_hash("golden", 8, job.members, job.node_of_rank, 2, 1344));
  others.push_back(view_hash("golden", 7, job.members, job.node_of_rank, 1, 1344));
  others.push_back(view_hash("golden", 7, job.members, job.node_of_rank, 2, 1408));
  others.push_back(view_hash("golden", 7, std::span(job.members).first(2), job.node_of_rank, 2, 1344));
  others.push_back(view_hash("golden", 7, job.members, std::vector<uint32_t>{0, 1, 1, 2}, 2, 1344));
  others.push_back(view_hash("golden", 7, job.members, std::vector<uint32_t>{0, 0, 1}, 2, 1344));
  std::vector<ViewMember> swapped = job.members;
  std::swap(swapped[0], swapped[1]);
  others.push_back(view_hash("golden", 7, swapped, job.node_of_rank, 2, 1344));
  for (size_t i = 0; i < others.size(); ++i) {
    EXPECT_NE(others[i], base) << i;
    for (size_t j = 0; j < i; ++j) EXPECT_NE(others[i], others[j]) << i << " " << j;
  }
}

TEST(WireSeal, NoneHasNoTagAndOpensAll) {
  const Job job;
  Sealer sealer = job.sealer(1, 0, Sealing::kNone);
  Opener opener = job.opener(0, Sealing::kNone);
  const Sealed packet = make(job, sealer, 1, 0, 64);
  EXPECT_EQ(to_hex(packet.tag), std::string(32, '0')) << "seal() writes nothing";
  EXPECT_TRUE(opener.open(1, 1, packet.header_bytes(), raw(packet.payload), {}, 0));
}

TEST(WireSealDeathTest, ACounterIsSealedOnce) {
  const Job job;
  for (const Sealing sealing : {Sealing::kAuth, Sealing::kNone}) {
    Sealer sealer = job.sealer(1, 0, sealing);
    const Sealed packet = make(job, sealer, 1, 0, 64);
    std::array<std::byte, kTagBytes> tag{};
    EXPECT_DEATH(sealer.seal(packet.header_bytes(), raw(packet.payload), 1, tag.data()), "invariant");
    EXPECT_DEATH(sealer.seal(packet.header_bytes(), raw(packet.payload), 2, tag.data()), "invariant")
        << "was never given out";
  }
}

TEST(WireSeal, NothingIsAllocatedPerPacket) {
  ASSERT_EQ(g_counting, 1) << "CRYPTO_set_mem_functions came too late";
  const Job job;
  Sealer sealer = job.sealer(1, 0);
  Opener opener = job.opener(0);
  Sealed packet = make(job, sealer, 1, 0, 1344);  // and what OpenSSL does once per process
  ASSERT_TRUE(packet.opens(opener, 1));
  const long before = g_allocations;
  for (int i = 0; i < 1000; ++i) {
    packet.header.counter = sealer.next_counter();
    sealer.seal(packet.header_bytes(), raw(packet.payload), packet.header.counter, packet.tag.data());
    ASSERT_TRUE(packet.opens(opener, 1));
    ASSERT_FALSE(packet.opens(opener, 2));
  }
  EXPECT_EQ(g_allocations - before, 0);
  const long counted = g_allocations;
  ASSERT_TRUE(job.opener(0).open(0, 1, {}, {}, {}, 0) == false);
  EXPECT_GT(g_allocations, counted) << "the counter counts";
}

TEST(WireSeal, AThousandNodesOpenEachOther) {
  Job job;
  job.members.resize(kMaxNodes);
  for (size_t i = 0; i < job.members.size(); ++i) {
    job.members[i].join_nonce[0] = static_cast<uint8_t>(i);
    job.members[i].join_nonce[1] = static_cast<uint8_t>(i >> 8);
  }
  Opener opener = job.opener(0);
  for (const uint16_t sender : {0, 1, 511, 1022, 1023}) {
    Sealer sealer = job.sealer(sender, 0);
    const Sealed packet = make(job, sealer, sender, 0, 64);
    EXPECT_TRUE(packet.opens(opener, sender));
    EXPECT_FALSE(packet.opens(opener, sender ^ 1));
  }
}

// --- phases ---

constexpr int64_t kSecond = 1'000'000;

TEST(WirePhase, CountersMoveToTheNextMultiple) {
  const Job job;
  Sealer sealer = job.sealer(1, 0);
  EXPECT_EQ(sealer.next_counter(), 1U);
  EXPECT_EQ(sealer.next_counter(), 2U);
  sealer.next_phase();
  EXPECT_EQ(sealer.next_counter(), uint64_t{1} << 32);
  EXPECT_EQ(sealer.next_counter(), (uint64_t{1} << 32) + 1);
  sealer.next_phase();
  EXPECT_EQ(sealer.next_counter(), uint64_t{2} << 32);
}

TEST(WirePhase, NextIsAcceptedAndPreviousForTenSeconds) {
  const Job job;
  Sealer sealer = job.sealer(1, 0);
  Opener opener = job.opener(0);
  const Sealed old = make(job, sealer, 1, 0, 64);
  sealer.next_phase();
  const Sealed next = make(job, sealer, 1, 0, 64);
  int64_t now = 5 * kSecond;
  EXPECT_TRUE(old.opens(opener, 1, now));
  EXPECT_TRUE(next.opens(opener, 1, now));
  EXPECT_TRUE(old.opens(opener, 1, now + 10 * kSecond - 1)) << "late on the way";
  EXPECT_TRUE(next.opens(opener, 1, now + 10 * kSecond - 1));
  EXPECT_FALSE(old.opens(opener, 1, now + 10 * kSecond));
  EXPECT_TRUE(next.opens(opener, 1, now + 10 * kSecond));

  // And once more: the contexts change places.
  now = 100 * kSecond;
  sealer.next_phase();
  const Sealed third = make(job, sealer, 1, 0, 64);
  EXPECT_TRUE(third.opens(opener, 1, now));
  EXPECT_TRUE(next.opens(opener, 1, now + kSecond));
  EXPECT_FALSE(old.opens(opener, 1, now + kSecond));
  EXPECT_FALSE(next.opens(opener, 1, now + 11 * kSecond));
  EXPECT_TRUE(third.opens(opener, 1, now + 11 * kSecond));
}

TEST(WirePhase, PhasesBelongToOneSender) {
  const Job job;
  Sealer one = job.sealer(1, 0), two = job.sealer(2, 0);
  Opener opener = job.opener(0);
  one.next_phase();
  EXPECT_TRUE(make(job, one, 1, 0, 64).opens(opener, 1, kSecond));
  EXPECT_TRUE(make(job, two, 2, 0, 64).opens(opener, 2, 100 * kSecond));
}

TEST(WirePhase, NoPhaseIsSkipped) {
  const Job job;
  Sealer sealer = job.sealer(1, 0);
  Opener opener = job.opener(0);
  sealer.next_phase();
  sealer.next_counter();
  sealer.next_phase();
  const Sealed second = make(job, sealer, 1, 0, 64);
  EXPECT_EQ(second.header.counter >> 32, 2U);
  EXPECT_FALSE(second.opens(opener, 1, 0));
}

TEST(WirePhase, ForgedCountersChangeNothing) {
  const Job job;
  Sealer sealer = job.sealer(1, 0);
  Opener opener = job.opener(0);
  const Sealed old = make(job, sealer, 1, 0, 64);
  for (const uint64_t phase : {uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{0xFFFFFFFF}}) {
    Sealed forged = old;
    forged.header.counter = (phase << 32) + 1;
    EXPECT_FALSE(forged.opens(opener, 1, 0));
    EXPECT_TRUE(old.opens(opener, 1, 0));
  }
  // Asking for the next phase again and again derives its key once.
  Sealed forged = old;
  const long before = g_allocations;
  for (int i = 0; i < 1000; ++i) {
    forged.header.counter = (uint64_t{1} << 32) + static_cast<uint64_t>(i);
    ASSERT_FALSE(forged.opens(opener, 1, i * kSecond));
  }
  EXPECT_EQ(g_allocations - before, 0);
  sealer.next_phase();
  const Sealed next = make(job, sealer, 1, 0, 64);
  EXPECT_TRUE(next.opens(opener, 1, kSecond));
  // While the previous phase lives, a forged next one must not throw it out.
  forged.header.counter = uint64_t{2} << 32;
  EXPECT_FALSE(forged.opens(opener, 1, 2 * kSecond));
  EXPECT_TRUE(old.opens(opener, 1, 3 * kSecond));
  // After its end a forged one must not bring it back.
  forged.header.counter = 7;
  EXPECT_FALSE(forged.opens(opener, 1, 20 * kSecond));
  EXPECT_FALSE(old.opens(opener, 1, 20 * kSecond));
  EXPECT_TRUE(next.opens(opener, 1, 20 * kSecond));
}

}  // namespace
}  // namespace sluice::wire
