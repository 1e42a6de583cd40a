#include "transport/wire/gmac.h"

#include <openssl/evp.h>

#include <cstring>

#include "base/assert.h"
#include "transport/wire/packet.h"

namespace sluice::wire {
namespace {

constexpr size_t kNonceBytes = 12;

EVP_CIPHER* gcm() {
  static EVP_CIPHER* const cipher = EVP_CIPHER_fetch(nullptr, "AES-128-GCM", nullptr);
  SLUICE_ASSERT(cipher != nullptr);
  return cipher;
}

}  // namespace

Gmac::Gmac(const DataKey& key) : context_(EVP_CIPHER_CTX_new()) {
  SLUICE_ASSERT(context_ != nullptr && EVP_EncryptInit_ex2(context_, gcm(), nullptr, nullptr, nullptr) == 1);
  rekey(key);
}

Gmac::~Gmac() { EVP_CIPHER_CTX_free(context_); }

void Gmac::rekey(const DataKey& key) {
  const std::array<uint8_t, kNonceBytes> zero{};  // replaced before each use
  SLUICE_ASSERT(EVP_EncryptInit_ex2(context_, nullptr, key.data(), zero.data(), nullptr) == 1);
}

void Gmac::compute(uint32_t lane, uint64_t counter, std::span<const std::byte> header,
                   std::span<const std::byte> payload, std::byte* tag) {
  std::array<uint8_t, kNonceBytes> nonce;
  std::memcpy(nonce.data(), &lane, sizeof(lane));
  std::memcpy(nonce.data() + sizeof(lane), &counter, sizeof(counter));
  // Only the nonce is set: the key schedule and the tables of GHASH stay, which is most of the fixed cost.
  // OpenSSL's own "GMAC" is a layer above the same thing and costs 80 ns more per packet.
  int length = 0;
  int good = EVP_EncryptInit_ex2(context_, nullptr, nullptr, nonce.data(), nullptr);
  for (std::span<const std::byte> part : {header, payload}) {
    if (part.empty()) continue;  // its pointer may be null, which means something else to OpenSSL
    good &= EVP_EncryptUpdate(context_, nullptr, &length, reinterpret_cast<const uint8_t*>(part.data()),
                              static_cast<int>(part.size()));
  }
  uint8_t nothing[kTagBytes];
  good &= EVP_EncryptFinal_ex(context_, nothing, &length);
  good &= EVP_CIPHER_CTX_ctrl(context_, EVP_CTRL_AEAD_GET_TAG, kTagBytes, tag);
  SLUICE_ASSERT(good == 1);
}

}  // namespace sluice::wire
