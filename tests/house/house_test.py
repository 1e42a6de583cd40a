"""Proves that each rule of house.py fails on a planted violation, names it, and passes on a tree without one."""
import os
import tempfile
import unittest

import house

CLEAN = {
    "CMakeLists.txt": "project(x)\n",
    "base/result.h": "#pragma once\n#include <string>\n",
    "base/assert.h": "#pragma once\n#include <cstdio>\n",
    "base/clock.h": "#pragma once\n#include <time.h>\n",
    "base/ipc/ring.h": '#pragma once\n#include "base/result.h"\n',
    "transport/wire/header.h": '#pragma once\n#include "base/result.h"\n#include "base/assert.h"\n// a comment may say std::mutex, "close", <thread>\n',
    "transport/exchange/op.cc": '#include "transport/wire/header.h"\nvoid f() { shard.close(); Shard::close(); }\n',
    "transport/port/port.h": "#pragma once\n",
    "transport/port/sim/sim.h": '#pragma once\n#include "transport/port/port.h"\n#include "base/clock.h"\n',
    "transport/port/udp/udp.cc": '#include "transport/port/port.h"\n#include <sys/socket.h>\n',
    "transport/port/dpdk/dpdk.cc": "#include <rte_ethdev.h>\n",
    "transport/port/verbs/verbs.cc": "#include <infiniband/verbs.h>\n",
    "gpu/codec.h": '#pragma once\n#include "base/result.h"\n',
    "gpu/cuda/kernel.cu": "#include <cuda_runtime.h>\n#include <cub/cub.cuh>\n",
    "config/config.h": "#pragma once\n",
    "lib/client/sluice.h": "#ifndef SLUICE_H\n#define SLUICE_H\n#endif\n",
    "lib/client/sluice.hpp": '#pragma once\n#include "sluice.h"\n',
    "lib/client/client.cc": '#include "lib/client/sluice.h"\n#include "gpu/codec.h"\n#include "base/ipc/ring.h"\n',
    "daemon/main.cc": '#include "config/config.h"\n#include "transport/exchange/op.cc"\n#include "base/clock.h"\n',
    "tools/top.cc": '#include "lib/client/sluice.h"\n#include "daemon/main.cc"\n',
    "tests/unit/x_test.cc": '#include "transport/port/sim/sim.h"\n#include "gpu/codec.h"\n',
    "scripts/good": "#!/bin/sh\necho good: does good\necho usage: good\n",
}

