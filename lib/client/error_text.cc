#include "lib/client/error_text.h"

#include <algorithm>
#include <cstring>

namespace sluice::client {
namespace {

// A fixed buffer: no destructor that could run after its thread's storage is gone, and no allocation on a path that
// may report the lack of memory.
thread_local char text_of_thread[1024] = {};

}  // namespace

int fail(int error, std::string_view text) noexcept {
  const size_t length = std::min(text.size(), sizeof(text_of_thread) - 1);
  // The new text may have been made from the old one.
  std::memmove(text_of_thread, text.data(), length);
  text_of_thread[length] = '\0';
  return error;
}

const char* last_error() noexcept { return text_of_thread; }

}  // namespace sluice::client
