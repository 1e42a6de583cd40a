/* libsluice: gradient exchange over sluiced, the C interface.
 *
 * A process opens a connection to its node's daemon, joins a job as one rank, takes buffers from the job's shared
 * arena, and makes collective calls. Every rank of the job makes the same calls in the same order. Calls return at
 * once with a handle; sluice_wait gives the outcome and a report.
 *
 *   sluice_context* ctx;  sluice_job* job;  sluice_op op;  sluice_report report;
 *   sluice_open(NULL, 1000, &ctx);
 *   sluice_join(ctx, &options, &job);
 *   float* in = sluice_alloc(job, bytes);  float* out = sluice_alloc(job, bytes);
 *   sluice_allreduce(job, in, out, count, SLUICE_F32, SLUICE_MEAN, NULL, &op);
 *   sluice_wait(job, op, 30000, &report);
 *
 * Errors: every function that can fail returns SLUICE_SUCCESS (0) or a negative sluice_error; sluice_last_error() gives the
 * calling thread's last failure as one line that says what, where and what to do next.
 * Deadlines: every call that can wait takes a time-out in milliseconds.
 * Threads: a context and a job may be used by several threads; calls that submit an op take their place in the job's
 * order under a lock, so the caller must order them equally on every rank. A buffer belongs to one thread at a time.
 * Loss of the daemon: when it dies or lets this process go, every open op ends with SLUICE_DAEMON_LOST, every later
 * call that needs it returns SLUICE_ERROR_DAEMON_LOST, and no call hangs. The job is dead on this rank; its buffers stay
 * readable until sluice_leave. The way back: sluice_leave, sluice_close, then sluice_open, sluice_card_renew with a higher
 * generation and sluice_join, on every rank of the job (a view lives as long as its daemons).
 * Fork: a child must not use what its parent opened: its calls return SLUICE_ERROR_FORKED and harm nothing.
 * Versions: symbols are versioned (SLUICE_1); structures grow at the end and carry their size.
 */
#ifndef SLUICE_H_
#define SLUICE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SLUICE_API __attribute__((visibility("default")))
#else
#define SLUICE_API
#endif

#define SLUICE_VERSION_MAJOR 0
#define SLUICE_VERSION_MINOR 1
#define SLUICE_VERSION_PATCH 0

typedef struct sluice_context sluice_context; /* a connection to the daemon */
typedef struct sluice_job sluice_job;         /* membership of one rank in one job */
typedef uint64_t sluice_op;                   /* one collective call; never 0 */

typedef enum sluice_error {
  SLUICE_SUCCESS = 0,
  SLUICE_ERROR_INVALID = -1,     /* an argument is wrong */
  SLUICE_ERROR_UNREACHABLE = -2, /* no daemon at the socket path */
  SLUICE_ERROR_REFUSED = -3,     /* the daemon refused; sluice_last_error() has its words */
  SLUICE_ERROR_TIMEOUT = -4, /* the call's own time-out passed; an op goes on and can be waited for again */
  SLUICE_ERROR_DAEMON_LOST = -5, /* the daemon went away, and the job with it: see "Loss of the daemon" */
  SLUICE_ERROR_NO_MEMORY = -6,   /* the arena or a pool is too small; the text names limit and setting */
  SLUICE_ERROR_FORKED = -7,      /* opened by the parent process */
  SLUICE_ERROR_ABI = -8,         /* library and daemon do not fit; the text has both versions */
  SLUICE_ERROR_FULL = -9,        /* too many ops are open: wait for one first */
  SLUICE_ERROR_SYSTEM = -10,     /* a system call failed; the text names it */
  SLUICE_ERROR_FAILED =
      -11 /* a call without a report (sluice_barrier) ended with an error status, named in the text */
} sluice_error;

/* Outcome of an op; values as in the protocol (docs/protocol.md, section 1). 16 and above are errors: the result
 * buffer then holds nothing of use. */
typedef enum sluice_status {
  SLUICE_OK = 0,
  SLUICE_CORRECTED = 1,
  SLUICE_INCOMPLETE = 2, /* some blocks were missing at the deadline; they are zero; see missing ranges */
  SLUICE_DIVERGED = 3,
  SLUICE_APPROXIMATED = 4,
  SLUICE_MISMATCH = 16,
  SLUICE_OP_TIMEOUT = 17,
  SLUICE_PEER_LOST = 18,
  SLUICE_RANK_TIMEOUT = 19,
  SLUICE_VIEW_CHANGED = 20,
  SLUICE_ABORTED = 21,
  SLUICE_DAEMON_LOST = 22,
  SLUICE_INVALID = 23,
  SLUICE_NO_MEMORY = 24,
  SLUICE_REFUSED = 26
} sluice_status;

