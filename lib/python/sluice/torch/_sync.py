"""Collective calls beside the gradients, all exact: resync, buffers, and how far the ranks are apart."""
import collections
import ctypes
import struct
import warnings

import torch
import torch.distributed as dist

from .._errors import InvalidArgument
from . import _codec

CHUNK_BYTES = 8 * 1024 * 1024  # of one broadcast; two are in flight
IN_FLIGHT = 2


def _host(tensor):
    """A contiguous host tensor with the same bytes; the tensor itself where it is one."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.cpu().contiguous()
    return tensor.contiguous()


def _nbytes(tensor):
    return tensor.numel() * tensor.element_size()


class _Stream:
    """Bytes of the root to all ranks, as a sequence of broadcasts with two in flight. Small pieces share a chunk."""

    def __init__(self, engine, root):
        self._engine, self._job, self._root = engine, engine.job, root
        self._chunk_bytes = min(CHUNK_BYTES, engine.job.max_op_bytes)
        self._buffer, self._used, self._copies = None, 0, []
        self._open = collections.deque()  # (op, buffer, [(address, offset, bytes, done)])
        self.bytes = 0

    def add(self, host, done):
        """Sends the bytes of a host tensor; on the other ranks they are written into it. done() when they are there."""
        sent, total, address = 0, _nbytes(host), host.data_ptr()
        self.bytes += total
        if not total:
            done()
        while sent < total:
            if self._buffer is None:
                self._buffer, self._used, self._copies = self._engine.alloc(self._chunk_bytes), 0, []
            piece = min(total - sent, self._chunk_bytes - self._used)
            if self._job.rank == self._root:
                ctypes.memmove(self._buffer.address + self._used, address + sent, piece)
            self._copies.append((address + sent, self._used, piece, done if sent + piece == total else None))
            self._used += piece
            sent += piece
            if self._used == self._chunk_bytes:
                self._send()

    def _send(self):
        op = self._job.submit_broadcast(self._buffer, self._used, self._root)
        self._open.append((op, self._buffer, self._copies))
        self._buffer = None
        if len(self._open) >= IN_FLIGHT:
            self._receive()

    def _receive(self):
        op, buffer, copies = self._open.popleft()
        self._job.wait(op, self._engine.timeout)
        for address, offset, nbytes, done in copies:
            if self._job.rank != self._root:
                ctypes.memmove(address, buffer.address + offset, nbytes)
            if done is not None:
                done()
        buffer.free()

    def finish(self):
        if self._buffer is not None:
            self._send()
        while self._open:
            self._receive()


class GroupExchange:
    """In place of an engine: the same calls over a process group, once the job has fallen back to DDP's own allreduce."""

    class Member:
        def __init__(self, process_group):
            self._group = process_group
            self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)

        def barrier(self, _timeout=None):
            dist.barrier(group=self._group)

    def __init__(self, process_group):
        self.group, self.job = process_group, GroupExchange.Member(process_group)
        name = str(dist.get_backend(process_group)).lower()
        self.device = None if "gloo" in name or "mpi" in name else torch.device("cuda", torch.cuda.current_device())

    def carried(self, host):
        """The tensor that the group can move: the host tensor itself, or its copy on the device."""
        return host if self.device is None else host.to(self.device)

    def source(self, root):
        return root if self.group is None else dist.distributed_c10d.get_global_rank(self.group, root)


class _GroupStream:
    def __init__(self, exchange, root):
        self._exchange, self._root = exchange, root
        self.bytes = 0

    def add(self, host, done):
        self.bytes += _nbytes(host)
        if _nbytes(host):
            flat = host.view(-1).view(torch.uint8)  # some backends know few types
            moved = self._exchange.carried(flat)
            dist.broadcast(moved, self._exchange.source(self._root), group=self._exchange.group)
            if moved is not flat:
                flat.copy_(moved)
        done()

    def finish(self):
        pass


def _stream(engine, root):
    return (_GroupStream if isinstance(engine, GroupExchange) else _Stream)(engine, root)


def broadcast(engine, tensors, root):
    """Every tensor of rank `root` to all ranks, in place. All ranks must have tensors of the same sizes. Returns bytes."""
    stream = _stream(engine, root)
    keep = []  # host copies, until their bytes are there
    for tensor in tensors:
        host = _host(tensor)
        keep.append(host)

        def done(tensor=tensor, host=host):
            if host.data_ptr() != tensor.data_ptr() and engine.job.rank != root:
                with torch.no_grad():
                    tensor.copy_(host)

        stream.add(host, done)
    stream.finish()
    return stream.bytes


def broadcast_bytes(engine, data, root):
    """The bytes of rank `root` (None elsewhere), on all ranks."""
    mine = engine.job.rank == root
    length = torch.tensor([len(data) if mine else 0], dtype=torch.int64)
    broadcast(engine, [length], root)
    body = bytearray(data) if mine else bytearray(int(length))
    if len(body):
        broadcast(engine, [torch.frombuffer(body, dtype=torch.uint8)], root)
    return bytes(body)


