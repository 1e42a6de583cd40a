"""How far the ranks' parameters are apart, from a few kilobytes: a sketch of each rank's parameters, gathered exactly.

A rank's sketch is a fixed linear map of all its parameters to SKETCH numbers: each element is added, with a sign, to one of
them (a count sketch). The norm of the difference of two sketches estimates the norm of the difference of the parameters,
without bias in the square, with a relative error of about sqrt(2 / SKETCH), 4 %. A 64-bit hash of the parameters' bits goes
with it, so that "equal" is exact: sums of floats may differ from processor to processor, the hash may not.
"""
import struct

import torch

SKETCH = 1024
CHUNK = 1 << 18  # elements of one step; signs and weights repeat from chunk to chunk, the numbers they go to do not
ROTATE = 389  # odd, so that 1,024 chunks pass before two of them map alike
MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_patterns = None


def _mixed(count):
    """count well-mixed 64-bit integers, equal on all machines and versions (splitmix64)."""
    x = torch.arange(1, count + 1, dtype=torch.int64) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x, by):  # logically; torch shifts the sign in
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signs_and_weights():
    global _patterns
    if _patterns is None:
        mixed = _mixed(CHUNK)
        _patterns = ((mixed >= 0).float() * 2 - 1, mixed | 1)
    return _patterns


class Sketch:
    """Of one rank: sums (SKETCH doubles), square (of the parameters' norm), hash (of their bits)."""

    BYTES = 8 * (SKETCH + 2)

    def __init__(self, tensors):
        signs, weights = _signs_and_weights()
        sums = torch.zeros(SKETCH, dtype=torch.float64)
        square, code, chunk = 0.0, 0, 0
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            for first in range(0, flat.numel(), CHUNK):
                part = flat[first:first + CHUNK].cpu()
                bits = part.view(_BITS[part.element_size()]).long()
                code = (code * 0x100000001b3 + int((bits * weights[:part.numel()]).sum())) & MASK
                values = part if part.dtype == torch.float64 else part.float()
                square += float((values.double() ** 2).sum())
                signed = values * signs[:part.numel()].to(values.dtype)
                if signed.numel() % SKETCH:
                    signed = torch.nn.functional.pad(signed, (0, -signed.numel() % SKETCH))
                sums += signed.view(-1, SKETCH).sum(0, dtype=torch.float64).roll(chunk * ROTATE % SKETCH)
                chunk += 1
        self.sums, self.square, self.hash = sums, square, code

    def pack(self):
        return self.sums.numpy().tobytes() + struct.pack("<dQ", self.square, self.hash)

    @classmethod
    def unpack(cls, data):
        sketch = cls.__new__(cls)
        sketch.sums = torch.frombuffer(bytearray(data[:8 * SKETCH]), dtype=torch.float64)
        sketch.square, sketch.hash = struct.unpack("<dQ", data[8 * SKETCH:])
        return sketch


def distance(sketches):
    """The largest distance of a rank's parameters from rank 0's, relative to the norm of rank 0's. 0.0 only if all are
    bit-equal; inf or nan when parameters are not finite or rank 0's are all zero."""
    first = sketches[0]
    others = [sketch for sketch in sketches if sketch.hash != first.hash]
    if not others:
        return 0.0
    apart = max(float((sketch.sums - first.sums).norm()) for sketch in others)
    if first.square == 0.0:
        return float("inf")
    # Different bits are never 0, not even where the difference is only the sign of a zero.
    return max(apart / first.square ** 0.5, 1e-300)
