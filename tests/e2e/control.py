"""The client side of the control socket and of the shared pages, spelled out in bytes, for tests that misbehave. What
a correct client does is libsluice's business; here every field can be wrong."""
import array
import fcntl
import json
import mmap
import os
import socket
import struct
import subprocess

from cluster import program

ABI = 3
F_ADD_SEALS = 1033  # linux/fcntl.h
HELLO, WELCOME, REFUSE, JOIN, JOINED, REGISTER, LEAVE, BYE, MAPPED, ABORT, ADMIN, ADMIN_PART = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 17)
MESSAGE = struct.Struct("<8I 2Q 16s 64s 112s 4I")
assert MESSAGE.size == 256
DESCRIPTOR = struct.Struct("<2I 4Q I 4B I f Q")
assert DESCRIPTOR.size == 64
COMPLETION = struct.Struct("<I 2B H Q 8I 2H I Q 2I 56x")
assert COMPLETION.size == 128

_FIELDS = ("type", "abi", "code", "rank", "world_size", "local_ranks", "lanes", "payload", "arena_bytes",
           "max_op_bytes", "join_nonce", "job", "text", "timeout_ms", "nodes", "deadline_us", "node")


def message(**fields):
    values = {"type": HELLO, "abi": ABI, "join_nonce": b"", "job": b"", "text": b""}
    values.update(fields)
    return MESSAGE.pack(*(values.get(name, 0) for name in _FIELDS))


def parse(data):
    values = dict(zip(_FIELDS, MESSAGE.unpack(data)))
    for name in ("job", "text"):
        values["raw_" + name] = values[name]
        values[name] = values[name].split(b"\0")[0].decode("utf-8", "replace")
    return values


def layout():
    """Offsets in the shared pages, as the C++ structures have them."""
    answer = subprocess.run([program("e2e_rank")], input=b"layout\n", capture_output=True, timeout=20, check=True)
    return json.loads(answer.stdout)


class Refused(Exception):
    def __init__(self, code, text):
        super().__init__(text)
        self.code, self.text = code, text


class RawClient:
    """A client that can do everything wrong. The job has one rank unless the caller says otherwise."""

    def __init__(self, daemon, job="raw"):
        self.socket = daemon.connect()
        self.job = job.encode()
        self.welcome, self.fds, self.joined = None, [], None
        self.submit = self.control = self.arena = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for page in (self.submit, self.control, self.arena):
            if page is not None:
                page.close()
        self.submit = self.control = self.arena = None
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        self.socket.close()

    def send(self, data, fds=()):
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], ancillary)

    def receive(self, timeout_s=10.0):
        """The next message; None when the daemon has closed the connection."""
        self.socket.settimeout(timeout_s)
        try:
            data, ancillary, _, _ = self.socket.recvmsg(512, socket.CMSG_LEN(32 * 4))
        except ConnectionResetError:
            return None
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[:len(payload) - len(payload) % numbers.itemsize])
                self.fds += list(numbers)
        if not data:
            return None
        found = parse(data)
        if found["type"] == REFUSE:
            raise Refused(found["code"], found["text"])
        return found

    def hello(self, rank=0, world=1, **fields):
        try:
            self.send(message(type=HELLO, job=self.job, rank=rank, world_size=world, **fields))
        except BrokenPipeError:
            pass  # refused before it said a word; why comes now
        self.welcome = self.receive()
        return self.welcome

    def view(self, nodes=None, ranks=1):
        """The blob of a view of this one node with `ranks` ranks (ViewHeader, ViewNode, node of each rank)."""
        if nodes is None:
            endpoint, name = self.welcome["text"].encode().split(b" ", 1)
            nodes = [(self.welcome["join_nonce"], endpoint, name)]
        blob = struct.pack("<3I2H", 0, len(nodes), ranks, self.welcome["lanes"], self.welcome["payload"])
        for nonce, endpoint, *name in nodes:
            blob += struct.pack("<16s64s64s", nonce, endpoint, *(name or [b""]))
        return blob + struct.pack(f"<{ranks}I", *([0] * ranks))

    def join(self, blob=None, key=b"k" * 32, arena=1 << 20, max_op=1 << 18, sealed=True, **fields):
        fd = os.memfd_create("view", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, self.view() if blob is None else blob)
            if sealed:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
            values = {"type": JOIN, "job": self.job, "rank": 0, "world_size": 1, "local_ranks": 1,
                      "lanes": self.welcome["lanes"], "payload": self.welcome["payload"], "arena_bytes": arena,
                      "max_op_bytes": max_op, "join_nonce": self.welcome["join_nonce"], "text": key,
                      "timeout_ms": 5000}
            values.update(fields)
            self.send(message(**values), [fd])
        finally:
            os.close(fd)
        self.joined = self.receive()
        return self.joined

    def map(self, sizes):
        """Maps control, submit and arena (the order in which JOINED brings them) and says so."""
        control, submit, arena = self.fds[:3]
        self.control = mmap.mmap(control, sizes["control_size"], prot=mmap.PROT_READ)
        self.submit = mmap.mmap(submit, sizes["submit_size"])
        self.arena = mmap.mmap(arena, self.joined["arena_bytes"])
        self.send(message(type=MAPPED, job=self.job))

    def ring(self, lane=0):
        os.write(self.fds[3 + lane], struct.pack("<Q", 1))

    def submit_raw(self, sizes, index, descriptor, lane=0):
        """Puts 64 bytes into the submit ring at a free-running index, and moves the tail behind it."""
        offset = sizes["submit_ring"] + (lane * sizes["entries"] + index % sizes["entries"]) * DESCRIPTOR.size
        self.submit[offset:offset + 64] = descriptor
        self.set_tail(sizes, index + 1, lane)

    def set_tail(self, sizes, value, lane=0):
        offset = sizes["submit_tail"] + lane * 64
        self.submit[offset:offset + 8] = struct.pack("<Q", value & (1 << 64) - 1)
        self.ring(lane)

    def completions(self, sizes, lane=0):
        """How many completions the daemon has written on a lane."""
        offset = sizes["complete_tail"] + lane * 64
        return struct.unpack("<Q", self.control[offset:offset + 8])[0]

    def completion(self, sizes, index, lane=0):
        offset = sizes["complete_ring"] + (lane * sizes["entries"] + index % sizes["entries"]) * COMPLETION.size
        values = COMPLETION.unpack(self.control[offset:offset + COMPLETION.size])
        return {"op_seq": values[0], "events": values[1], "status": values[2], "cookie": values[4]}

    def gone(self, sizes):
        """Why the daemon let this client go: (status, text); status 0 while it has not."""
        status = struct.unpack("<I", self.control[sizes["gone"]:sizes["gone"] + 4])[0]
        text = self.control[sizes["gone_text"]:sizes["gone_text"] + 240]
        return status, text.split(b"\0")[0].decode("utf-8", "replace")


def descriptor(request=1, op_seq=0, count=16, tag=0, contribution=0, result=4096, deadline_us=0, kind=0, element=0,
               wire=None, op_class=0, flags=0, loss_scale=1.0, cookie=7):
    return DESCRIPTOR.pack(request, op_seq, count, tag, contribution, result, deadline_us, kind, element,
                           element if wire is None else wire, op_class, flags, loss_scale, cookie)
