#include <sluice.h>
#include <stdio.h>

int main(void) {
  sluice_context* context = NULL;
  int error = sluice_open("/nowhere/sluice.sock", 10, &context);
  printf("%s %s\n", sluice_version(), sluice_error_name(error));
  return error == SLUICE_ERROR_UNREACHABLE ? 0 : 1;
}
