"""The C interface of libsluice (lib/client/sluice.h) for ctypes: structures, prototypes, and finding the library.

Nothing here has an opinion; `_core` makes Python of it. The layouts are checked against the header by
tests/python/abi_test.py. ctypes releases the GIL during every call.
"""
import ctypes
import os
import sys
import threading

# The interface that the structures below describe. Before 1.0 a minor version may change it.
VERSION = (0, 1)
LIBRARY = "libsluice.so.0"
CARD_BYTES = 192
KEY_BYTES = 32
NO_NODE = 0xFFFFFFFF  # worst_node: none
MAX_RANGES = 16  # missing ranges that a report lists
TEXT_BYTES = 496

# enum sluice_error
ERRORS = {
    -1: "INVALID",
    -2: "UNREACHABLE",
    -3: "REFUSED",
    -4: "TIMEOUT",
    -5: "DAEMON_LOST",
    -6: "NO_MEMORY",
    -7: "FORKED",
    -8: "ABI",
    -9: "FULL",
    -10: "SYSTEM",
    -11: "FAILED",
}

# enum sluice_status; 16 and above are errors.
STATUSES = {
    0: "OK",
    1: "CORRECTED",
    2: "INCOMPLETE",
    3: "DIVERGED",
    4: "APPROXIMATED",
    16: "MISMATCH",
    17: "OP_TIMEOUT",
    18: "PEER_LOST",
    19: "RANK_TIMEOUT",
    20: "VIEW_CHANGED",
    21: "ABORTED",
    22: "DAEMON_LOST",
    23: "INVALID",
    24: "NO_MEMORY",
    26: "REFUSED",
}
OK, INCOMPLETE, DIVERGED, FIRST_ERROR_STATUS = 0, 2, 3, 16

# enum sluice_type: name -> (value, bytes of one element)
TYPES = {
    "f32": (0, 4),
    "f16": (1, 2),
    "bf16": (2, 2),
    "f64": (3, 8),
    "i32": (4, 4),
    "i64": (5, 8),
    "u8": (6, 1),
}
KINDS = {"sum": 0, "mean": 1}
CLASSES = {"exact": 0, "consistent": 1, "best_effort": 2}

EVENT_RESULT, EVENT_RESOLVED = 1, 2


class Card(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * CARD_BYTES)]


class JoinOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("job", ctypes.c_char_p),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("local_ranks", ctypes.c_uint32),
        ("arena_bytes", ctypes.c_uint64),
        ("max_op_bytes", ctypes.c_uint64),
        ("deadline_us", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_int32),
        ("cards", ctypes.POINTER(Card)),
        ("key", ctypes.POINTER(ctypes.c_ubyte)),
        ("generation", ctypes.c_uint32),
    ]


class JobInfo(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("nodes", ctypes.c_uint32),
        ("node", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
        ("payload_bytes", ctypes.c_uint32),
        ("arena_bytes", ctypes.c_uint64),
        ("max_op_bytes", ctypes.c_uint64),
        ("carry_over", ctypes.c_uint32),
        ("node_name", ctypes.c_char * 64),
        ("node_address", ctypes.c_char * 64),
        ("corrects", ctypes.c_uint32),
    ]


class OpOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("op_class", ctypes.c_int),
        ("tag", ctypes.c_uint64),
        ("deadline_us", ctypes.c_uint32),
        ("loss_scale", ctypes.c_float),
    ]


class Range(ctypes.Structure):
    _fields_ = [("first", ctypes.c_uint64), ("count", ctypes.c_uint64), ("owner", ctypes.c_uint32)]


class Report(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("events", ctypes.c_uint32),
        ("tag", ctypes.c_uint64),
        ("op_seq", ctypes.c_uint32),
        ("blocks_expected", ctypes.c_uint32),
        ("blocks_received", ctypes.c_uint32),
        ("blocks_skipped", ctypes.c_uint32),
        ("blocks_uncounted", ctypes.c_uint32),
        ("blocks_repaired", ctypes.c_uint32),
        ("blocks_filled", ctypes.c_uint32),
        ("blocks_discarded", ctypes.c_uint32),
        ("total_us", ctypes.c_uint32),
        ("wait_us", ctypes.c_uint32),
        ("lag_us", ctypes.c_uint32),
        ("push_us", ctypes.c_uint32),
        ("late_nodes", ctypes.c_uint32),
        ("worst_node", ctypes.c_uint32),
        ("bytes_sent", ctypes.c_uint64),
        ("missing_total", ctypes.c_uint32),
        ("missing_count", ctypes.c_uint32),
        ("missing", Range * MAX_RANGES),
        ("text", ctypes.c_char * TEXT_BYTES),
        ("blocks_corrected", ctypes.c_uint32),
    ]