typedef enum sluice_type {
  SLUICE_F32 = 0,
  SLUICE_F16 = 1,
  SLUICE_BF16 = 2,
  SLUICE_F64 = 3,
  SLUICE_I32 = 4,
  SLUICE_I64 = 5,
  SLUICE_U8 = 6
} sluice_type;

/* SLUICE_MEAN divides once, at the owner; floating-point types only. */
typedef enum sluice_kind { SLUICE_SUM = 0, SLUICE_MEAN = 1 } sluice_kind;

/* EXACT: repaired until complete, summed in rank order, bit-identical everywhere. CONSISTENT: bounded; all ranks that
 * report SLUICE_OK hold the same bits. BEST_EFFORT: bounded, holes are approximated, ranks drift apart; floating-point
 * types only. */
typedef enum sluice_class { SLUICE_EXACT = 0, SLUICE_CONSISTENT = 1, SLUICE_BEST_EFFORT = 2 } sluice_class;

/* "0.1.0", and the text for an error or a status ("OK", "OP_TIMEOUT" ...). Static strings. */
SLUICE_API const char* sluice_version(void);
SLUICE_API const char* sluice_error_name(int error);
SLUICE_API const char* sluice_status_name(int status);
/* The calling thread's last failure; "" when there was none. Valid until the thread's next call. */
SLUICE_API const char* sluice_last_error(void);

/* --- Connection ------------------------------------------------------------------------------------------------ */

/* Connects to the daemon at `socket_path` (NULL: $SLUICE_SOCKET, else /run/sluice/sluice.sock). */
SLUICE_API int sluice_open(const char* socket_path, int timeout_ms, sluice_context** context);
/* Closes the connection; jobs of it must have been left or are abandoned. NULL is allowed. */
SLUICE_API void sluice_close(sluice_context* context);

/* --- Joining --------------------------------------------------------------------------------------------------- */

/* What this rank tells the other ranks before they can join together: 192 opaque bytes. */
typedef struct sluice_card {
  unsigned char bytes[192];
} sluice_card;

typedef struct sluice_join_options {
  size_t size;     /* sizeof(sluice_join_options) */
  const char* job; /* 1-63 printable characters without space or slash; equal on all ranks */
  uint32_t rank;   /* 0 .. world_size-1 */
  uint32_t world_size;
  uint32_t local_ranks;  /* ranks of this job on this node; 0: found from the cards */
  uint64_t arena_bytes;  /* for sluice_alloc, all buffers together; 0: 4 x max_op_bytes */
  uint64_t max_op_bytes; /* largest tensor; 0: 64 MiB */
  uint32_t deadline_us;  /* default bound of `consistent` ops; 0: the daemon's setting */
  int32_t timeout_ms;    /* for the whole join; the error names who is missing */
  /* Peers. Either the cards of all ranks in rank order (made by sluice_card_get on each rank and exchanged by the
   * caller's own rendezvous: a store, MPI, a file) and a key of 32 bytes that is equal on all ranks and secret ... */
  const sluice_card* cards;
  const unsigned char* key;
  /* ... or, with cards NULL, the `peers:` and `key_file:` of the daemon's configuration. */
  uint32_t generation; /* of the view; that of the cards, see sluice_card_renew. 0: the job's first */
} sluice_join_options;

/* Asks the daemon for this rank's card for `job`. A card is good for one sluice_join. */
SLUICE_API int sluice_card_get(sluice_context* context, const char* job, uint32_t rank, uint32_t world_size,
                               int timeout_ms, sluice_card* card);
/* As sluice_card_get, for a later view of the job: after a daemon was lost or when other ranks shall take part.
 * `generation` is agreed on by all ranks of the new view (say by compare-and-set in the store they met in), higher than
 * that of any view before. From then on older views of the job are over on this node: their open ops end with
 * SLUICE_VIEW_CHANGED, on all ranks here; SLUICE_ERROR_REFUSED when a newer one is open. The new view may have other
 * ranks: `rank` and `world_size` are its own. Ops count from 0 again, and what ranks owed each other is dropped. */
SLUICE_API int sluice_card_renew(sluice_context* context, const char* job, uint32_t rank, uint32_t world_size,
                                 uint32_t generation, int timeout_ms, sluice_card* card);
/* 32 random bytes for `key`; made on one rank and handed to the others by the caller's rendezvous. */
SLUICE_API int sluice_key_generate(unsigned char key[32]);

/* Joins; waits until every node of the job answers. */
SLUICE_API int sluice_join(sluice_context* context, const sluice_join_options* options, sluice_job** job);
/* Waits for open ops (at most timeout_ms), then leaves. What this rank is still owed is dropped (sluice_flush first). The job handle is gone afterwards, whatever is returned, and
 * with it every buffer of sluice_alloc; no other thread may still use it. SLUICE_ERROR_TIMEOUT: ops were still open, or
 * the daemon did not answer; the other ranks see this rank as lost. */
