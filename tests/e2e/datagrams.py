"""Sluice's datagrams as an attacker on the wire sees and makes them: caught from an interface, changed, and sent with
any source address. Needs root."""
import socket
import struct
import time

from cluster import PORT

HEADER = struct.Struct("<4B H 2B 3I 2H 3s 3s H 2I Q")  # protocol, section 14
assert HEADER.size == 48
TAG = 16
PING, ANNOUNCE, PUSH, PULL, REQUEST, ABORT = 3, 5, 6, 7, 8, 13
# Offsets in the header.
MAGIC_AT, VERSION_AT, TYPE_AT, SENDER_AT, JOB_AT, EPOCH_AT, OP_AT, SHARD_AT, ELEMENTS_AT, BLOCK_AT, COUNTER_AT = (
    0, 1, 2, 4, 8, 12, 16, 20, 22, 24, 40)


def type_of(datagram):
    return datagram[TYPE_AT]


def op_of(datagram):
    return struct.unpack_from("<I", datagram, OP_AT)[0]


def changed(datagram, at, value):
    """The datagram with other bytes at an offset."""
    return datagram[:at] + value + datagram[at + len(value):]


def flipped(datagram, bit):
    return changed(datagram, bit // 8, bytes([datagram[bit // 8] ^ 1 << bit % 8]))


def catch(cluster, node, wanted, timeout_s=20.0):
    """One datagram of each wanted type that arrives at a node's port, as (bytes, source address). The daemons must run
    without transport.gso: an interface shows a run of segments as one frame."""
    found = {}
    with cluster.socket_in(node, socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as wire:
        wire.bind(("eth0", 0x0800))
        end = time.monotonic() + timeout_s
        while len(found) < len(wanted):
            wire.settimeout(max(0.01, end - time.monotonic()))
            frame, address = wire.recvfrom(65536)
            if time.monotonic() > end:
                raise TimeoutError(f"caught only types {sorted(found)} of {wanted}")
            if address[2] == socket.PACKET_OUTGOING or len(frame) < 42 or frame[23] != socket.IPPROTO_UDP:
                continue
            start = 14 + (frame[14] & 15) * 4
            _, destination, length, _ = struct.unpack_from("!4H", frame, start)
            datagram = frame[start + 8:start + length]
            if destination == PORT and len(datagram) >= HEADER.size and type_of(datagram) in wanted:
                found.setdefault(type_of(datagram), (datagram, socket.inet_ntoa(frame[26:30])))
    return found


class Sender:
    """Sends datagrams to the port of one node from within the namespace of another, from any address."""

    def __init__(self, cluster, from_node, to_node):
        self.to = cluster.address(to_node)
        self.socket = cluster.socket_in(from_node, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, payload, source, source_port=PORT):
        length = 8 + len(payload)
        udp = struct.pack("!4H", source_port, PORT, length, 0)  # no checksum: allowed for UDP over IPv4
        ip = struct.pack("!2B3H2BH4s4s", 0x45, 0, 20 + length, 0, 0, 64, socket.IPPROTO_UDP, 0,
                         socket.inet_aton(source), socket.inet_aton(self.to))
        self.socket.sendto(ip + udp + payload, (self.to, 0))
