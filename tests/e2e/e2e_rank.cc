// One rank of a job for the end-to-end tests: takes one command a line on stdin, answers with one JSON object a line
// on stdout, and checks every element of every result against the integer oracle. Over the C interface only.
//
//   join socket=S job=J rank=R world=N [rendezvous=D] [max_op=BYTES] [arena=BYTES] [deadline_us=H] [timeout_ms=T]
//        [generation=G]
//   allreduce count=C [type=f32 kind=sum class=exact seed=1 repeat=1 inflight=1 tag=0 deadline_us=0 timeout_ms=60000
//                      rank_as=R]
//   broadcast bytes=B root=R [seed=1]     all_gather bytes=B [seed=1]     barrier     leave     abort     close
//   layout                                offsets in the shared pages, for tests that write into them
//
// Every answer has "ok". With ok false: "error" (of the call), or "status" and "text" (of the op). "wrong" counts
// elements. Without a rendezvous the daemons' `peers:` are used.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "base/ipc/layout.h"
#include "lib/client/sluice.h"
#include "tools/sluice_bench/measure.h"
#include "tools/sluice_bench/oracle.h"
#include "tools/sluice_bench/rendezvous.h"

namespace sluice::bench {
namespace {

using Json = nlohmann::json;

// A call that failed; its answer.
struct Failed {
  Json answer;
};

void must(int error, const char* what) {
  if (error == SLUICE_SUCCESS) return;
  throw Failed{
      {{"ok", false}, {"call", what}, {"error", sluice_error_name(error)}, {"text", sluice_last_error()}}};
}

class Arguments {
 public:
  explicit Arguments(std::istringstream& line) {
    std::string word;
    while (line >> word) {
      const size_t equals = word.find('=');
      if (equals != std::string::npos) values_[word.substr(0, equals)] = word.substr(equals + 1);
    }
  }
  std::string text(const std::string& name, const std::string& otherwise = "") const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : found->second;
  }
  uint64_t number(const std::string& name, uint64_t otherwise = 0) const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : std::stoull(found->second);
  }
  bool has(const std::string& name) const { return values_.count(name) > 0; }

 private:
  std::map<std::string, std::string> values_;
};

// FNV-1a over results: equal on all ranks when all of them hold the same bytes.
struct Digest {
  uint64_t value = 14695981039346656037ULL;
  void add(const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
      uint64_t word;
      std::memcpy(&word, bytes + i, 8);
      value = (value ^ word) * 1099511628211ULL;
    }
    for (; i < size; ++i) value = (value ^ bytes[i]) * 1099511628211ULL;
  }
};

class Client {
 public:
  ~Client() { close(); }

  Json run(const std::string& command, const Arguments& arguments) {
    if (command == "join") return join(arguments);
    if (command == "allreduce") return allreduce(arguments);
    if (command == "broadcast") return broadcast(arguments);
    if (command == "all_gather") return all_gather(arguments);
    if (command == "layout") return layout();
    if (command == "barrier") {
      must(sluice_barrier(job_, timeout(arguments)), "barrier");
      return {{"ok", true}};
    }
    if (command == "leave") {
      sluice_job* job = job_;
      job_ = nullptr;
      must(sluice_leave(job, timeout(arguments)), "leave");
      return {{"ok", true}};
    }
    if (command == "abort") {
      must(sluice_abort(job_), "abort");
      return {{"ok", true}};
    }
    if (command == "close") {
      close();
      return {{"ok", true}};
    }
    return {{"ok", false}, {"error", "no such command"}, {"text", command}};
  }

 private:
  struct Open {
    sluice_op op = 0;
    uint32_t slot = 0, seed = 0;
    double since = 0;
  };
  struct Slot {
    void *contribution = nullptr, *result = nullptr;
  };

