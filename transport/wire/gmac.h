// AES-128-GMAC with one key, by OpenSSL. Internal to wire/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

struct evp_cipher_ctx_st;  // EVP_CIPHER_CTX; only gmac.cc needs OpenSSL's headers

namespace sluice::wire {

inline constexpr size_t kDataKeyBytes = 16;
using DataKey = std::array<uint8_t, kDataKeyBytes>;

// An AES-128-GCM context that is used with additional data only, which is GMAC (NIST SP 800-38D).
class Gmac {
 public:
  // Allocates all that is ever needed.
  explicit Gmac(const DataKey& key);
  ~Gmac();
  Gmac(Gmac&& other) noexcept : context_(std::exchange(other.context_, nullptr)) {}
  Gmac& operator=(Gmac&& other) noexcept {
    std::swap(context_, other.context_);
    return *this;
  }

  void rekey(const DataKey& key);
  // Tag (16 bytes) over header and payload; the nonce is lane and counter, little-endian, 12 bytes.
  void compute(uint32_t lane, uint64_t counter, std::span<const std::byte> header,
               std::span<const std::byte> payload, std::byte* tag);

 private:
  evp_cipher_ctx_st* context_;
};

}  // namespace sluice::wire