SLUICE_API int sluice_leave(sluice_job* job, int timeout_ms);
/* Aborts the job on all nodes: open ops end with SLUICE_ABORTED everywhere. Bounded, idempotent, any thread. */
SLUICE_API int sluice_abort(sluice_job* job);

/* Facts of a joined job. */
typedef struct sluice_job_info {
  size_t size; /* in: sizeof(sluice_job_info) */
  uint32_t rank, world_size, nodes, node, lanes;
  uint32_t payload_bytes; /* of one datagram */
  uint64_t arena_bytes, max_op_bytes;
  uint32_t carry_over; /* 1: what a CONSISTENT call did not count is added to a later one, see sluice_flush */
  char node_name[64];  /* of this rank's node, and where other nodes reach it ("10.0.0.3:9470") */
  char node_address[64];
  uint32_t
      corrects; /* 1: what an INCOMPLETE result lacks is added to a later one, see sluice_take_correction */
} sluice_job_info;
SLUICE_API int sluice_job_get_info(sluice_job* job, sluice_job_info* info);

/* --- Buffers --------------------------------------------------------------------------------------------------- */

/* Memory that the daemon can read and write, 64-byte aligned, in the job's arena. NULL when the arena is full
 * (sluice_last_error names the size that would do). What it holds at first is not defined. Free it before sluice_leave
 * or let leave do it, and not while an op still uses it. */
SLUICE_API void* sluice_alloc(sluice_job* job, size_t bytes);
SLUICE_API void sluice_free(sluice_job* job, void* buffer);

/* --- Collective calls ------------------------------------------------------------------------------------------ */

typedef struct sluice_op_options {
  size_t size;           /* sizeof(sluice_op_options) */
  sluice_class op_class; /* default: SLUICE_EXACT */
  uint64_t tag;          /* stable name of this tensor from step to step; 0: none, nothing carries over */
  uint32_t deadline_us;  /* bound of this op; 0: the job's */
  float loss_scale;      /* AMP loss scale of the contribution, finite and above 0, 1 is one too; 0: none */
} sluice_op_options;

/* result = sum or mean over all ranks of contribution, element by element. Both buffers come from sluice_alloc, do not
 * overlap, and belong to the daemon: `result` until SLUICE_EVENT_RESULT, `contribution` until SLUICE_EVENT_RESOLVED
 * (sluice_wait returns when both have happened). count may be 0. options NULL: exact, no tag. At most 64 ops may be open:
 * SLUICE_ERROR_FULL, then wait for the oldest. count x element size is at most max_op_bytes of the join. */
SLUICE_API int sluice_allreduce(sluice_job* job, const void* contribution, void* result, uint64_t count,
                                sluice_type type, sluice_kind kind, const sluice_op_options* options,
                                sluice_op* op);

/* buffer of rank `root` to all ranks; exact. `bytes` of any type, in place, from sluice_alloc.
 * Built on an exact integer sum to which all other ranks add zeros: it moves about twice the bytes of an optimal
 * broadcast, and takes `bytes` of the arena for the time of the op. */
SLUICE_API int sluice_broadcast(sluice_job* job, void* buffer, uint64_t bytes, uint32_t root, sluice_op* op);

/* result[r * bytes .. (r + 1) * bytes) = contribution of rank r; exact. `result` from sluice_alloc, of
 * world_size * bytes; `contribution` from anywhere, read before the call returns. Built like sluice_broadcast: about
 * twice the bytes of the optimum, and world_size * bytes of the arena for the time of the op. */
SLUICE_API int sluice_all_gather(sluice_job* job, const void* contribution, void* result, uint64_t bytes,
                                 sluice_op* op);

/* --- Carry-over ------------------------------------------------------------------------------------------------ */

/* Where the daemons carry over (exchange.carry_over), what a CONSISTENT call with a tag did not count of this rank's
 * contribution is added to its next contribution of the same tag, kind, type and count; the daemon keeps it. A
 * contribution that came too late as a whole stays in its buffer until then: SLUICE_EVENT_RESOLVED comes with a later
 * call of the tag. Under AMP `loss_scale` of each call says how its contribution was scaled; what is kept has no scale,
 * and takes that of the call it goes out with.
 *
 * The two calls below take back what is owed, as `count` values of the type in which elements are summed: SLUICE_F32 for
 * SLUICE_F16 and SLUICE_BF16, else the type itself; without loss scale, 0 where nothing is owed. They wait until the
 * fate of every earlier call of the tag is known, and need that much memory of the arena for their time (sluice_flush:
 * up to three times as much). Where nothing is carried over they give zeros. */

