// AES-128-GMAC with one key, by OpenSSL. Internal to wire/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

struct evp_cipher_ctx_st;  // EVP_CIPHER_CTX; only gmac.cc needs OpenSSL's headers
struct gcm128_context;     // GCM128_CONTEXT

namespace sluice::wire {

inline constexpr size_t kDataKeyBytes = 16;
using DataKey = std::array<uint8_t, kDataKeyBytes>;

// AES-128-GCM with additional data only, which is GMAC (NIST SP 800-38D). GHASH and tag are OpenSSL's CRYPTO_gcm128
// (openssl/modes.h), AES comes from EVP: the same functions that EVP's AES-128-GCM ends in. Through EVP itself a tag
// costs 130 ns more, half of what a packet of 1,392 bytes costs, because each call looks up its parameters by name.
class Gmac {
 public:
  // Allocates all that is ever needed.
  explicit Gmac(const DataKey& key);
  ~Gmac();
  Gmac(Gmac&& other) noexcept
      : block_(std::exchange(other.block_, nullptr)), gcm_(std::exchange(other.gcm_, nullptr)) {}
  Gmac& operator=(Gmac&& other) noexcept {
    std::swap(block_, other.block_);
    std::swap(gcm_, other.gcm_);
    return *this;
  }

  void rekey(const DataKey& key);
  // Tag (16 bytes) over header and payload; the nonce is lane and counter, little-endian, 12 bytes.
  void compute(uint32_t lane, uint64_t counter, std::span<const std::byte> header,
               std::span<const std::byte> payload, std::byte* tag);

 private:
  evp_cipher_ctx_st* block_;  // AES-128 of one block
  gcm128_context* gcm_;
};

}  // namespace sluice::wire
