#include "transport/wire/derive.h"

#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include "base/assert.h"

namespace sluice::wire {
namespace {

// Fetching looks algorithms up by name under a lock, so it is done once. What is fetched lives as long as the
// process.
EVP_MD* digest() {
  static EVP_MD* const md = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  SLUICE_ASSERT(md != nullptr);
  return md;
}
EVP_MAC* mac() {
  static EVP_MAC* const hmac = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  SLUICE_ASSERT(hmac != nullptr);
  return hmac;
}
EVP_KDF* kdf() {
  static EVP_KDF* const hkdf = EVP_KDF_fetch(nullptr, "HKDF", nullptr);
  SLUICE_ASSERT(hkdf != nullptr);
  return hkdf;
}

// OpenSSL takes parameters through non-const pointers and only reads them.
OSSL_PARAM octets(const char* name, ByteSpan bytes) {
  static uint8_t nothing = 0;
  return OSSL_PARAM_construct_octet_string(
      name, bytes.empty() ? &nothing : const_cast<uint8_t*>(bytes.data()), bytes.size());
}
OSSL_PARAM text(const char* name, const char* value) {
  return OSSL_PARAM_construct_utf8_string(name, const_cast<char*>(value), 0);
}

void hkdf(int mode, ByteSpan key, OSSL_PARAM salt_or_info, std::span<uint8_t> out) {
  EVP_KDF_CTX* context = EVP_KDF_CTX_new(kdf());
  SLUICE_ASSERT(context != nullptr);
  const OSSL_PARAM params[] = {OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode),
                               text(OSSL_KDF_PARAM_DIGEST, "SHA256"), octets(OSSL_KDF_PARAM_KEY, key),
                               salt_or_info, OSSL_PARAM_construct_end()};
  SLUICE_ASSERT(EVP_KDF_derive(context, out.data(), out.size(), params) == 1);
  EVP_KDF_CTX_free(context);
}

}  // namespace

Bytes32 sha256(std::initializer_list<ByteSpan> parts) {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  SLUICE_ASSERT(context != nullptr && EVP_DigestInit_ex2(context, digest(), nullptr) == 1);
  for (ByteSpan part : parts) SLUICE_ASSERT(EVP_DigestUpdate(context, part.data(), part.size()) == 1);
  Bytes32 out;
  SLUICE_ASSERT(EVP_DigestFinal_ex(context, out.data(), nullptr) == 1);
  EVP_MD_CTX_free(context);
  return out;
}

Bytes32 hmac_sha256(ByteSpan key, std::initializer_list<ByteSpan> parts) {
  EVP_MAC_CTX* context = EVP_MAC_CTX_new(mac());
  SLUICE_ASSERT(context != nullptr);
  const OSSL_PARAM params[] = {text(OSSL_MAC_PARAM_DIGEST, "SHA256"), OSSL_PARAM_construct_end()};
  // A null key would mean "the one before"; an empty one is legal.
  const uint8_t nothing = 0;
  SLUICE_ASSERT(EVP_MAC_init(context, key.empty() ? &nothing : key.data(), key.size(), params) == 1);
  for (ByteSpan part : parts) SLUICE_ASSERT(EVP_MAC_update(context, part.data(), part.size()) == 1);
  Bytes32 out;
  size_t length = 0;
  SLUICE_ASSERT(EVP_MAC_final(context, out.data(), &length, out.size()) == 1 && length == out.size());
  EVP_MAC_CTX_free(context);
  return out;
}

Bytes32 hkdf_extract(ByteSpan salt, ByteSpan key) {
  Bytes32 prk;
  hkdf(EVP_KDF_HKDF_MODE_EXTRACT_ONLY, key, octets(OSSL_KDF_PARAM_SALT, salt), prk);
  return prk;
}

void hkdf_expand(const Bytes32& prk, ByteSpan info, std::span<uint8_t> out) {
  hkdf(EVP_KDF_HKDF_MODE_EXPAND_ONLY, prk, octets(OSSL_KDF_PARAM_INFO, info), out);
}

}  // namespace sluice::wire