  static int timeout(const Arguments& arguments) {
    return static_cast<int>(arguments.number("timeout_ms", 60'000));
  }

  void close() {
    if (job_ != nullptr) sluice_leave(job_, 1000);
    job_ = nullptr;
    sluice_close(context_);
    context_ = nullptr;
  }

  Json join(const Arguments& arguments) {
    close();
    const int timeout_ms = static_cast<int>(arguments.number("timeout_ms", 20'000));
    must(sluice_open(arguments.text("socket").c_str(), timeout_ms, &context_), "open");
    const std::string name = arguments.text("job");
    sluice_join_options options{};
    options.size = sizeof(options);
    options.job = name.c_str();
    rank_ = options.rank = static_cast<uint32_t>(arguments.number("rank"));
    world_ = options.world_size = static_cast<uint32_t>(arguments.number("world"));
    options.max_op_bytes = arguments.number("max_op", 16 << 20);
    options.arena_bytes = arguments.number("arena", 96 << 20);
    options.deadline_us = static_cast<uint32_t>(arguments.number("deadline_us"));
    options.timeout_ms = timeout_ms;
    options.generation = static_cast<uint32_t>(arguments.number("generation"));
    std::vector<sluice_card> cards(world_);
    std::string key(32, '\0');
    if (arguments.has("rendezvous")) {
      const Rendezvous rendezvous(arguments.text("rendezvous"), rank_, world_, timeout_ms);
      sluice_card card;
      must(sluice_card_renew(context_, options.job, rank_, world_, options.generation, timeout_ms, &card),
           "card");
      if (rank_ == 0) {
        must(sluice_key_generate(reinterpret_cast<unsigned char*>(key.data())), "key");
        rendezvous_ok(rendezvous.put("key", key));
      }
      rendezvous_ok(rendezvous.put("card", {reinterpret_cast<const char*>(card.bytes), sizeof(card.bytes)}));
      const auto all = rendezvous.get_all("card", sizeof(card.bytes));
      rendezvous_ok(all);
      for (uint32_t i = 0; i < world_; ++i) std::memcpy(cards[i].bytes, (*all)[i].data(), sizeof(card.bytes));
      if (rank_ != 0) {
        auto theirs = rendezvous.get("key", 0, key.size());
        rendezvous_ok(theirs);
        key = *theirs;
      }
      options.cards = cards.data();
      options.key = reinterpret_cast<const unsigned char*>(key.data());
    }
    must(sluice_join(context_, &options, &job_), "join");
    sluice_job_info info{};
    info.size = sizeof(info);
    must(sluice_job_get_info(job_, &info), "info");
    return {{"ok", true},        {"rank", info.rank},   {"nodes", info.nodes},
            {"node", info.node}, {"lanes", info.lanes}, {"payload", info.payload_bytes}};
  }

  template <typename T>
  static void rendezvous_ok(const Result<T>& result) {
    if (!result.ok()) throw Failed{{{"ok", false}, {"call", "rendezvous"}, {"text", result.error().message}}};
  }

  void* take(uint64_t bytes) {
    void* buffer = sluice_alloc(job_, bytes);
    if (buffer == nullptr) {
      throw Failed{{{"ok", false}, {"call", "alloc"}, {"error", "NO_MEMORY"}, {"text", sluice_last_error()}}};
    }
    return buffer;
  }

  Json allreduce(const Arguments& arguments) {
    Pattern pattern;
    if (!parse_type(arguments.text("type", "f32"), &pattern.type)) return {{"ok", false}, {"error", "type"}};
    pattern.kind = arguments.text("kind", "sum") == "mean" ? ReduceKind::kMean : ReduceKind::kSum;
    pattern.world_size = world_;
    const uint64_t count = arguments.number("count");
    const auto repeat = static_cast<uint32_t>(arguments.number("repeat", 1));
    const auto inflight = static_cast<uint32_t>(arguments.number("inflight", 1));
    const auto seed = static_cast<uint32_t>(arguments.number("seed", 1));
    const std::string op_class = arguments.text("class", "exact");
    sluice_op_options options{};
    options.size = sizeof(options);
    options.op_class = op_class == "exact"        ? SLUICE_EXACT
                       : op_class == "consistent" ? SLUICE_CONSISTENT
                                                  : SLUICE_BEST_EFFORT;
    options.deadline_us = static_cast<uint32_t>(arguments.number("deadline_us"));

    const uint64_t bytes = count * element_size(pattern.type);
    std::vector<Slot> slots(inflight);
    // Empty buffers still need an address of the arena.
    for (Slot& slot : slots)
      slot = {take(std::max<uint64_t>(bytes, 64)), take(std::max<uint64_t>(bytes, 64))};
    totals_ = {};
    std::deque<Open> open;
    bool failed = false;
    for (uint32_t i = 0; i < repeat && !failed; ++i) {
      if (open.size() >= inflight) failed = !finish(&open, slots, pattern, count, timeout(arguments));
      if (failed) break;
      const uint32_t slot = i % inflight;
      pattern.seed = seed * 1000 + i;
      fill(pattern, static_cast<uint32_t>(arguments.number("rank_as", rank_)), slots[slot].contribution,
           count);
      std::memset(slots[slot].result, 0xa5, bytes);
      options.tag = arguments.number("tag") == 0 ? 0 : arguments.number("tag") + slot;
      Open next{0, slot, pattern.seed, now_seconds()};
      const int error = sluice_allreduce(job_, slots[slot].contribution, slots[slot].result, count,
                                         static_cast<sluice_type>(pattern.type),
                                         static_cast<sluice_kind>(pattern.kind), &options, &next.op);
      if (error != SLUICE_SUCCESS) {
        totals_.answer = {
            {"call", "allreduce"}, {"error", sluice_error_name(error)}, {"text", sluice_last_error()}};
        failed = true;
        break;
      }
      open.push_back(next);
    }
    while (!open.empty()) failed = !finish(&open, slots, pattern, count, timeout(arguments)) || failed;
    for (const Slot& slot : slots) {
      sluice_free(job_, slot.contribution);
      sluice_free(job_, slot.result);
    }
    Json answer = totals_.answer;
    answer["ok"] = !failed;
    answer["ops"] = totals_.ops;
    answer["wrong"] = totals_.wrong;
    answer["statuses"] = totals_.statuses;
    answer["skipped"] = totals_.skipped;
    answer["uncounted"] = totals_.uncounted;
    answer["repaired"] = totals_.repaired;
    answer["longest_s"] = totals_.longest;
    answer["digest"] = totals_.digest.value;
    return answer;
  }

  // Waits for the oldest op and judges its result. False after an error, whose words are kept if it is the first.
  bool finish(std::deque<Open>* open, const std::vector<Slot>& slots, Pattern pattern, uint64_t count,
              int timeout_ms) {
    const Open oldest = open->front();
    open->pop_front();
    sluice_report report{};
    report.size = sizeof(report);
    const int error = sluice_wait(job_, oldest.op, timeout_ms, &report);
    totals_.longest = std::max(totals_.longest, now_seconds() - oldest.since);
    if (error != SLUICE_SUCCESS) {
      if (totals_.answer.empty()) {
        totals_.answer = {
            {"call", "wait"}, {"error", sluice_error_name(error)}, {"text", sluice_last_error()}};
      }
      return false;
    }
    const std::string status = sluice_status_name(report.status);
    totals_.statuses[status] = totals_.statuses.value(status, 0) + 1;
    if (report.status >= SLUICE_MISMATCH) {
      if (totals_.answer.empty()) totals_.answer = {{"status", status}, {"text", report.text}};
      return false;
    }
    ++totals_.ops;
    totals_.skipped += report.blocks_skipped;
    totals_.uncounted += report.blocks_uncounted;
    totals_.repaired += report.blocks_repaired;
    pattern.seed = oldest.seed;
    const void* result = slots[oldest.slot].result;
    const Verdict verdict = check(pattern, result, count);
    if (verdict.wrong > 0 && totals_.wrong == 0) totals_.answer["detail"] = describe(verdict, count);
    totals_.wrong += verdict.wrong;
    totals_.digest.add(result, count * element_size(pattern.type));
    return true;
  }

  Json finish_exact(sluice_op op, const Arguments& arguments) {
    sluice_report report{};
    report.size = sizeof(report);
    must(sluice_wait(job_, op, timeout(arguments), &report), "wait");
    return {{"ok", report.status == SLUICE_OK},
            {"status", sluice_status_name(report.status)},
            {"text", std::string(report.text)}};
  }

  Json broadcast(const Arguments& arguments) {
    const uint64_t bytes = arguments.number("bytes");
    const auto root = static_cast<uint32_t>(arguments.number("root"));
    const Pattern pattern{ElementType::kU8, ReduceKind::kSum, 1,
                          static_cast<uint32_t>(arguments.number("seed", 1))};
    auto* buffer = static_cast<unsigned char*>(take(std::max<uint64_t>(bytes, 64)));
    std::memset(buffer, 0xa5, bytes);
    if (rank_ == root) fill(pattern, 0, buffer, bytes);
    sluice_op op = 0;
    must(sluice_broadcast(job_, buffer, bytes, root, &op), "broadcast");
    Json answer = finish_exact(op, arguments);
    answer["wrong"] = check(pattern, buffer, bytes).wrong;
    sluice_free(job_, buffer);
    return answer;
  }

  Json all_gather(const Arguments& arguments) {
    const uint64_t bytes = arguments.number("bytes");
    const auto seed = static_cast<uint32_t>(arguments.number("seed", 1));
    std::vector<unsigned char> mine(bytes);
    fill({ElementType::kU8, ReduceKind::kSum, 1, seed + rank_}, 0, mine.data(), bytes);
    auto* all = static_cast<unsigned char*>(take(std::max<uint64_t>(bytes * world_, 64)));
    std::memset(all, 0xa5, bytes * world_);
    sluice_op op = 0;
    must(sluice_all_gather(job_, mine.data(), all, bytes, &op), "all_gather");
    Json answer = finish_exact(op, arguments);
    uint64_t wrong = 0;
    for (uint32_t rank = 0; rank < world_; ++rank) {
      wrong += check({ElementType::kU8, ReduceKind::kSum, 1, seed + rank}, all + rank * bytes, bytes).wrong;
    }
    answer["wrong"] = wrong;
    sluice_free(job_, all);
    return answer;
  }

  static Json layout() {
    // offsetof is defined for these structures by GCC and Clang though they hold atomics.
    using namespace ipc;  // NOLINT(google-build-using-namespace)
    return {{"ok", true},
            {"abi", kAbiVersion},
            {"entries", kRingEntries},
            {"submit_size", sizeof(SubmitPage)},
            {"submit_tail", offsetof(SubmitPage, submit_tail)},
            {"complete_head", offsetof(SubmitPage, complete_head)},
            {"submit_ring", offsetof(SubmitPage, ring)},
            {"control_size", sizeof(ControlPage)},
            {"complete_tail", offsetof(ControlPage, complete_tail)},
            {"gone", offsetof(ControlPage, gone)},
            {"gone_text", offsetof(ControlPage, gone) + sizeof(std::atomic<uint32_t>)},
            {"complete_ring", offsetof(ControlPage, ring)},
            {"descriptor_size", sizeof(Descriptor)},
            {"completion_size", sizeof(Completion)}};
  }

  struct Totals {
    uint64_t ops = 0, wrong = 0, skipped = 0, uncounted = 0, repaired = 0;
    double longest = 0;
    Digest digest;
    Json statuses = Json::object(), answer = Json::object();
  };

  sluice_context* context_ = nullptr;
  sluice_job* job_ = nullptr;
  uint32_t rank_ = 0, world_ = 1;
  Totals totals_;
};

}  // namespace
}  // namespace sluice::bench

int main() {
  using sluice::bench::Arguments;
  sluice::bench::Client client;
  std::string text;
  while (std::getline(std::cin, text)) {
    std::istringstream line(text);
    std::string command;
    line >> command;
    nlohmann::json answer;
    try {
      answer = client.run(command, Arguments(line));
    } catch (const sluice::bench::Failed& failed) {
      answer = failed.answer;
    } catch (const std::exception& error) {
      answer = {{"ok", false}, {"error", "exception"}, {"text", error.what()}};
    }
    std::cout << answer.dump() << std::endl;
  }
  return 0;
}
