/* sluice.h as a C11 compiler sees it, with all warnings on. */
#include <sluice.h>
#include <string.h>

/* One call of each kind as C code makes it; 0 when all went well, else the number of the step. */
int c11_round_trip(const char* socket_path);

int c11_round_trip(const char* socket_path) {
  sluice_context* context = NULL;
  sluice_job* job = NULL;
  sluice_card card;
  unsigned char key[32];
  if (sluice_open(socket_path, 1000, &context) != SLUICE_SUCCESS) return 1;
  if (sluice_card_get(context, "c11", 0, 1, 1000, &card) != SLUICE_SUCCESS) return 2;
  if (sluice_key_generate(key) != SLUICE_SUCCESS) return 3;
  sluice_join_options options = {.size = sizeof options, .job = "c11", .world_size = 1, .timeout_ms = 5000};
  options.cards = &card;
  options.key = key;
  options.max_op_bytes = 4096;
  if (sluice_join(context, &options, &job) != SLUICE_SUCCESS) return 4;
  double* in = sluice_alloc(job, 10 * sizeof *in);
  double* out = sluice_alloc(job, 10 * sizeof *out);
  if (!in || !out) return 5;
  for (int i = 0; i < 10; ++i) in[i] = i;
  sluice_op op;
  sluice_op_options op_options = {.size = sizeof op_options, .op_class = SLUICE_CONSISTENT, .tag = 42};
  if (sluice_allreduce(job, in, out, 10, SLUICE_F64, SLUICE_MEAN, &op_options, &op) != SLUICE_SUCCESS)
    return 6;
  sluice_report report = {.size = sizeof report};
  if (sluice_wait(job, op, 5000, &report) != SLUICE_SUCCESS || report.status != SLUICE_OK) return 7;
  if (report.tag != 42 || memcmp(in, out, 10 * sizeof *in) != 0) return 8;
  if (sluice_barrier(job, 5000) != SLUICE_SUCCESS) return 9;
  if (sluice_leave(job, 5000) != SLUICE_SUCCESS) return 10;
  sluice_close(context);
  return 0;
}
