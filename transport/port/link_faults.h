// What goes wrong on one direction of one link, and the dice that decide it: shared by sim (a virtual network) and
// faulty (a decorator over a real port), so that a knob means the same on both. Pure: time and randomness come in as
// arguments. All off by default. Times are microseconds, probabilities are per datagram and from 0 to 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/prng.h"
#include "base/types.h"

namespace sluice::port {

struct LinkFaults {
  // One-way delay: `latency` + uniform 0..`jitter`; with `tail_probability` further microseconds spread over the
  // octaves of tail_min..tail_max (stragglers of a shared cloud network: OptiReduce, section 2).
  Micros latency = 0;
  Micros jitter = 0;
  double tail_probability = 0;
  Micros tail_min = 100;
  Micros tail_max = 10'000;

  double loss = 0;  // independent
  // Bursts (Gilbert-Elliott): a good datagram turns the link bad with `burst_enter`, each in the bad state turns it
  // good with `burst_leave`; in the bad state `burst_loss` are lost.
  double burst_enter = 0;
  double burst_leave = 0.1;
  double burst_loss = 1;

  double duplicate = 0;  // arrives twice, with two delays
  double reorder = 0;    // held back by 1..reorder_delay: later ones overtake it
  Micros reorder_delay = 500;
  double replay = 0;    // together with this datagram an old one of the same link arrives again
  double corrupt = 0;   // 1 to 3 bits flipped
  double truncate = 0;  // cut to a random length, 0 included

  // Whether a datagram may have to wait, or be kept for later.
  bool delays() const { return latency > 0 || jitter > 0 || tail_probability > 0 || reorder > 0; }
  bool any() const {
    return delays() || loss > 0 || burst_enter > 0 || duplicate > 0 || replay > 0 || corrupt > 0 ||
           truncate > 0;
  }
  friend bool operator==(const LinkFaults&, const LinkFaults&) = default;
};

enum class Loss : uint8_t { kNone, kLost, kLostInBurst };

// Whether the next datagram of a link is lost. `bad` is the state of the link between its datagrams.
Loss draw_loss(const LinkFaults& faults, bool* bad, Prng* random);

// How long a datagram waits; `reordered` tells whether it was held back beyond its link's own delay.
Micros draw_delay(const LinkFaults& faults, bool* reordered, Prng* random);

// The length to which a datagram of `length` bytes is cut; `length` when it is left as it is.
size_t draw_length(const LinkFaults& faults, size_t length, Prng* random);

// Whether the datagram is to be damaged; then, with the same dice, flip_bits.
bool draw_corruption(const LinkFaults& faults, size_t length, Prng* random);
// Flips 1 to 3 bits, chosen with replacement: two flips of one bit undo each other. `bytes` is not empty.
void flip_bits(std::span<std::byte> bytes, Prng* random);

// The knobs that are on, in one line: "latency 20, loss 0.0100". Empty when none is.
std::string describe(const LinkFaults& faults);

}  // namespace sluice::port
