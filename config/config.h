// What a daemon runs with, after defaults, files and --set were put together. Plain data; every field has one entry in
// the table of schema.h, which holds its default, unit, range and meaning. Any thread may read a Config that nobody
// writes any more.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/cpu_set.h"
#include "base/types.h"

namespace sluice::config {

enum class PortKind : uint8_t { kUdp = 0 };
enum class FaultDirection : uint8_t { kSend = 0, kReceive = 1, kBoth = 2 };
enum class Fill : uint8_t { kOwn = 0, kZero = 1 };
enum class OnIncomplete : uint8_t { kResync = 0, kCorrect = 1 };
enum class IdleMode : uint8_t { kAdaptive = 0, kBusy = 1, kEvent = 2 };
enum class SealingMode : uint8_t { kAuth = 0, kNone = 1 };
enum class LogLevel : uint8_t { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };
enum class LogFormat : uint8_t { kAuto = 0, kText = 1, kJson = 2, kJournal = 3 };

// One job whose nodes are listed here instead of coming from a rendezvous of the clients.
struct PeerGroup {
  struct Node {
    std::string address;  // "ip:port" of lane 0, numeric
    uint32_t ranks = 1;
    std::string where;  // "file:line:column", for messages
  };
  std::vector<std::string> jobs;  // names; "*" is any job
  std::vector<Node> nodes;        // ranks are numbered node by node, in this order
  std::string where;
};

struct Config {
  std::string node;

  struct Transport {
    PortKind kind{};
    std::vector<std::string> bind;
    uint32_t port = 0;
    uint64_t receive_buffer = 0, send_buffer = 0;
    uint64_t link_rate = 0;  // bits per second; 0: auto
    bool gso = false, gro = false;

    // Faults that are injected on purpose; probabilities are per datagram.
    struct Faults {
      bool i_know = false;
      uint32_t seed = 0;
      FaultDirection direction{};
      std::vector<std::string> peers;
      double loss = 0, burst_enter = 0, burst_leave = 0, burst_loss = 0;
      Micros latency = 0, jitter = 0, tail_min = 0, tail_max = 0, reorder_delay = 0;
      double tail = 0, reorder = 0, duplicate = 0, replay = 0, corrupt = 0, truncate = 0, full = 0;
      std::vector<std::string> cut_out, cut_into;  // "none" alone: none

      bool any() const {
        return loss > 0 || burst_enter > 0 || latency > 0 || jitter > 0 || tail > 0 || reorder > 0 ||
               duplicate > 0 || replay > 0 || corrupt > 0 || truncate > 0 || full > 0 ||
               cut_out != std::vector<std::string>{"none"} || cut_into != std::vector<std::string>{"none"};
      }
    } faults;
  } transport;

  uint32_t lanes = 0;

  struct Idle {
    IdleMode mode{};
    Micros spin = 0;
  } idle;

  struct Cpus {
    CpuSet lanes, control;
  } cpus;

  struct Socket {
    std::string path;
    uint32_t mode = 0;
    std::string group;
  } socket;

  struct Exchange {
    Micros deadline = 0;  // 0: auto
    Micros hard_deadline_min = 0, hard_deadline_max = 0;
    double h_factor = 0;
    uint32_t warmup_ops = 0;
    bool carry_over = false;
    uint32_t carry_max_ops = 0;  // 0: auto
    double carry_max_norm = 0;   // 0: off
    OnIncomplete on_incomplete{};
    uint64_t correction_bytes = 0;  // 0: auto
    Fill fill{};
    Micros op_timeout = 0, rank_timeout = 0, peer_timeout = 0, peer_interval = 0, linger = 0;
    Micros join_timeout = 0;
    uint32_t pull_patience = 0, max_lag = 0, incast = 0;
    double min_contribution = 0;
    uint64_t flow_window = 0, flow_window_min = 0;
  } exchange;

  struct Memory {
    uint64_t job_pool = 0, arena_max = 0, arena_total = 0, op_max = 0;
    uint32_t clients_max = 0, jobs_max = 0;
  } memory;

  struct Security {
    SealingMode sealing{};
    bool insecure = false;
    std::string key_file;
  } security;

  struct Metrics {
    std::string listen;
    uint32_t peer_series = 0;
  } metrics;

  struct Log {
    LogLevel level{};
    LogFormat format{};
  } log;

  std::vector<PeerGroup> peers;
};

}  // namespace sluice::config