def parameter_distance(engine, model):
    stream = _stream(engine, 0)
    squares = [0.0, 0.0]  # of the difference, of rank 0's
    for parameter in model.parameters():
        own = _host(parameter)
        received = own.clone() if engine.job.rank == 0 else torch.empty_like(own)

        def done(own=own, received=received):
            ours, theirs = own.double(), received.double()
            squares[0] += float((ours - theirs).square().sum())
            squares[1] += float(theirs.square().sum())

        stream.add(received, done)
    stream.finish()
    relative = (squares[0] / squares[1]) ** 0.5 if squares[1] else (float("inf") if squares[0] else 0.0)
    gathered = gather(engine, struct.pack("<d", relative))
    return max(struct.unpack("<d", part)[0] for part in gathered)


def gather(engine, data):
    """The (equally long) bytes of all ranks, in rank order."""
    job = engine.job
    if isinstance(engine, GroupExchange):
        own = engine.carried(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        parts = [torch.empty_like(own) for _ in range(job.world_size)]
        dist.all_gather(parts, own, group=engine.group)
        return [bytes(part.cpu().numpy()) for part in parts]
    result = engine.alloc(len(data) * job.world_size)
    job.wait(job.submit_all_gather(data, result, len(data)), engine.timeout)
    whole = bytes(result.view()[:len(data) * job.world_size])
    result.free()
    return [whole[i * len(data):(i + 1) * len(data)] for i in range(job.world_size)]


def mean(engine, tensor):
    """The mean of a flat f32 or f64 host tensor over the ranks, exactly, in place. Sends nothing where it is zero on all."""
    if not any(any_ for any_, in (struct.unpack("<?", part) for part in gather(engine, struct.pack("<?", bool(tensor.any()))))):
        return
    job, dtype, width = engine.job, "f64" if tensor.dtype == torch.float64 else "f32", tensor.element_size()
    chunk = min(CHUNK_BYTES, job.max_op_bytes) // 64 * 64
    contribution, result = engine.alloc(chunk), engine.alloc(chunk)
    for offset in range(0, _nbytes(tensor), chunk):
        piece = min(chunk, _nbytes(tensor) - offset)
        ctypes.memmove(contribution.address, tensor.data_ptr() + offset, piece)
        job.wait(job.submit_allreduce(contribution, result, piece // width, dtype, "mean"), engine.timeout)
        ctypes.memmove(tensor.data_ptr() + offset, result.address, piece)
    contribution.free()
    result.free()


def resync(engine, needed, incomplete, model, optimizer, grad_scaler, force):
    votes = [struct.unpack("<IIQ", vote) for vote in gather(
        engine, struct.pack("<IIQ", needed, force, incomplete))]
    if not any(needs or forced for needs, forced, _ in votes):
        return False
    good = [rank for rank, (needs, _, _) in enumerate(votes) if not needs]
    if good:
        root = good[0]
    else:
        root = min(range(len(votes)), key=lambda rank: votes[rank][2])
        warnings.warn("sluice: every rank had incomplete rounds; resync takes the parameters of rank "
                      f"{root}, which had the fewest. All ranks are equal afterwards, but no rank had every block", stacklevel=4)
    copy_all(engine, model, optimizer, grad_scaler, root)
    return True


def copy_all(engine, model, optimizer, grad_scaler, root):
    """Parameters, buffers, the optimizer's state and the scaler's of rank `root` to all; what is None is left out."""
    broadcast(engine, [p.data for p in model.parameters()] + [buffer.data for buffer in model.buffers()], root)
    if optimizer is not None:
        _broadcast_optimizer(engine, optimizer, root)
    if grad_scaler is not None:
        state = _broadcast_object(engine, grad_scaler.state_dict(), root)
        if engine.job.rank != root:
            grad_scaler.load_state_dict(state)


def _broadcast_optimizer(engine, optimizer, root):
    """Ranks may differ in what they have (a rank may not have stepped yet): the root's is what counts."""
    state = _broadcast_object(engine, optimizer.state_dict(), root)
    if engine.job.rank != root:
        optimizer.load_state_dict(state)


def _broadcast_object(engine, value, root):
    """A state dict of rank `root`, on all ranks. All raise when it holds what cannot be sent."""
    mine = engine.job.rank == root
    text, tensors = None, []
    if mine:
        try:
            text, tensors = _codec.encode(value)
            text = "=" + text
        except TypeError as error:
            text = f"rank {root}: {error}"
    text = broadcast_bytes(engine, text.encode() if mine else None, root).decode()
    if not text.startswith("="):
        raise InvalidArgument("sluice: the state of optimizer or scaler has more in it than tensors and plain data "
                              f"({text}); copy it yourself, for instance by a checkpoint")
    build = lambda: value  # noqa: E731
    if not mine:
        build, tensors = _codec.decode(text[1:])
    broadcast(engine, tensors, root)
    return build()
