"""scripts/wheel in a clean venv: nothing but the wheel is there, the library comes from inside it, and a world of one rank
works against a daemon."""
import os
import subprocess
import sys
import zipfile

import pytest

import nodes

pytestmark = pytest.mark.skipif(nodes.what_is_missing() is not None, reason=str(nodes.what_is_missing()))

PROGRAM = """
import sys
import sluice, sluice._abi
assert sluice.__version__ == "0.1.0" and sluice.library_version() == "0.1.0"
assert sluice._abi.candidates()[0].startswith(sys.prefix), sluice._abi.candidates()
for name in ("torch", "numpy"):
    assert name not in sys.modules
    try:
        __import__(name)
        raise SystemExit(name + " is here: the environment is not clean")
    except ImportError:
        pass
import array
with sluice.open() as connection, connection.join("wheel", 0, 1) as job:
    data = array.array("f", range(1000))
    out, report = job.allreduce(data, kind="mean")
    assert out.tolist() == [float(x) for x in range(1000)] and report.ok
    assert job.all_gather(b"abc") == [b"abc"]
    job.barrier()
print("fine", job.nodes)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    result = subprocess.run([os.path.join(nodes.ROOT, "scripts", "wheel"), "--library", nodes.library(), "--output", folder],
                            capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_its_tag_and_content(wheel):
    assert os.path.basename(wheel).startswith("sluice-0.1.0-py3-none-linux_")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sluice/libsluice.so.0" in names and "sluice/torch/_hook.py" in names
    assert not [name for name in names if name.endswith(".pyc") or "test" in name]


def test_it_works_in_a_clean_environment(wheel, tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120, capture_output=True)
    subprocess.run([venv / "bin" / "pip", "install", "--no-index", "--disable-pip-version-check", wheel], check=True,
                   timeout=120, capture_output=True)
    with nodes.Daemons(1) as daemons:
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(("SLUICE_", "PYTHON"))}
        environment["SLUICE_SOCKET"] = daemons.sockets[0]
        result = subprocess.run([venv / "bin" / "python", "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True,
                                text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "fine 1"
