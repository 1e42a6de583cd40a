#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>

#include "base/ipc/card.h"
#include "base/ipc/view_blob.h"
#include "tests/unit/ipc_support.h"

namespace sluice::ipc {
namespace {

View view_of(uint32_t nodes, uint32_t ranks_per_node) {
  View view;
  view.generation = 7;
  view.lanes = 2;
  view.payload = 1408;
  for (uint32_t node = 0; node < nodes; ++node) {
    View::Node entry;
    entry.join_nonce.fill(static_cast<uint8_t>(node + 1));
    entry.endpoint = "10.0." + std::to_string(node / 256) + "." + std::to_string(node % 256) + ":9470";
    entry.name = node % 2 == 0 ? "gpu-" + std::to_string(node) : "";
    view.nodes.push_back(entry);
    for (uint32_t i = 0; i < ranks_per_node; ++i) view.node_of_rank.push_back(node);
  }
  return view;
}

std::vector<std::byte> bytes_of(const View& view) {
  auto fd = encode_view(view);
  EXPECT_TRUE(fd.ok()) << fd.error().message;
  std::vector<std::byte> bytes(400'000);
  const ssize_t length = ::pread(fd->get(), bytes.data(), bytes.size(), 0);
  bytes.resize(static_cast<size_t>(length));
  return bytes;
}

TEST(View, RoundTrip) {
  for (const auto& [nodes, ranks] : {std::pair{1U, 1U}, {1U, 8U}, {4U, 1U}, {16U, 2U}, {1024U, 63U}}) {
    const View view = view_of(nodes, ranks);
    auto fd = encode_view(view);
    ASSERT_TRUE(fd.ok()) << fd.error().message;
    auto decoded = decode_view(fd->get());
    ASSERT_TRUE(decoded.ok()) << decoded.error().message;
    EXPECT_EQ(*decoded, view);
    EXPECT_EQ(decoded->ranks_of(nodes - 1), ranks);
  }
}

TEST(View, RanksMayAlternateBetweenNodes) {
  View view = view_of(2, 1);
  view.node_of_rank = {0, 1, 0, 1, 1};
  auto fd = encode_view(view);
  ASSERT_TRUE(fd.ok());
  auto decoded = decode_view(fd->get());
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->ranks_of(0), 2U);
  EXPECT_EQ(decoded->ranks_of(1), 3U);
}

TEST(View, BadViewsAreRefusedOnBothSides) {
  struct Case {
    const char* what;
    std::function<void(View&)> spoil;
    const char* word;
  };
  const Case cases[] = {
      {"no node", [](View& v) { v.nodes.clear(); }, "nodes"},
      {"no rank", [](View& v) { v.node_of_rank.clear(); }, "ranks"},
      {"too many nodes", [](View& v) { v = view_of(1025, 1); }, "1025 nodes"},
      {"too many ranks", [](View& v) { v = view_of(1, 65'536); }, "65536 ranks"},
      {"rank beyond the nodes", [](View& v) { v.node_of_rank[2] = 3; }, "rank 2"},
      {"rank far beyond", [](View& v) { v.node_of_rank[1] = UINT32_MAX; }, "rank 1"},
      {"node without rank", [](View& v) { v.node_of_rank[2] = 1; }, "node 2 has no rank"},
      {"first rank not on node 0",
       [](View& v) {
         v.node_of_rank = {1, 0, 2};
       },
       "rank 0"},
      {"wrong order",
       [](View& v) {
         v.node_of_rank = {0, 2, 1};
       },
       "rank 1"},
      {"no lanes", [](View& v) { v.lanes = 0; }, "lanes"},
      {"many lanes", [](View& v) { v.lanes = kMaxLanes + 1; }, "lanes"},
      {"no payload", [](View& v) { v.payload = 0; }, "payload"},
      // Nothing is left of it beside the verdict's reserve; a daemon once divided by that.
      {"a payload of 64", [](View& v) { v.payload = 64; }, "payload"},
      {"a payload of 128", [](View& v) { v.payload = 128; }, "payload"},
      {"a payload of 1400", [](View& v) { v.payload = 1400; }, "payload"},
      {"no endpoint", [](View& v) { v.nodes[1].endpoint.clear(); }, "node 1"},
      {"long endpoint", [](View& v) { v.nodes[1].endpoint = std::string(64, '1'); }, "node 1"},
      {"line break", [](View& v) { v.nodes[1].endpoint = "10.0.0.1:1\n"; }, "node 1"},
      {"long name", [](View& v) { v.nodes[1].name = std::string(64, 'n'); }, "node 1"},
      {"line break in a name", [](View& v) { v.nodes[2].name = "gpu\n"; }, "node 2"},
      {"same endpoint twice", [](View& v) { v.nodes[2].endpoint = v.nodes[0].endpoint; }, "10.0.0.0:9470"},
  };
  for (const Case& c : cases) {
    View view = view_of(3, 1);
    c.spoil(view);
    auto checked = check_view(view);
    ASSERT_FALSE(checked.ok()) << c.what;
    EXPECT_NE(checked.error().message.find(c.word), std::string::npos)
        << c.what << ": " << checked.error().message;
    EXPECT_FALSE(encode_view(view).ok()) << c.what;
  }
}

TEST(View, BytesThatDoNotFitAreRefused) {
  const std::vector<std::byte> good = bytes_of(view_of(3, 2));
  ASSERT_TRUE(decode_view_bytes(good).ok());
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(decode_view_bytes({good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)}).ok())
        << size;
  }
  std::vector<std::byte> longer = good;
  longer.resize(good.size() + 4);
  EXPECT_FALSE(decode_view_bytes(longer).ok());
  std::vector<std::byte> huge = good;  // counts whose size overflows 32 bits
  const uint32_t counts[2] = {0x0333'3333, 0x4000'0000};
  std::memcpy(huge.data() + 4, counts, sizeof(counts));
  EXPECT_FALSE(decode_view_bytes(huge).ok());
  std::vector<std::byte> unterminated = good;
  std::memset(unterminated.data() + sizeof(ViewHeader) + 16, 'e', 64);
  EXPECT_FALSE(decode_view_bytes(unterminated).ok());
  std::vector<std::byte> dirty =
      good;  // a byte behind the terminator: two views that look alike and hash apart
  dirty[sizeof(ViewHeader) + 16 + 63] = std::byte{1};
  dirty[sizeof(ViewHeader) + 16 + 62] = std::byte{0};
  EXPECT_FALSE(decode_view_bytes(dirty).ok());
}

TEST(View, WhatDecodesEncodesToTheSameBytes) {
  const std::vector<std::byte> good = bytes_of(view_of(3, 2));
  test::Random random(42);
  int accepted = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::vector<std::byte> bytes = good;
    for (uint64_t flips = 1 + random.below(3); flips > 0; --flips) {
      bytes[random.below(bytes.size())] ^= static_cast<std::byte>(1U << random.below(8));
    }
    auto view = decode_view_bytes(bytes);
    if (!view.ok()) continue;
    ++accepted;
    ASSERT_EQ(bytes_of(*view), bytes);
  }
  EXPECT_GT(accepted, 0);  // a nonce bit, say
}

TEST(View, OnlySealedMemfdsAreRead) {
  const View view = view_of(2, 1);
  const std::vector<std::byte> bytes = bytes_of(view);
  const UniqueFd open_memfd(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::write(open_memfd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  EXPECT_FALSE(decode_view(open_memfd.get()).ok());
  ASSERT_EQ(::fcntl(open_memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  EXPECT_FALSE(decode_view(open_memfd.get()).ok()) << "still writable";
  ASSERT_EQ(::fcntl(open_memfd.get(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  EXPECT_TRUE(decode_view(open_memfd.get()).ok());

  int pipe_fds[2] = {-1, -1};
  ASSERT_EQ(::pipe2(pipe_fds, O_CLOEXEC), 0);
  const UniqueFd read_end(pipe_fds[0]);
  const UniqueFd write_end(pipe_fds[1]);
  EXPECT_FALSE(decode_view(read_end.get()).ok()) << "and it did not block";
  EXPECT_FALSE(decode_view(-1).ok());

  auto sealed = encode_view(view);
  ASSERT_TRUE(sealed.ok());
  EXPECT_EQ(::pwrite(sealed->get(), "x", 1, 0), -1);
}

// --- Cards -----------------------------------------------------------------------------------------------------------

Card card_of(uint32_t rank, uint32_t world_size, uint32_t node) {
  Card card;
  card.rank = rank;
  card.world_size = world_size;
  card.lanes = static_cast<uint16_t>(4 - node % 2);
  card.payload = static_cast<uint16_t>(1408 + 64 * (node % 16));
  card.version = 0x000100;
  card.join_nonce.fill(static_cast<uint8_t>(0xA0 + node));
  card.endpoint = "192.168.1." + std::to_string(node) + ":9470";
  card.name = "gpu-" + std::to_string(node);
  card.job_hash = hash_job_name("train");
  return card;
}

std::vector<CardBytes> cards_of(const std::vector<uint32_t>& node_of_rank) {
  std::vector<CardBytes> cards;
  for (uint32_t rank = 0; rank < node_of_rank.size(); ++rank) {
    cards.push_back(
        encode_card(card_of(rank, static_cast<uint32_t>(node_of_rank.size()), node_of_rank[rank])));
  }
  return cards;
}

std::string view_error(const std::vector<CardBytes>& cards, const char* job = "train") {
  auto view = build_view(job, cards);
  return view.ok() ? "" : view.error().message;
}

TEST(Card, RoundTripAndEveryBitCounts) {
  const Card card = card_of(3, 8, 2);
  const CardBytes bytes = encode_card(card);
  auto decoded = decode_card(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.error().message;
  EXPECT_EQ(*decoded, card);
  for (size_t bit = 0; bit < kCardBytes * 8; ++bit) {
    CardBytes flipped = bytes;
    flipped[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    EXPECT_FALSE(decode_card(flipped).ok()) << "bit " << bit;
  }
}

TEST(Card, OutOfRangeContentsAreRefused) {
  const std::function<void(Card&)> spoils[] = {
      [](Card& c) { c.rank = c.world_size; },        [](Card& c) { c.world_size = 0; },
      [](Card& c) { c.world_size = kMaxRanks + 1; }, [](Card& c) { c.lanes = 0; },
      [](Card& c) { c.lanes = kMaxLanes + 1; },      [](Card& c) { c.payload = 0; },
      [](Card& c) { c.endpoint.clear(); },
  };
  for (const auto& spoil : spoils) {
    Card card = card_of(0, 4, 0);
    spoil(card);
    EXPECT_FALSE(decode_card(encode_card(card)).ok());
  }
}

TEST(Card, ViewListsNodesByLowestRankAndTakesTheMinima) {
  // Nodes 5, 0, 9 in the order of their lowest rank; ranks scattered.
  auto view = build_view("train", cards_of({5, 0, 5, 9, 0, 9}));
  ASSERT_TRUE(view.ok()) << view.error().message;
  ASSERT_EQ(view->nodes.size(), 3U);
  EXPECT_EQ(view->nodes[0].endpoint, "192.168.1.5:9470");
  EXPECT_EQ(view->nodes[1].endpoint, "192.168.1.0:9470");
  EXPECT_EQ(view->nodes[2].endpoint, "192.168.1.9:9470");
  EXPECT_EQ(view->nodes[2].join_nonce[0], 0xA9);
  EXPECT_EQ(view->nodes[2].name, "gpu-9");
  EXPECT_EQ(view->node_of_rank, (std::vector<uint32_t>{0, 1, 0, 2, 1, 2}));
  EXPECT_EQ(view->lanes, 3);       // nodes 5 and 9
  EXPECT_EQ(view->payload, 1408);  // node 0
}

TEST(Card, AllRanksBuildTheSameBytes) {
  const auto cards = cards_of({0, 0, 1, 1, 2, 2, 3, 3});
  auto first = build_view("train", cards);
  auto second = build_view("train", cards);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(bytes_of(*first), bytes_of(*second));
}

TEST(Card, ErrorsNameTheRank) {
  auto cards = cards_of({0, 1, 2, 3});
  EXPECT_EQ(view_error(cards), "");
  auto bad = cards;
  bad[2][50] ^= std::byte{1};
  EXPECT_NE(view_error(bad).find("rank 2"), std::string::npos) << view_error(bad);
  EXPECT_NE(view_error(bad).find("checksum"), std::string::npos);

  bad = cards;
  bad[1] = CardBytes{};
  EXPECT_NE(view_error(bad).find("rank 1"), std::string::npos);

  bad = cards;
  std::swap(bad[1], bad[3]);
  EXPECT_NE(view_error(bad).find("the card of rank 1 is wrong: it is the one of rank 3"), std::string::npos)
      << view_error(bad);

  bad = cards;
  bad[3] = encode_card(card_of(3, 5, 3));
  EXPECT_NE(view_error(bad).find("rank 3"), std::string::npos);
  EXPECT_NE(view_error(bad).find("5 ranks"), std::string::npos);

  EXPECT_NE(view_error(cards, "other").find("rank 0"), std::string::npos);
  EXPECT_NE(view_error(cards, "other").find("another job"), std::string::npos);

  bad = cards_of({0, 0, 1, 1});  // rank 3's daemon was restarted after rank 2 had its card
  Card restarted = card_of(3, 4, 1);
  restarted.join_nonce.fill(1);
  bad[3] = encode_card(restarted);
  EXPECT_NE(view_error(bad).find("rank 3"), std::string::npos) << view_error(bad);
  EXPECT_NE(view_error(bad).find("rank 2"), std::string::npos) << view_error(bad);

  EXPECT_FALSE(build_view("train", {}).ok());
}

TEST(Card, OtherAbiIsNamedWithBothVersions) {
  CardBytes bytes = encode_card(card_of(0, 1, 0));
  // ABI version 99 with a right checksum, as another release would write it.
  bytes[4] = std::byte{99};
  uint64_t hash = 14695981039346656037ULL;
  for (size_t i = 0; i < kCardBytes - 8; ++i)
    hash = (hash ^ static_cast<uint8_t>(bytes[i])) * 1099511628211ULL;
  std::memcpy(bytes.data() + kCardBytes - 8, &hash, sizeof(hash));
  auto card = decode_card(bytes);
  ASSERT_FALSE(card.ok());
  EXPECT_EQ(card.error().code, EPROTO);
  EXPECT_NE(card.error().message.find("99"), std::string::npos);
  EXPECT_NE(view_error({bytes}).find("rank 0"), std::string::npos);
}

TEST(Card, ManyRanks) {
  std::vector<uint32_t> node_of_rank;
  for (uint32_t rank = 0; rank < 8192; ++rank) node_of_rank.push_back(rank / 8);
  auto view = build_view("train", cards_of(node_of_rank));
  ASSERT_TRUE(view.ok()) << view.error().message;
  EXPECT_EQ(view->nodes.size(), 1024U);
  EXPECT_EQ(view->node_of_rank, node_of_rank);
}

}  // namespace
}  // namespace sluice::ipc