Handle = ctypes.c_void_p
OpNumber = ctypes.c_uint64

# name: (result, arguments)
PROTOTYPES = {
    "sluice_version": (ctypes.c_char_p, []),
    "sluice_error_name": (ctypes.c_char_p, [ctypes.c_int]),
    "sluice_status_name": (ctypes.c_char_p, [ctypes.c_int]),
    "sluice_last_error": (ctypes.c_char_p, []),
    "sluice_open": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(Handle)]),
    "sluice_close": (None, [Handle]),
    "sluice_card_get": (ctypes.c_int, [Handle, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_int,
                                       ctypes.POINTER(Card)]),
    "sluice_card_renew": (ctypes.c_int, [Handle, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32,
                                         ctypes.c_int, ctypes.POINTER(Card)]),
    "sluice_key_generate": (ctypes.c_int, [ctypes.POINTER(ctypes.c_ubyte)]),
    "sluice_join": (ctypes.c_int, [Handle, ctypes.POINTER(JoinOptions), ctypes.POINTER(Handle)]),
    "sluice_leave": (ctypes.c_int, [Handle, ctypes.c_int]),
    "sluice_abort": (ctypes.c_int, [Handle]),
    "sluice_job_get_info": (ctypes.c_int, [Handle, ctypes.POINTER(JobInfo)]),
    "sluice_alloc": (ctypes.c_void_p, [Handle, ctypes.c_size_t]),
    "sluice_free": (None, [Handle, ctypes.c_void_p]),
    "sluice_allreduce": (ctypes.c_int, [Handle, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int,
                                        ctypes.c_int, ctypes.POINTER(OpOptions), ctypes.POINTER(OpNumber)]),
    "sluice_broadcast": (ctypes.c_int, [Handle, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32,
                                        ctypes.POINTER(OpNumber)]),
    "sluice_all_gather": (ctypes.c_int, [Handle, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64,
                                         ctypes.POINTER(OpNumber)]),
    "sluice_flush": (ctypes.c_int, [Handle, ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p,
                                    ctypes.c_int]),
    "sluice_tag_retire": (ctypes.c_int, [Handle, ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_uint64,
                                         ctypes.c_void_p, ctypes.c_int]),
    "sluice_take_correction": (ctypes.c_int, [Handle, ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_uint64,
                                              ctypes.c_void_p, ctypes.c_int]),
    "sluice_barrier": (ctypes.c_int, [Handle, ctypes.c_int]),
    "sluice_wait": (ctypes.c_int, [Handle, OpNumber, ctypes.c_int, ctypes.POINTER(Report)]),
    "sluice_wait_result": (ctypes.c_int, [Handle, OpNumber, ctypes.c_int, ctypes.POINTER(Report)]),
}

_lock = threading.Lock()
_library = None


def candidates():
    """Where the library is looked for, in order: $SLUICE_LIBRARY alone if it is set; beside this file (the wheel);
    where the system's loader looks."""
    chosen = os.environ.get("SLUICE_LIBRARY")
    if chosen:
        return [chosen]
    folder = os.path.dirname(os.path.abspath(__file__))
    beside = os.path.join(folder, LIBRARY)
    return ([beside] if os.path.exists(beside) else []) + [LIBRARY]


def load():
    """The loaded library, once per process. ImportError with a line that says what to do when there is none, or
    when it is of another version."""
    global _library
    with _lock:
        if _library is None:
            _library = _load()
        return _library


def _load():
    failures = []
    for path in candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            failures.append(str(error))
            continue
        try:
            for name, (result, arguments) in PROTOTYPES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise ImportError(f"sluice: {path} is not a usable libsluice: {error}") from None
        version = library.sluice_version().decode()
        if tuple(int(part) for part in version.split(".")[:2]) != VERSION:
            raise ImportError(f"sluice: {path} is version {version}, this package needs {VERSION[0]}.{VERSION[1]}; install "
                              "package and library of one version, or set SLUICE_LIBRARY")
        return library
    raise ImportError(f"sluice: no {LIBRARY} found ({'; '.join(failures)}); install libsluice0, use the wheel (which has it "
                      f"inside), or set SLUICE_LIBRARY to its path [python {sys.version.split()[0]}]")