# rule, the planted file, its content, the beginning of the violation that must be reported
PLANTED = [
    ("floors", "base/up.h", '#pragma once\n#include "config/config.h"\n', "base/up.h:2: base must not know config/"),
    ("floors", "gpu/bad.cc", '#include "config/config.h"\n', "gpu/bad.cc:1: gpu must not know config/"),
    ("floors", "config/bad.cc", '#include "transport/port/port.h"\n', "config/bad.cc:1: config must not know transport/"),
    ("floors", "lib/bad.cc", '#include "transport/wire/header.h"\n', "lib/bad.cc:1: lib must not know transport/"),
    ("floors", "lib/angle.cc", "#include <config/config.h>\n", "lib/angle.cc:1: lib must not know config/"),
    ("floors", "daemon/bad.cc", '\n#include "lib/client/sluice.h"\n', "daemon/bad.cc:2: daemon must not know lib/"),
    ("floors", "daemon/gpu.cc", '#include "gpu/codec.h"\n', "daemon/gpu.cc:1: daemon must not know gpu/"),
    ("floors", "transport/wire/bad.cc", '#include "transport/exchange/op.cc"\n', "transport/wire/bad.cc:1: transport/wire must"),
    ("floors", "transport/exchange/bad.cc", '#include "transport/port/port.h"\n', "transport/exchange/bad.cc:1: transport/exch"),
    ("floors", "transport/port/bad.cc", '#include "transport/wire/header.h"\n', "transport/port/bad.cc:1: transport/port must"),
    ("floors", "transport/port/udp/bad.cc", '#include "transport/port/sim/sim.h"\n', "transport/port/udp/bad.cc:1: one port must"),
    ("floors", "base/sibling.cc", '#include "result.h"\n', 'base/sibling.cc:1: "result.h" is no file relative'),
    ("pure", "transport/wire/bad.cc", "#include <sys/socket.h>\n", "transport/wire/bad.cc:1: pure code reaches <sys/socket.h>"),
    ("pure", "transport/wire/bad.cc", "#include <mutex>\n", "transport/wire/bad.cc:1: pure code reaches <mutex>"),
    ("pure", "transport/exchange/bad.cc", "\n# include <thread>\n", "transport/exchange/bad.cc:2: pure code reaches <thread>"),
    ("pure", "transport/exchange/bad.cc", '#include "base/clock.h"\n', "transport/exchange/bad.cc:1: pure code reaches <time.h> through"),
    ("pure", "transport/exchange/bad.cc", "int x;\nauto t = std::chrono::steady_clock::now();\n", "transport/exchange/bad.cc:2: pure code uses steady_clock"),
    ("pure", "transport/exchange/bad.cc", "void f() { ::close(3); }\n", "transport/exchange/bad.cc:1: pure code uses ::close("),
    ("pure", "transport/exchange/bad.cc", "auto t = time(nullptr);\n", "transport/exchange/bad.cc:1: pure code uses time("),
    ("vendor", "daemon/bad.cc", "#include <rte_mbuf.h>\n", "daemon/bad.cc:1: DPDK header"),
    ("vendor", "transport/port/udp/bad.cc", "#include <infiniband/verbs.h>\n", "transport/port/udp/bad.cc:1: libibverbs header"),
    ("vendor", "lib/client/bad.cc", "#include <cuda_runtime.h>\n", "lib/client/bad.cc:1: CUDA header"),
    ("length", "base/long.cc", "\n" * 601, "base/long.cc:601: 601 lines"),
    ("length", "lib/python/long.py", "\n" * 601, "lib/python/long.py:601: 601 lines"),
    ("form", "base/twice.h", "int x;\n", "base/twice.h:1: no #pragma once"),
    ("form", "base/later.cc", "\n// TO" "DO: later\n", "base/later.cc:2: unfinished"),
    ("scripts", "scripts/mute", "#!/bin/sh\nexit 0\n", "scripts/mute:1: --help prints no manual"),
    ("scripts", "scripts/broken", "#!/bin/sh\nexit 3\n", "scripts/broken:1: --help exits with 3"),
]


def plant(root, path, content):
    full = os.path.join(root, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    with open(full, "w", encoding="utf-8") as file:
        file.write(content)
    if path.startswith("scripts/"):
        os.chmod(full, 0o755)


class HouseTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="sluice-house-")
        self.addCleanup(folder.cleanup)
        self.root = folder.name
        for path, content in CLEAN.items():
            plant(self.root, path, content)

    def test_clean_tree_passes_every_rule(self):
        for name, check in house.RULES.items():
            with self.subTest(rule=name):
                self.assertEqual(check(self.root), [])

    def test_every_planted_violation_is_the_one_reported(self):
        for rule, path, content, expected in PLANTED:
            with self.subTest(rule=rule, path=path, content=content[:40]):
                plant(self.root, path, content)
                bad = house.RULES[rule](self.root)
                os.remove(os.path.join(self.root, path))
                self.assertEqual(len(bad), 1, bad)
                self.assertTrue(bad[0].startswith(expected), bad[0])

    def test_script_that_is_not_executable(self):
        os.chmod(os.path.join(self.root, "scripts/good"), 0o644)
        self.assertEqual(house.check_scripts(self.root), ["scripts/good:1: not executable"])

    def test_longest_allowed_file_passes(self):
        plant(self.root, "base/long.cc", "\n" * house.MAX_LINES)
        self.assertEqual(house.check_length(self.root), [])

    def test_every_rule_has_a_planted_violation(self):
        self.assertEqual({rule for rule, *_ in PLANTED}, set(house.RULES))

    def test_exit_status(self):
        plant(self.root, "base/up.h", '#pragma once\n#include "config/config.h"\n')
        self.assertEqual(house.main(["floors", self.root]), 1)
        self.assertEqual(house.main(["length", self.root]), 0)
        self.assertEqual(house.main(["nonsense", self.root]), 2)


if __name__ == "__main__":
    unittest.main()
