/* Averages a vector over all ranks of a job.
 *   sluice-example RANK WORLD DIR   DIR: an empty folder that all ranks see; cards and key are exchanged in it
 *   sluice-example RANK WORLD       with the `peers:` of the daemon's configuration */
#define _POSIX_C_SOURCE 200809L
#include <sluice.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#define CHECK(call) \
  if ((call) != SLUICE_SUCCESS) return fprintf(stderr, "%s\n", sluice_last_error()), 1

/* The rendezvous: one file per item. Both give 0 when it worked; get waits 30 s for the whole item. */
static FILE* item(const char* dir, const char* name, unsigned rank, const char* mode) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s.%u", dir, name, rank);
  return fopen(path, mode);
}
static int put(FILE* file, const void* data, size_t size) {
  return !file || fwrite(data, size, 1, file) != 1 || fclose(file) != 0;
}
static int get(const char* dir, const char* name, unsigned rank, void* data, size_t size) {
  for (int tries = 0; tries < 3000; ++tries, nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL)) {
    FILE* file = item(dir, name, rank, "rb");
    if (file && fread(data, size, 1, file) == 1) return fclose(file);
    if (file) fclose(file);
  }
  return 1;
}

int main(int argc, char** argv) {
  if (argc < 3) return fprintf(stderr, "usage: sluice-example RANK WORLD [DIR]\n"), 2;
  const unsigned rank = (unsigned)atoi(argv[1]), world = (unsigned)atoi(argv[2]), count = 1000000;
  sluice_context* context;
  sluice_job* job;
  sluice_op op;
  sluice_report report = {.size = sizeof report};
  sluice_card cards[256], mine;
  unsigned char key[32];
  sluice_join_options options = {
      .size = sizeof options, .job = "example", .rank = rank, .world_size = world, .timeout_ms = 30000};
  CHECK(sluice_open(NULL, 5000, &context));
  if (argc > 3) {
    CHECK(sluice_card_get(context, options.job, rank, world, 5000, &mine));
    int bad = put(item(argv[3], "card", rank, "wb"), &mine, sizeof mine);
    if (rank == 0) bad |= sluice_key_generate(key) || put(item(argv[3], "key", 0, "wb"), key, sizeof key);
    for (unsigned r = 0; r < world && r < 256; ++r) bad |= get(argv[3], "card", r, &cards[r], sizeof mine);
    if (bad || world > 256 || get(argv[3], "key", 0, key, sizeof key)) return perror("rendezvous"), 1;
    options.cards = cards, options.key = key;
  }
  CHECK(sluice_join(context, &options, &job));
  float *in = sluice_alloc(job, count * sizeof *in), *out = sluice_alloc(job, count * sizeof *out);
  if (!in || !out) return fprintf(stderr, "%s\n", sluice_last_error()), 1;
  for (unsigned i = 0; i < count; ++i) in[i] = (float)rank;
  CHECK(sluice_allreduce(job, in, out, count, SLUICE_F32, SLUICE_MEAN, NULL, &op));
  CHECK(sluice_wait(job, op, 30000, &report));
  printf("rank %u: %s, mean %g %s\n", rank, sluice_status_name(report.status), out[count - 1], report.text);
  CHECK(sluice_leave(job, 5000));
  return sluice_close(context), report.status != SLUICE_OK;
}
