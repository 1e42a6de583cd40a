#include "transport/wire/gmac.h"

#include <openssl/evp.h>
#include <openssl/modes.h>

#include <cstring>

#include "base/assert.h"
#include "transport/wire/packet.h"

namespace sluice::wire {
namespace {

constexpr size_t kNonceBytes = 12;
constexpr size_t kBlockBytes = 16;

EVP_CIPHER* aes() {
  static EVP_CIPHER* const cipher = EVP_CIPHER_fetch(nullptr, "AES-128-ECB", nullptr);
  SLUICE_ASSERT(cipher != nullptr);
  return cipher;
}

// As CRYPTO_gcm128 calls it: for the key of GHASH, and once per tag to cover it.
void encrypt_block(const unsigned char in[kBlockBytes], unsigned char out[kBlockBytes], const void* context) {
  int length = 0;
  auto* block = static_cast<EVP_CIPHER_CTX*>(const_cast<void*>(context));
  SLUICE_ASSERT(EVP_EncryptUpdate(block, out, &length, in, kBlockBytes) == 1 && length == kBlockBytes);
}

}  // namespace

Gmac::Gmac(const DataKey& key) : block_(EVP_CIPHER_CTX_new()), gcm_(nullptr) {
  SLUICE_ASSERT(block_ != nullptr && EVP_EncryptInit_ex2(block_, aes(), key.data(), nullptr, nullptr) == 1 &&
                EVP_CIPHER_CTX_set_padding(block_, 0) == 1);
  gcm_ = CRYPTO_gcm128_new(block_, encrypt_block);
  SLUICE_ASSERT(gcm_ != nullptr);
}

Gmac::~Gmac() {
  CRYPTO_gcm128_release(gcm_);
  EVP_CIPHER_CTX_free(block_);
}

void Gmac::rekey(const DataKey& key) {
  SLUICE_ASSERT(EVP_EncryptInit_ex2(block_, nullptr, key.data(), nullptr, nullptr) == 1);
  CRYPTO_gcm128_init(gcm_, block_, encrypt_block);
}

void Gmac::compute(uint32_t lane, uint64_t counter, std::span<const std::byte> header,
                   std::span<const std::byte> payload, std::byte* tag) {
  std::array<uint8_t, kNonceBytes> nonce;
  std::memcpy(nonce.data(), &lane, sizeof(lane));
  std::memcpy(nonce.data() + sizeof(lane), &counter, sizeof(counter));
  CRYPTO_gcm128_setiv(gcm_, nonce.data(), nonce.size());
  for (std::span<const std::byte> part : {header, payload}) {
    SLUICE_ASSERT(CRYPTO_gcm128_aad(gcm_, reinterpret_cast<const uint8_t*>(part.data()), part.size()) == 0);
  }
  CRYPTO_gcm128_tag(gcm_, reinterpret_cast<uint8_t*>(tag), kTagBytes);
}

}  // namespace sluice::wire
