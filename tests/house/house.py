#!/usr/bin/env python3
"""Checks that the source tree keeps the rules of docs/design.md, section 3.

    house.py RULE ROOT      prints "file:line: what is wrong" for each violation; exits with 1 if there is one
    house.py --list         the rules
    house.py --help

Standard library only, so that it runs wherever the project builds. house_test.py proves, on planted violations, that
each rule can fail.
"""
import os
import re
import subprocess
import sys

# Floor by floor, what each room may include; a file belongs to the room with the longest matching path.
# Every room may include itself. tests/ sees everything.
ROOMS = {
    "base": [],
    "transport/wire": ["base"],
    "transport/exchange": ["base", "transport/wire"],
    "transport/port": ["base"],
    "gpu": ["base"],
    "config": ["base"],
    "lib": ["base", "gpu"],
    "daemon": ["base", "config", "transport"],
    "tools": ["base", "config", "transport", "gpu", "lib", "daemon"],
    # The front end of the simulator, which is a part of the tests.
    "tools/sluice_sim": ["base", "transport", "tests/simulation"],
    "tests": ["base", "config", "transport", "gpu", "lib", "daemon", "tools"],
}
TOP_FOLDERS = ["base", "transport", "gpu", "config", "lib", "daemon", "tools", "tests", "systemd", "scripts", "docs"]

# Installed headers find each other by their installed name, not by their place in this tree.
INSTALLED = {"sluice.h": "lib/client/sluice.h", "sluice.hpp": "lib/client/sluice.hpp"}

CODE = (".h", ".hpp", ".c", ".cc", ".cpp", ".cu", ".cuh")
TEXT = CODE + (".py", ".sh", ".cmake", "CMakeLists.txt")
MAX_LINES = 600  # design 3: "about 500 lines is a sign to split"

# wire and exchange are pure: time and randomness come in as arguments, and nothing goes out but return values.
PURE = ["transport/wire", "transport/exchange"]
PURE_MAY = ["base/assert.h"]  # its output is the last thing that the process does
IMPURE_HEADER = re.compile(
    r"^(thread|mutex|shared_mutex|condition_variable|future|semaphore|latch|barrier|stop_token|chrono|ctime|time\.h"
    r"|fstream|iostream|filesystem|syncstream|pthread\.h|sched\.h|signal\.h|csignal|unistd\.h|fcntl\.h"
    r"|poll\.h|netdb\.h|ifaddrs\.h|dlfcn\.h|(sys|net|netinet|arpa|linux|asm)/.*|spdlog/.*)$")
IMPURE_CALL = re.compile(
    r"\b(std::(jthread|thread|mutex|random_device)|pthread_\w+|syscall|getrandom|RAND_bytes|clock_gettime|gettimeofday"
    r"|nanosleep|usleep|sleep_for|sleep_until|__rdtsc|__builtin_ia32_rdtsc|thread_local"
    r"|(system|steady|high_resolution)_clock)\b"
    r"|(?<![\w>:])::(open|close|read|write|poll|socket|send|recv|time|clock|rand|random)\s*\("
    r"|\btime\s*\(\s*(nullptr|NULL|0)\s*\)"
    # <cstdio> is there for snprintf, which only writes text into memory.
    r"|\b(printf|fprintf|vprintf|puts|fputs|putchar|fopen|fdopen|fread|fwrite|fflush|perror|popen)\s*\(")

# Header patterns of libraries that a node may lack, and the only folder that may include them.
VENDOR = [
    (re.compile(r"^rte_\w+\.h$"), "DPDK", "transport/port/dpdk"),
    (re.compile(r"^(infiniband|rdma)/"), "libibverbs", "transport/port/verbs"),
    (re.compile(r"^(cuda\w*\.h|cuda/|cub/|thrust/|cooperative_groups|nccl\.h|nvtx)"), "CUDA", "gpu/cuda"),
]

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def under(path, folder):
    return path == folder or path.startswith(folder + "/")


