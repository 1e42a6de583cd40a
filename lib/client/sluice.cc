// The C interface: checks arguments and the calling process, turns exceptions into errors, and hands over to Job and
// the handshake. Nothing here is remembered but what a handle holds.
#include "lib/client/sluice.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "lib/client/connection.h"
#include "lib/client/error_text.h"
#include "lib/client/fork_guard.h"
#include "lib/client/job.h"

using sluice::Error;
using sluice::Result;
using sluice::client::fail;
using sluice::client::ForkGuard;
using sluice::client::Greeted;
using sluice::client::Job;
using sluice::client::JoinRequest;
using sluice::client::Timer;
using sluice::client::Welcome;
namespace client = sluice::client;
namespace ipc = sluice::ipc;

static_assert(sizeof(sluice_card) == ipc::kCardBytes);
static_assert(SLUICE_F32 == static_cast<int>(sluice::ElementType::kF32) &&
              SLUICE_U8 == static_cast<int>(sluice::ElementType::kU8));
static_assert(SLUICE_MEAN == static_cast<int>(sluice::ReduceKind::kMean));
static_assert(SLUICE_BEST_EFFORT == static_cast<int>(sluice::OpClass::kBestEffort));
static_assert(SLUICE_MISMATCH == static_cast<int>(sluice::Status::kMismatch) &&
              SLUICE_DAEMON_LOST == static_cast<int>(sluice::Status::kDaemonLost) &&
              SLUICE_REFUSED == static_cast<int>(sluice::Status::kRefused));
static_assert(SLUICE_EVENT_RESULT == sluice::kEventResult && SLUICE_EVENT_RESOLVED == sluice::kEventResolved);

struct sluice_context {
  ForkGuard fork_guard;
  std::string path;
  std::mutex mutex;                                           // guards the two below
  ipc::Channel spare;                                         // connected, nothing said yet
  std::map<std::pair<std::string, uint32_t>, Greeted> ready;  // card made, by job and rank
};

struct sluice_job {
  Job job;
};

namespace {

constexpr const char* kDefaultSocket = "/run/sluice/sluice.sock";
constexpr uint64_t kDefaultMaxOpBytes = uint64_t{64}
                                        << 20;  // two and a half of DDP's default buckets of 25 MB
constexpr uint64_t kDefaultArenaOps = 4;        // contribution and result of two ops in flight
constexpr uint32_t kVersion =
    (SLUICE_VERSION_MAJOR << 16) | (SLUICE_VERSION_MINOR << 8) | SLUICE_VERSION_PATCH;

// No exception crosses the C interface.
template <typename Function>
int guarded(const char* name, Function function) noexcept {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return fail(SLUICE_ERROR_NO_MEMORY, "this process has no memory left");
  } catch (const std::exception& error) {
    try {
      return fail(SLUICE_ERROR_SYSTEM, std::string(name) + ": " + error.what());
    } catch (...) {
      return fail(SLUICE_ERROR_SYSTEM, name);
    }
  }
}

int invalid(const char* name, const std::string& what) {
  return fail(SLUICE_ERROR_INVALID, std::string(name) + ": " + what);
}

int forked(const char* name) noexcept {
  try {
    return fail(SLUICE_ERROR_FORKED,
                std::string(name) +
                    ": this handle was opened by the parent process; a forked child must open "
                    "and join by itself");
  } catch (...) {
    return fail(SLUICE_ERROR_FORKED, name);
  }
}

// Takes in a structure of the caller, which may be of an older release (shorter: what it lacks keeps its default) or
// of a newer one (longer: what this release does not know must be zero).
template <typename T>
bool take(const T* from, T* to) {
  const size_t size = from->size;
  if (size < sizeof(size_t)) return false;
  std::memcpy(static_cast<void*>(to), from, std::min(size, sizeof(T)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) return false;
  }
  to->size = sizeof(T);
  return true;
}