/* Collective, like an exact call: what all ranks owe under the tag, summed (SLUICE_MEAN: divided by the ranks), equal on
 * all ranks; nobody owes it any more. For checkpoints: store `out` (rank 0's is enough), and add it to the next result of
 * the tag on every rank, times the loss scale of that call. `out`: any memory. SLUICE_ERROR_TIMEOUT: a fate stayed open;
 * this rank gave nothing to the sum and owes on, the others have their result. */
SLUICE_API int sluice_flush(sluice_job* job, uint64_t tag, sluice_kind kind, sluice_type type, uint64_t count,
                            void* out, int timeout_ms);
/* Local: what this rank owes under the tag, when the tag will not be used again (the buckets were cut anew, say). Add it,
 * times the loss scale, to later contributions. `out` NULL: it is dropped, and counted as undecided. */
SLUICE_API int sluice_tag_retire(sluice_job* job, uint64_t tag, sluice_kind kind, sluice_type type,
                                 uint64_t count, void* out, int timeout_ms);

/* Where the daemon corrects (exchange.on_incomplete: correct), the holes of a CONSISTENT result that was SLUICE_INCOMPLETE
 * are added, when they have come, to this rank's next complete result of the tag, which is then SLUICE_CORRECTED; other
 * ranks had them in time. SLUICE_DIVERGED from sluice_wait says that they will not come, and that the ranges must be copied
 * from another rank, as without. Local: what waits to be added, when the tag will not be used again; shapes as above. Add
 * it, times the loss scale, to later results of this rank (not to contributions). Zeros where nothing waits.
 * SLUICE_ERROR_TIMEOUT: holes or fates stayed open. */
SLUICE_API int sluice_take_correction(sluice_job* job, uint64_t tag, sluice_kind kind, sluice_type type,
                                      uint64_t count, void* out, int timeout_ms);

/* Ends on no rank before every rank has called it. SLUICE_ERROR_TIMEOUT: the barrier goes on without this caller and
 * must not be called again for the same meeting. */
SLUICE_API int sluice_barrier(sluice_job* job, int timeout_ms);

/* --- Outcome --------------------------------------------------------------------------------------------------- */

#define SLUICE_EVENT_RESULT 1u
#define SLUICE_EVENT_RESOLVED 2u

typedef struct sluice_range {
  uint64_t first, count; /* elements */
  uint32_t owner;        /* node */
} sluice_range;

typedef struct sluice_report {
  size_t size; /* in: sizeof(sluice_report) */
  sluice_status status;
  uint32_t events; /* which have happened */
  uint64_t tag;
  uint32_t op_seq;
  uint32_t blocks_expected, blocks_received; /* of the result */
  uint32_t blocks_skipped;                   /* zero by decision of their owner: too few contributed */
  uint32_t blocks_uncounted;                 /* of this rank's contribution, not in the sum */
  uint32_t blocks_repaired;                  /* asked for again */
  uint32_t blocks_filled; /* BEST_EFFORT: of the result, filled by rule (own contribution or zero) */
  uint32_t
      blocks_discarded; /* of what this rank was owed: too old to be carried on, not finite, or no memory */
  uint32_t total_us, wait_us, lag_us, push_us;
  uint32_t late_nodes;    /* nodes not counted in full, as far as seen here */
  uint32_t worst_node;    /* waited for longest, to begin, to take part or for blocks; UINT32_MAX: none */
  uint64_t bytes_sent;    /* datagram bytes of this node for this op, until it completed */
  uint32_t missing_total; /* ranges missing (INCOMPLETE); the first 16 are listed */
  uint32_t missing_count;
  sluice_range missing[16];
  char text[496]; /* for a person: what went wrong, or who was waited for 1 s or longer; else empty */
  uint32_t blocks_corrected; /* CORRECTED: of the result, to which holes of earlier ones were added */
} sluice_report;

/* Waits until both events of the op have happened, then forgets the op. Returns SLUICE_SUCCESS also when the op's own
 * status is an error (look at report->status), SLUICE_ERROR_TIMEOUT when timeout_ms passed (call again).
 * timeout_ms 0: only look. report may be NULL. */
SLUICE_API int sluice_wait(sluice_job* job, sluice_op op, int timeout_ms, sluice_report* report);
/* As sluice_wait, but returns at SLUICE_EVENT_RESULT; the op is forgotten only when it was also RESOLVED: then
 * report->events has both bits, otherwise call sluice_wait later to get the contribution buffer back. */
SLUICE_API int sluice_wait_result(sluice_job* job, sluice_op op, int timeout_ms, sluice_report* report);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_H_ */