def files(root, suffixes):
    """Paths relative to root, '/'-separated and sorted, of the tree's own files with one of the suffixes."""
    found = []
    for top in TOP_FOLDERS:
        for folder, folders, names in os.walk(os.path.join(root, top)):
            folders[:] = [f for f in folders if not f.startswith(".") and f not in ("build", "__pycache__")]
            for name in names:
                if name.endswith(suffixes):
                    found.append(os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/"))
    return sorted(found)


def lines(root, path):
    with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
        return file.read().split("\n")


def includes(root, path):
    """(line number, '<' or '"', included name) of every #include of a file."""
    found = []
    for number, line in enumerate(lines(root, path), 1):
        match = INCLUDE.match(line)
        if match:
            found.append((number, match.group(1), match.group(2)))
    return found


def resolve(root, bracket, name):
    """The file of this tree that an #include names, or None if it is not one of ours."""
    if name in INSTALLED:
        return INSTALLED[name]
    if os.path.isfile(os.path.join(root, name)) or os.path.isfile(os.path.join(root, name + ".in")):
        return name
    return None


def room_of(path):
    return max((room for room in ROOMS if under(path, room)), key=len, default=None)


def code_only(text):
    """The text with comments and literals blanked and line breaks kept."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)), text)


def check_floors(root):
    """who includes whom"""
    bad = []
    for path in files(root, CODE):
        room = room_of(path)
        for number, bracket, name in includes(root, path):
            target = resolve(root, bracket, name)
            if target is None:
                if bracket == '"':
                    bad.append(f'{path}:{number}: "{name}" is no file relative to the repository root')
                continue
            if room is None:
                bad.append(f"{path}:{number}: {path} lies in no room of the house")
                continue
            if not any(under(target, allowed) for allowed in [room] + ROOMS[room]):
                bad.append(f"{path}:{number}: {room} must not know {target}")
            # A port knows port.h and itself, no other port: each can be left out of a build.
            parts, target_parts = path.split("/"), target.split("/")
            if (room == "transport/port" and room_of(target) == room and len(target_parts) > 3
                    and target_parts[:3] != parts[:3]):
                bad.append(f"{path}:{number}: one port must not know another ({target})")
    return bad


def check_pure(root):
    """transport/wire and transport/exchange make no system call, start no thread, take no lock, read no clock"""
    bad = []
    for path in files(root, CODE):
        if not any(under(path, room) for room in PURE):
            continue
        # Headers of lower floors count as well: what they include, this file includes.
        seen, todo = {path}, [(path, "")]
        while todo:
            current, via = todo.pop()
            for number, bracket, name in includes(root, current):
                target = resolve(root, bracket, name)
                if target is None:
                    if IMPURE_HEADER.match(name):
                        bad.append(f"{path if via else current}:{via or number}: pure code reaches <{name}>"
                                   + (f" through {current}" if via else ""))
                elif target not in seen and target not in PURE_MAY and os.path.isfile(os.path.join(root, target)):
                    seen.add(target)
                    todo.append((target, via or number))
        text = code_only("\n".join(lines(root, path)))
        for match in IMPURE_CALL.finditer(text):
            number = text.count("\n", 0, match.start()) + 1
            bad.append(f"{path}:{number}: pure code uses {match.group(0).strip()}")
    return bad


def check_vendor(root):
    """DPDK, verbs and CUDA headers only in their own folders"""
    bad = []
    for path in files(root, CODE):
        if under(path, "tests"):
            continue
        for number, _, name in includes(root, path):
            for pattern, library, folder in VENDOR:
                if pattern.match(name) and not under(path, folder):
                    bad.append(f"{path}:{number}: {library} header <{name}> outside {folder}")
    return bad


def check_length(root):
    """no file of code is longer than MAX_LINES"""
    bad = []
    for path in files(root, TEXT) + scripts(root):
        count = len(lines(root, path)) - 1
        if count > MAX_LINES:
            bad.append(f"{path}:{count}: {count} lines, the limit is {MAX_LINES}; split it by concern")
    return bad


def check_form(root):
    """headers have #pragma once; no code is marked as unfinished"""
    bad = []
    unfinished = re.compile(r"\b(TO" r"DO|FIX" r"ME)\b")
    for path in files(root, TEXT) + scripts(root):
        text = lines(root, path)
        if path.endswith((".h", ".hpp", ".cuh")) and "#pragma once" not in text:
            # The C header is read by compilers that the project does not choose.
            if not any(line.startswith("#ifndef SLUICE_") for line in text):
                bad.append(f"{path}:1: no #pragma once")
        for number, line in enumerate(text, 1):
            if unfinished.search(line):
                bad.append(f"{path}:{number}: unfinished: {line.strip()}")
    return bad


def scripts(root):
    folder = os.path.join(root, "scripts")
    if not os.path.isdir(folder):
        return []
    # Files with a suffix are parts of a script (a Python module, a template), not scripts.
    return sorted("scripts/" + n for n in os.listdir(folder)
                  if "." not in n and os.path.isfile(os.path.join(folder, n)))


def check_scripts(root):
    """every script is executable and answers --help with its manual"""
    bad = []
    for path in scripts(root):
        full = os.path.join(root, path)
        if not os.access(full, os.X_OK):
            bad.append(f"{path}:1: not executable")
            continue
        try:
            result = subprocess.run([full, "--help"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as error:
            bad.append(f"{path}:1: --help: {error}")
            continue
        if result.returncode != 0:
            bad.append(f"{path}:1: --help exits with {result.returncode}")
        elif len(result.stdout.strip().splitlines()) < 2:
            bad.append(f"{path}:1: --help prints no manual")
    return bad


RULES = {
    "floors": check_floors,
    "pure": check_pure,
    "vendor": check_vendor,
    "length": check_length,
    "form": check_form,
    "scripts": check_scripts,
}


def main(arguments):
    if arguments in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if arguments == ["--list"]:
        for name, check in RULES.items():
            print(f"{name:10} {check.__doc__}")
        return 0
    if len(arguments) != 2 or arguments[0] not in RULES:
        print(__doc__, file=sys.stderr)
        return 2
    rule, root = arguments
    if not os.path.isfile(os.path.join(root, "CMakeLists.txt")):
        print(f"{root} is not the root of the source tree", file=sys.stderr)
        return 2
    bad = RULES[rule](root)
    for line in bad:
        print(line)
    print(f"{rule}: {RULES[rule].__doc__}: {len(bad)} violations")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
