"""The ctypes structures of sluice._abi against lib/client/sluice.h: a C program prints every size, offset and value."""
import ctypes
import os
import re
import shutil
import subprocess

import pytest

from sluice import _abi

HEADER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib", "client", "sluice.h")
STRUCTURES = {
    "sluice_card": _abi.Card,
    "sluice_join_options": _abi.JoinOptions,
    "sluice_job_info": _abi.JobInfo,
    "sluice_op_options": _abi.OpOptions,
    "sluice_range": _abi.Range,
    "sluice_report": _abi.Report,
}


def enumerators(prefix, names):
    return {f"{prefix}{name}": value for value, name in names.items()}


CONSTANTS = {
    "SLUICE_SUCCESS": 0,
    **enumerators("SLUICE_ERROR_", _abi.ERRORS),
    **enumerators("SLUICE_", _abi.STATUSES),
    **{f"SLUICE_{name.upper()}": value for name, (value, _) in _abi.TYPES.items()},
    **{f"SLUICE_{name.upper()}": value for name, value in _abi.KINDS.items()},
    **{f"SLUICE_{name.upper()}": value for name, value in _abi.CLASSES.items()},
    "SLUICE_EVENT_RESULT": _abi.EVENT_RESULT,
    "SLUICE_EVENT_RESOLVED": _abi.EVENT_RESOLVED,
    "SLUICE_VERSION_MAJOR": _abi.VERSION[0],
    "SLUICE_VERSION_MINOR": _abi.VERSION[1],
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """What a C compiler makes of the header: {"sizeof sluice_report": 968, "sluice_report.size": 0, "SLUICE_OK": 0 ...}"""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang)")
    folder = tmp_path_factory.mktemp("abi")
    lines = []
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("sizeof {name}=%zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field[0]}=%zu\\n", offsetof({name}, {field[0]}));' for field in structure._fields_]
    lines += [f'printf("{name}=%lld\\n", (long long)({name}));' for name in CONSTANTS]
    (folder / "abi.c").write_text(f'#include "{os.path.abspath(HEADER)}"\n#include <stdio.h>\n'
                                  "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
    subprocess.run([compiler, "-std=c11", "-Wall", "-Werror", "-o", folder / "abi", folder / "abi.c"], check=True, timeout=60)
    output = subprocess.run([folder / "abi"], check=True, capture_output=True, text=True, timeout=10).stdout
    return {key: int(value) for key, value in (line.rsplit("=", 1) for line in output.splitlines())}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure(facts, name):
    structure = STRUCTURES[name]
    assert ctypes.sizeof(structure) == facts[f"sizeof {name}"]
    for field in structure._fields_:
        assert getattr(structure, field[0]).offset == facts[f"{name}.{field[0]}"], field[0]


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant(facts, name):
    assert CONSTANTS[name] == facts[name]


def test_every_field_of_the_header_is_there():
    with open(HEADER, encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
    for name, structure in STRUCTURES.items():
        body = re.search(r"typedef struct %s \{(.*?)\} %s;" % (name, name), text, re.S).group(1)
        fields = [re.sub(r"[\s*]|\[.*\]", "", part.split()[-1] if first else part)
                  for declaration in body.split(";") if declaration.strip()
                  for first, part in ((index == 0, part) for index, part in enumerate(declaration.split(",")))]
        assert fields == [field[0] for field in structure._fields_], name


def test_every_function_of_the_header_has_a_prototype():
    with open(HEADER, encoding="utf-8") as file:
        declared = re.findall(r"^SLUICE_API [^(]*?(sluice_\w+)\(", file.read(), re.M)
    assert sorted(declared) == sorted(_abi.PROTOTYPES)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setenv("SLUICE_LIBRARY", "/nowhere/libsluice.so.0")
    with pytest.raises(ImportError, match="/nowhere/libsluice.so.0.*SLUICE_LIBRARY"):
        _abi._load()


def test_a_foreign_library_is_refused(monkeypatch):
    monkeypatch.setenv("SLUICE_LIBRARY", "libc.so.6")
    with pytest.raises(ImportError, match="libc.so.6 is not a usable libsluice"):
        _abi._load()


@pytest.mark.parametrize("enum, known", [
    ("sluice_error", {"SUCCESS": 0, **{f"ERROR_{name}": value for value, name in _abi.ERRORS.items()}}),
    ("sluice_status", {name: value for value, name in _abi.STATUSES.items()}),
    ("sluice_type", {name.upper(): value for name, (value, _) in _abi.TYPES.items()}),
])
def test_every_enumerator_of_the_header_is_known(enum, known):
    with open(HEADER, encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
    body = re.search(r"typedef enum %s \{(.*?)\} %s;" % (enum, enum), text, re.S).group(1)
    assert {name: int(value) for name, value in re.findall(r"SLUICE_(\w+) =\s*(-?\d+)", body)} == known
