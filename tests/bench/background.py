#!/usr/bin/env python3
"""Background traffic: TCP in bursts. A burst is `flows` connections that send as fast as they may for an `on` time; then
nothing for an `off` time. Times are drawn from a seeded generator: on uniform in 0.5 to 1.5 of its mean, off exponential.

    background.py receive ADDRESS PORT              accepts connections and reads what comes
    background.py send ADDRESS PORT SEED FLOWS ON_MS OFF_MS [always]

With `always` bursts come until the process is ended. Else the sender obeys one word a line on its standard input: `go` starts bursts at the next draw, `rest` ends the running burst at
once and waits until what it sent has arrived; it answers each with a line of JSON: the bytes that the receiver's kernel has acknowledged while it was on,
and the seconds that it was. It ends with its input.
"""
import fcntl
import json
import os
import random
import select
import socket
import struct
import sys
import termios
import time

CHUNK = bytes(64 * 1024)
CONNECT_S = 10.0
SEND_BUFFER = 128 * 1024  # small, so that a burst ends when it ends
DRAIN_S = 2.0
SIOCOUTQ = termios.TIOCOUTQ  # bytes in the send buffer that were not acknowledged


def receive(address, port):
    listener = socket.create_server((address, port))
    connections = {listener}
    buffer = bytearray(1 << 20)
    print("ready", flush=True)
    while True:
        for ready in select.select(connections, [], [])[0]:
            if ready is listener:
                connections.add(listener.accept()[0])
                continue
            try:
                more = ready.recv_into(buffer)
            except ConnectionError:
                more = 0
            if not more:
                connections.discard(ready)
                ready.close()


def connect(address, port):
    """To a receiver that may not be there yet."""
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=CONNECT_S)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class Sender:
    def __init__(self, address, port, seed, flows, on_s, off_s):
        self.random = random.Random(seed)
        self.on_s, self.off_s = on_s, off_s
        self.flows = [connect(address, port) for _ in range(flows)]
        self.inputs = [0]
        for flow in self.flows:
            flow.setblocking(False)
            flow.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self.written, self.burst_s, self.bursts = 0, 0.0, 0
        self.lines = b""

    def command(self, wait_s):
        """The next word of the input, None when none came in that time, "end" at its end."""
        end = time.monotonic() + wait_s
        while b"\n" not in self.lines:
            left = end - time.monotonic()
            if left <= 0 or not select.select([0], [], [], left)[0]:
                return None
            read = os.read(0, 4096)
            if not read:
                return "end"
            self.lines += read
        line, _, self.lines = self.lines.partition(b"\n")
        return line.decode().strip()

    def burst(self):
        """Sends until the burst's time is over; the command that came meanwhile, or None."""
        began = time.monotonic()
        end = began + self.random.uniform(0.5, 1.5) * self.on_s
        self.bursts += 1
        said = None
        while said is None and (left := end - time.monotonic()) > 0:
            inputs, outputs, _ = select.select(self.inputs, self.flows, [], left)
            for flow in outputs:
                try:
                    self.written += flow.send(CHUNK)
                except BlockingIOError:
                    pass
            if inputs:
                said = self.command(0)
        self.burst_s += time.monotonic() - began
        return said

    def always(self):
        self.inputs = []
        while True:
            time.sleep(self.random.expovariate(1 / self.off_s))
            self.burst()

    def unacknowledged(self):
        return sum(struct.unpack("i", fcntl.ioctl(flow, SIOCOUTQ, bytes(4)))[0] for flow in self.flows)

    def answer(self):
        print(json.dumps({"acknowledged": self.written - self.unacknowledged(), "burst_s": self.burst_s, "bursts": self.bursts,
                          "at": time.monotonic()}), flush=True)

    def run(self):
        said, on = None, False
        print("ready", flush=True)
        while True:
            if said == "end":
                return
            if said is not None:
                on = said == "go"
                end = time.monotonic() + DRAIN_S
                while not on and self.unacknowledged() and time.monotonic() < end:
                    time.sleep(0.001)
                self.answer()
            if not on:
                said = self.command(3600)
                continue
            said = self.command(self.random.expovariate(1 / self.off_s))
            if said is None:
                said = self.burst()


def main():
    if sys.argv[1] == "receive":
        receive(sys.argv[2], int(sys.argv[3]))
    address, port, seed, flows = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    sender = Sender(address, port, seed, flows, float(sys.argv[6]) / 1000, float(sys.argv[7]) / 1000)
    if sys.argv[8:] == ["always"]:
        sender.always()
    sender.run()


if __name__ == "__main__":
    main()
