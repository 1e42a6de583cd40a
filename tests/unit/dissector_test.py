"""docs/sluice.lua in tshark: every type of packet, as the fuzz corpus and the layout tests have it."""
import json
import pathlib
import shutil
import struct
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "fuzz" / "corpus" / "packet"

pytestmark = pytest.mark.skipif(shutil.which("tshark") is None, reason="tshark is missing: apt-get install tshark")


def frame(datagram, port=9470):
    """An IPv4 packet with a UDP datagram in it."""
    udp = struct.pack(">HHHH", port, port, 8 + len(datagram), 0) + datagram
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, b"\x0a\0\0\1", b"\x0a\0\0\2")
    return ip + udp


def dissect(tmp_path, *datagrams, tagged=True):
    """The fields of the layer `sluice` of each datagram, and its Info column; None where it is not one of ours."""
    capture = tmp_path / "capture.pcap"
    with open(capture, "wb") as out:
        out.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 101))  # 101: raw IP
        for datagram in datagrams:
            packet = frame(datagram)
            out.write(struct.pack("<IIII", 1, 0, len(packet), len(packet)) + packet)
    command = ["tshark", "-X", f"lua_script:{ROOT / 'docs' / 'sluice.lua'}", "-r", str(capture), "-T", "json",
               "--no-duplicate-keys", "-o", f"sluice.tagged:{str(tagged).upper()}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    for line in result.stderr.splitlines():  # tshark says so when it runs as root
        assert "lua" not in line.lower() or "dangerous" in line, result.stderr
    layers = [packet["_source"]["layers"].get("sluice") for packet in json.loads(result.stdout)]
    assert len(layers) == len(datagrams)
    return layers


def find(layer, name):
    """The value of a field, wherever in the tree it is; None if it is not there."""
    if isinstance(layer, dict):
        if name in layer:
            return layer[name]
        for value in layer.values():
            found = find(value, name)
            if found is not None:
                return found
    return None


def corpus(name):
    return (CORPUS / name).read_bytes()[1:]  # the first byte is for the fuzz target


# What must be found in each packet of the corpus, besides the header.
FIELDS = {
    "ping": {"type": "3", "receiver": "1", "done": "0", "base": "1", "ping.pulse_done": "2", "echo": "3", "hold": "4",
             "grant": "5", "ping.policy": "6", "ping.flags": "0x00000007"},
    "pong": {"type": "4", "receiver": "1", "done": "0", "ping.policy": "6"},
    "announce": {"type": "5", "shard": "1", "announce.age": "10", "done": "5", "announce.contributes": "1",
                 "announce.receives": "1", "flags.kind": "0", "flags.wire_type": "0"},
    "push": {"type": "6", "shard": "1", "elements": "16", "total": "1", "flags.wire_type": "0"},
    "pull": {"type": "7", "elements": "4", "verdict.count": "2", "verdict.sender": ["0", "2"], "flags.row": "0"},
    "request": {"type": "8", "done": "5", "bitmap": "ff:0f", "bitmap.ones": "12"},
    "request_row": {"type": "9", "done": "5", "base": "5"},
    "row": {"type": "10", "subject": "1", "bitmap": "0f", "bitmap.ones": "4"},
    "feedback": {"type": "11", "receiver": "1", "echo": "1234", "hold": "10", "grant": "1000000", "feedback.ecn": "0"},
    "gone": {"type": "12", "base": "9"},
    "abort": {"type": "13", "abort.reason": "17", "abort.count": "2", "abort.elements": "1000",
              "abort.tag": "0x0000000000abcdef", "abort.missing": ["0", "2"]},
}


def test_every_type(tmp_path):
    layers = dissect(tmp_path, *[corpus(name) for name in FIELDS])
    for (name, fields), layer in zip(FIELDS.items(), layers):
        assert layer is not None, name
        common = {"sender": "1", "lane": "0", "job": "0x01020304", "epoch": "0x0a0b0c0d", "op": "5", "counter": "1",
                  "phase": "0", "fingerprint": "0xcafef00d", "stamp": "1234"}
        for field, value in {**common, **fields}.items():
            assert find(layer, "sluice." + field) == value, (name, field, layer)
        assert find(layer, "sluice.too_short") is None, name
        assert find(layer, "sluice.tag") is not None, name


def test_hello(tmp_path):
    header = struct.pack("<BBBBHBBIIIHH", 0x53, 1, 1, 0, 65535, 0, 0, 0x01020304, 0, 0, 7, 0) + bytes(6)
    header += struct.pack("<HIIQ", 9, 0, 77, 0)
    hello = bytes(range(48)) + struct.pack("<QQHBBBBHII", 0xC0FFEE, 3, 1408, 2, 1, 2, 1, 1472, 0xABCD, 0)
    for tagged in True, False:  # HELLO has its tag in any case
        layer, = dissect(tmp_path, header + hello + bytes(100) + b"\x55" * 16, tagged=tagged)
        expected = {"type": "1", "receiver": "7", "subject": "9", "hello.config": "0x0000000000c0ffee",
                    "hello.generation": "3", "hello.payload": "1408", "hello.lanes": "2", "hello.sealing": "1",
                    "hello.phase": "2", "hello.unknown_start": "1", "hello.probe": "1472",
                    "hello.view": "0x0000abcd", "tag": ":".join(["55"] * 16)}
        for field, value in expected.items():
            assert find(layer, "sluice." + field) == value, field
        assert len(find(layer, "sluice.hello.padding").split(":")) == 100


def test_without_tags(tmp_path):
    layer, = dissect(tmp_path, corpus("untagged"), tagged=False)
    assert find(layer, "sluice.elements") == "16"
    assert len(find(layer, "sluice.values").split(":")) == 64
    assert find(layer, "sluice.tag") is None


def test_cut_and_foreign_datagrams(tmp_path):
    whole = corpus("abort")
    cuts = [whole[:length] for length in range(1, len(whole))]
    layers = dissect(tmp_path, *cuts, b"S\1\x20" + bytes(100), b"GET / HTTP/1.1", bytes(200))
    for length, layer in enumerate(layers, start=1):
        if length < 48 or length >= len(whole):
            assert layer is None, length
        else:
            assert find(layer, "sluice.too_short") is not None or length >= 48 + 16 + 24 + 4, length