// Gives a structure to the caller, as much of it as his release knows; what only a newer one knows is zero.
template <typename T>
void give(const T& from, T* to) {
  const size_t size = to->size;
  std::memcpy(static_cast<void*>(to), &from, std::min(size, sizeof(T)));
  if (size > sizeof(T)) std::memset(reinterpret_cast<unsigned char*>(to) + sizeof(T), 0, size - sizeof(T));
  to->size = size;
}

// A value of a C enumeration as the number that the caller passed, who may have passed any.
template <typename Enum>
int number_of(const Enum& value) {
  static_assert(sizeof(Enum) == sizeof(int));
  int number = 0;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

constexpr const char* kBadSize =
    "`size` of the structure must be set to its sizeof, and what lies behind the fields "
    "that this release knows must be zero";

bool valid_report(const sluice_report* report) { return report == nullptr || report->size >= sizeof(size_t); }

// A connection on which nothing has been said: the one that sluice_open made, if the daemon still holds it.
Result<ipc::Channel> take_channel(sluice_context* context, int timeout_ms) {
  {
    const std::lock_guard lock(context->mutex);
    if (context->spare.alive()) return std::exchange(context->spare, ipc::Channel());
    context->spare.close();
  }
  return client::connect(context->path, timeout_ms);
}

Result<Greeted> greet(sluice_context* context, const std::string& job, uint32_t rank, uint32_t world_size,
                      uint32_t generation, int timeout_ms) {
  const Timer timer(timeout_ms);
  auto channel = take_channel(context, timer.left_ms());
  if (!channel.ok()) return channel.error();
  return client::greet(std::move(*channel), context->path, job, rank, world_size, generation,
                       timer.left_ms());
}

// The first thing wrong with who wants to take part in what; empty when nothing is.
std::string check_identity(const char* job, uint32_t rank, uint32_t world_size) {
  if (job == nullptr || !ipc::valid_job_name(job)) {
    return "a job's name has 1 to 63 printable characters without space or slash";
  }
  if (world_size == 0 || world_size > ipc::kMaxRanks) {
    return "world_size " + std::to_string(world_size) + "; 1 to " + std::to_string(ipc::kMaxRanks) +
           " are possible";
  }
  if (rank >= world_size)
    return "rank " + std::to_string(rank) + " of " + std::to_string(world_size) + " ranks";
  return "";
}

// The connection that belongs to this rank's card, and the view of all cards.
Result<Greeted> take_greeted(sluice_context* context, const sluice_join_options& options,
                             JoinRequest* request) {
  std::vector<ipc::CardBytes> cards(options.world_size);
  for (size_t i = 0; i < cards.size(); ++i)
    std::memcpy(cards[i].data(), options.cards[i].bytes, ipc::kCardBytes);
  auto view = ipc::build_view(request->job, cards);
  if (!view.ok()) {
    return Error{view.error().code == EPROTO ? SLUICE_ERROR_ABI : SLUICE_ERROR_INVALID, view.error().message};
  }
  const uint32_t node = view->node_of_rank[options.rank];
  const uint32_t local = view->ranks_of(node);
  if (options.local_ranks != 0 && options.local_ranks != local) {
    return Error{SLUICE_ERROR_INVALID, "local_ranks is " + std::to_string(options.local_ranks) + ", but " +
                                           std::to_string(local) + " cards come from this node"};
  }
  request->local_ranks = local;
  const std::lock_guard lock(context->mutex);
  const auto place = context->ready.find({request->job, options.rank});
  if (place == context->ready.end() || place->second.welcome.join_nonce != view->nodes[node].join_nonce ||
      place->second.welcome.endpoint != view->nodes[node].endpoint) {
    return Error{SLUICE_ERROR_INVALID,
                 "the card of rank " + std::to_string(options.rank) +
                     " (this rank) is not the one that sluice_card_get made last on this "
                     "context; a card is good for one sluice_join"};
  }
  if (place->second.generation != options.generation) {
    return Error{SLUICE_ERROR_INVALID, "the card of rank " + std::to_string(options.rank) +
                                           " is for generation " + std::to_string(place->second.generation) +
                                           ", the join for " + std::to_string(options.generation)};
  }
  Greeted greeted = std::move(place->second);
  context->ready.erase(place);
  view->generation = options.generation;
  request->view = std::move(*view);
  return greeted;
}

int join(sluice_context* context, const sluice_join_options& options, sluice_job** job) {
  constexpr const char* kName = "sluice_join";
  if (const std::string wrong = check_identity(options.job, options.rank, options.world_size);
      !wrong.empty()) {
    return invalid(kName, wrong);
  }
  if (options.timeout_ms <= 0) return invalid(kName, "timeout_ms must be positive");
  if ((options.cards == nullptr) != (options.key == nullptr)) {
    return invalid(
        kName, "give both `cards` and `key`, or neither (then the daemon's `peers:` and `key_file:` count)");
  }
  const Timer timer(options.timeout_ms);
  JoinRequest request;
  request.job = options.job;
  request.rank = options.rank;
  request.world_size = options.world_size;
  request.local_ranks = options.local_ranks;
  request.max_op_bytes = options.max_op_bytes != 0 ? options.max_op_bytes : kDefaultMaxOpBytes;
  constexpr uint64_t kMost = uint64_t{1}
                             << 48;  // more than any machine maps; keeps the sums below from overflowing
  if (request.max_op_bytes > kMost || options.arena_bytes > kMost) {
    return invalid(kName, "max_op_bytes or arena_bytes is beyond 2^48");
  }
  const uint64_t arena =
      options.arena_bytes != 0 ? options.arena_bytes : kDefaultArenaOps * request.max_op_bytes;
  constexpr uint64_t kGranule = client::ArenaAllocator::kGranule;
  request.arena_bytes = (arena + kGranule - 1) / kGranule * kGranule + Job::kReserve;
  request.deadline_us = options.deadline_us;
  if (options.key != nullptr) std::memcpy(request.key.data(), options.key, request.key.size());

  auto greeted = options.cards != nullptr ? take_greeted(context, options, &request)
                                          : greet(context, request.job, request.rank, request.world_size,
                                                  options.generation, timer.left_ms());
  if (!greeted.ok()) return fail(greeted.error().code, std::string(kName) + ": " + greeted.error().message);
  auto joined = client::join(std::move(*greeted), request, timer.left_ms());
  request.key.wipe();  // the Job keeps the request
  if (!joined.ok()) return fail(joined.error().code, std::string(kName) + ": " + joined.error().message);
  *job = new sluice_job{Job(std::move(*joined), request)};
  return SLUICE_SUCCESS;
}

int get_card(const char* name, sluice_context* context, const char* job, uint32_t rank, uint32_t world_size,
             uint32_t generation, int timeout_ms, sluice_card* card) {
  return guarded(name, [&] {
    if (context == nullptr || card == nullptr) return invalid(name, "`context` or `card` is NULL");
    if (context->fork_guard.forked()) return forked(name);
    if (const std::string wrong = check_identity(job, rank, world_size); !wrong.empty())
      return invalid(name, wrong);
    if (timeout_ms < 0) return invalid(name, "timeout_ms is negative");
    {
      // A card that was made before and never used is withdrawn first: the daemon holds one place per rank.
      const std::lock_guard lock(context->mutex);
      context->ready.erase({job, rank});
    }
    auto greeted = greet(context, job, rank, world_size, generation, timeout_ms);
    if (!greeted.ok()) return fail(greeted.error().code, std::string(name) + ": " + greeted.error().message);
    const Welcome& welcome = greeted->welcome;
    ipc::Card made;
    made.rank = rank;
    made.world_size = world_size;
    made.lanes = welcome.lanes;
    made.payload = welcome.payload;
    made.version = kVersion;
    made.join_nonce = welcome.join_nonce;
    made.endpoint = welcome.endpoint;
    made.name = welcome.name;
    made.job_hash = ipc::hash_job_name(job);
    const ipc::CardBytes bytes = ipc::encode_card(made);
    std::memcpy(card->bytes, bytes.data(), bytes.size());
    const std::lock_guard lock(context->mutex);
    context->ready.insert_or_assign({job, rank}, std::move(*greeted));
    return static_cast<int>(SLUICE_SUCCESS);
  });
}

}  // namespace

