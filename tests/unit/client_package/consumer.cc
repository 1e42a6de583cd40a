#include <cstdio>
#include <sluice.hpp>

int main() {
  try {
    const sluice::Context context("/nowhere/sluice.sock", 10);
  } catch (const sluice::Failure& failure) {
    std::printf("%s\n", failure.what());
    return failure.error() == SLUICE_ERROR_UNREACHABLE ? 0 : 1;
  }
  return 1;
}