extern "C" {

#define SLUICE_TEXT_(x) #x
#define SLUICE_TEXT(x) SLUICE_TEXT_(x)

const char* sluice_version(void) {
  return SLUICE_TEXT(SLUICE_VERSION_MAJOR) "." SLUICE_TEXT(SLUICE_VERSION_MINOR) "." SLUICE_TEXT(
      SLUICE_VERSION_PATCH);
}

const char* sluice_error_name(int error) {
  switch (error) {
    case SLUICE_SUCCESS:
      return "SUCCESS";
    case SLUICE_ERROR_INVALID:
      return "INVALID";
    case SLUICE_ERROR_UNREACHABLE:
      return "UNREACHABLE";
    case SLUICE_ERROR_REFUSED:
      return "REFUSED";
    case SLUICE_ERROR_TIMEOUT:
      return "TIMEOUT";
    case SLUICE_ERROR_DAEMON_LOST:
      return "DAEMON_LOST";
    case SLUICE_ERROR_NO_MEMORY:
      return "NO_MEMORY";
    case SLUICE_ERROR_FORKED:
      return "FORKED";
    case SLUICE_ERROR_ABI:
      return "ABI";
    case SLUICE_ERROR_FULL:
      return "FULL";
    case SLUICE_ERROR_SYSTEM:
      return "SYSTEM";
    case SLUICE_ERROR_FAILED:
      return "FAILED";
    default:
      return "UNKNOWN";
  }
}

const char* sluice_status_name(int status) {
  if (status < 0 || status > UINT8_MAX) return "UNKNOWN";
  return sluice::status_name(static_cast<sluice::Status>(status));
}

const char* sluice_last_error(void) { return client::last_error(); }

// --- Connection ------------------------------------------------------------------------------------------------------

int sluice_open(const char* socket_path, int timeout_ms, sluice_context** context) {
  return guarded("sluice_open", [&] {
    if (context == nullptr) return invalid("sluice_open", "`context` is NULL");
    *context = nullptr;
    if (timeout_ms < 0) return invalid("sluice_open", "timeout_ms is negative");
    if (socket_path == nullptr) socket_path = std::getenv("SLUICE_SOCKET");
    auto made = std::make_unique<sluice_context>();
    made->path = socket_path != nullptr && *socket_path != '\0' ? socket_path : kDefaultSocket;
    auto channel = client::connect(made->path, timeout_ms);
    if (!channel.ok()) return fail(channel.error());
    made->spare = std::move(*channel);
    *context = made.release();
    return static_cast<int>(SLUICE_SUCCESS);
  });
}

void sluice_close(sluice_context* context) {
  if (context == nullptr) return;
  if (context->fork_guard.forked()) {
    forked("sluice_close");
    return;
  }
  delete context;
}

// --- Joining ---------------------------------------------------------------------------------------------------------

int sluice_card_get(sluice_context* context, const char* job, uint32_t rank, uint32_t world_size,
                    int timeout_ms, sluice_card* card) {
  return get_card("sluice_card_get", context, job, rank, world_size, 0, timeout_ms, card);
}

int sluice_card_renew(sluice_context* context, const char* job, uint32_t rank, uint32_t world_size,
                      uint32_t generation, int timeout_ms, sluice_card* card) {
  return get_card("sluice_card_renew", context, job, rank, world_size, generation, timeout_ms, card);
}

int sluice_key_generate(unsigned char key[32]) {
  return guarded("sluice_key_generate", [&] {
    if (key == nullptr) return invalid("sluice_key_generate", "`key` is NULL");
    ssize_t length = 0;
    do {
      length = ::getrandom(key, 32, 0);
    } while (length < 0 && errno == EINTR);
    if (length == 32) return static_cast<int>(SLUICE_SUCCESS);
    return fail(SLUICE_ERROR_SYSTEM, std::string("sluice_key_generate: getrandom: ") + std::strerror(errno));
  });
}

int sluice_join(sluice_context* context, const sluice_join_options* options, sluice_job** job) {
  constexpr const char* kName = "sluice_join";
  return guarded(kName, [&] {
    if (job != nullptr) *job = nullptr;
    if (context == nullptr || options == nullptr || job == nullptr) {
      return invalid(kName, "`context`, `options` or `job` is NULL");
    }
    if (context->fork_guard.forked()) return forked(kName);
    sluice_join_options taken{};
    if (!take(options, &taken)) return invalid(kName, kBadSize);
    return join(context, taken, job);
  });
}

int sluice_leave(sluice_job* job, int timeout_ms) {
  constexpr const char* kName = "sluice_leave";
  if (job == nullptr) return guarded(kName, [&] { return invalid(kName, "`job` is NULL"); });
  if (job->job.fork_guard().forked()) return forked(kName);
  const int outcome = guarded(kName, [&] { return job->job.leave(std::max(timeout_ms, 0)); });
  delete job;
  return outcome;
}

int sluice_abort(sluice_job* job) {
  constexpr const char* kName = "sluice_abort";
  return guarded(kName, [&] {
    if (job == nullptr) return invalid(kName, "`job` is NULL");
    return job->job.fork_guard().forked() ? forked(kName) : job->job.abort();
  });
}

int sluice_job_get_info(sluice_job* job, sluice_job_info* info) {
  constexpr const char* kName = "sluice_job_get_info";
  return guarded(kName, [&] {
    if (job == nullptr || info == nullptr) return invalid(kName, "`job` or `info` is NULL");
    if (job->job.fork_guard().forked()) return forked(kName);
    if (info->size < sizeof(size_t)) return invalid(kName, kBadSize);
    sluice_job_info full{};
    job->job.info(&full);
    give(full, info);
    return static_cast<int>(SLUICE_SUCCESS);
  });
}

// --- Buffers ---------------------------------------------------------------------------------------------------------

void* sluice_alloc(sluice_job* job, size_t bytes) {
  constexpr const char* kName = "sluice_alloc";
  void* buffer = nullptr;
  guarded(kName, [&] {
    if (job == nullptr) return invalid(kName, "`job` is NULL");
    if (job->job.fork_guard().forked()) return forked(kName);
    buffer = job->job.allocate(bytes);
    return static_cast<int>(SLUICE_SUCCESS);
  });
  return buffer;
}

void sluice_free(sluice_job* job, void* buffer) {
  constexpr const char* kName = "sluice_free";
  if (buffer == nullptr) return;
  guarded(kName, [&] {
    if (job == nullptr) return invalid(kName, "`job` is NULL");
    if (job->job.fork_guard().forked()) return forked(kName);
    job->job.release(buffer);
    return static_cast<int>(SLUICE_SUCCESS);
  });
}

// --- Collective calls ------------------------------------------------------------------------------------------------

int sluice_allreduce(sluice_job* job, const void* contribution, void* result, uint64_t count,
                     sluice_type type, sluice_kind kind, const sluice_op_options* options, sluice_op* op) {
  constexpr const char* kName = "sluice_allreduce";
  return guarded(kName, [&] {
    if (op != nullptr) *op = 0;
    if (job == nullptr || op == nullptr) return invalid(kName, "`job` or `op` is NULL");
    if (job->job.fork_guard().forked()) return forked(kName);
    sluice_op_options taken{};
    if (options != nullptr && !take(options, &taken)) return invalid(kName, kBadSize);
    return job->job.allreduce(contribution, result, count, number_of(type), number_of(kind), taken, op);
  });
}

int sluice_broadcast(sluice_job* job, void* buffer, uint64_t bytes, uint32_t root, sluice_op* op) {
  constexpr const char* kName = "sluice_broadcast";
  return guarded(kName, [&] {
    if (op != nullptr) *op = 0;
    if (job == nullptr || op == nullptr) return invalid(kName, "`job` or `op` is NULL");
    return job->job.fork_guard().forked() ? forked(kName) : job->job.broadcast(buffer, bytes, root, op);
  });
}

int sluice_all_gather(sluice_job* job, const void* contribution, void* result, uint64_t bytes,
                      sluice_op* op) {
  constexpr const char* kName = "sluice_all_gather";
  return guarded(kName, [&] {
    if (op != nullptr) *op = 0;
    if (job == nullptr || op == nullptr) return invalid(kName, "`job` or `op` is NULL");
    return job->job.fork_guard().forked() ? forked(kName)
                                          : job->job.all_gather(contribution, result, bytes, op);
  });
}

int sluice_flush(sluice_job* job, uint64_t tag, sluice_kind kind, sluice_type type, uint64_t count, void* out,
                 int timeout_ms) {
  constexpr const char* kName = "sluice_flush";
  return guarded(kName, [&] {
    if (job == nullptr) return invalid(kName, "`job` is NULL");
    if (job->job.fork_guard().forked()) return forked(kName);
    if (timeout_ms < 0) return invalid(kName, "timeout_ms is negative");
    return job->job.flush(tag, number_of(kind), number_of(type), count, out, timeout_ms);
  });
}

int sluice_tag_retire(sluice_job* job, uint64_t tag, sluice_kind kind, sluice_type type, uint64_t count,
                      void* out, int timeout_ms) {
  constexpr const char* kName = "sluice_tag_retire";
  return guarded(kName, [&] {
    if (job == nullptr) return invalid(kName, "`job` is NULL");
    if (job->job.fork_guard().forked()) return forked(kName);
    if (timeout_ms < 0) return invalid(kName, "timeout_ms is negative");
    return job->job.tag_retire(tag, number_of(kind), number_of(type), count, out, timeout_ms);
  });
}

int sluice_take_correction(sluice_job* job, uint64_t tag, sluice_kind kind, sluice_type type, uint64_t count,
                           void* out, int timeout_ms) {
  constexpr const char* kName = "sluice_take_correction";
  return guarded(kName, [&] {
    if (job == nullptr || out == nullptr) return invalid(kName, "`job` or `out` is NULL");
    if (job->job.fork_guard().forked()) return forked(kName);
    if (timeout_ms < 0) return invalid(kName, "timeout_ms is negative");
    return job->job.take_correction(tag, number_of(kind), number_of(type), count, out, timeout_ms);
  });
}

int sluice_barrier(sluice_job* job, int timeout_ms) {
  constexpr const char* kName = "sluice_barrier";
  return guarded(kName, [&] {
    if (job == nullptr) return invalid(kName, "`job` is NULL");
    if (job->job.fork_guard().forked()) return forked(kName);
    if (timeout_ms < 0) return invalid(kName, "timeout_ms is negative");
    return job->job.barrier(timeout_ms);
  });
}

// --- Outcome ---------------------------------------------------------------------------------------------------------

static int wait_for(const char* name, sluice_job* job, sluice_op op, int timeout_ms, uint32_t wanted,
                    sluice_report* report) {
  return guarded(name, [&] {
    if (job == nullptr) return invalid(name, "`job` is NULL");
    if (job->job.fork_guard().forked()) return forked(name);
    if (timeout_ms < 0) return invalid(name, "timeout_ms is negative");
    if (!valid_report(report)) return invalid(name, kBadSize);
    sluice_report full{};
    const int outcome = job->job.wait(op, timeout_ms, wanted, report != nullptr ? &full : nullptr);
    if (outcome == SLUICE_SUCCESS && report != nullptr) give(full, report);
    return outcome;
  });
}

int sluice_wait(sluice_job* job, sluice_op op, int timeout_ms, sluice_report* report) {
  return wait_for("sluice_wait", job, op, timeout_ms, SLUICE_EVENT_RESULT | SLUICE_EVENT_RESOLVED, report);
}

int sluice_wait_result(sluice_job* job, sluice_op op, int timeout_ms, sluice_report* report) {
  return wait_for("sluice_wait_result", job, op, timeout_ms, SLUICE_EVENT_RESULT, report);
}

}  // extern "C"
