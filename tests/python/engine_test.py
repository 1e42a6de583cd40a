"""The engine of sluice.torch against a job in this process: order, parts, full arenas and windows, failures, late fates.

FakeJob answers as libsluice does (docs: lib/client/sluice.h), for a world of one, when the test says so.
"""
import ctypes
import threading
import time

import pytest

pytest.importorskip("torch")
import torch  # noqa: E402

from sluice import ArenaFull, Mismatch, Timeout, TooManyOps, _abi, _core  # noqa: E402
from sluice._core import Job, Report  # noqa: E402
from sluice.torch import _codec, _names, _settings, _sparse  # noqa: E402
from sluice.torch._engine import Engine, Work  # noqa: E402
from sluice.torch._stats import Stats, quantile  # noqa: E402


class FakeBuffer:
    def __init__(self, job, nbytes):
        self.memory = ctypes.create_string_buffer(nbytes)
        self.address, self.nbytes, self.job = ctypes.addressof(self.memory), nbytes, job

    def free(self):
        with self.job.lock:
            assert self in self.job.buffers, "freed twice"
            self.job.buffers.remove(self)


class FakeJob:
    """Ops end when `gate` is set; `resolve` says whether their fate comes with the result."""

    name, rank, world_size = "fake", 0, 1
    failure = Job.failure
    _where = Job._where

    def __init__(self, max_op_bytes=1 << 20, arena=1 << 24, window=64):
        self.max_op_bytes, self.arena, self.window = max_op_bytes, arena, window
        self.lock, self.gate, self.fates = threading.Lock(), threading.Event(), threading.Event()
        self.gate.set()
        self.fates.set()
        self.buffers, self.submitted, self.open, self.status, self.most_open = [], [], {}, {}, 0

    def alloc(self, nbytes):
        with self.lock:
            if sum(buffer.nbytes for buffer in self.buffers) + nbytes > self.arena:
                raise ArenaFull("arena full: sizes so and so")
            buffer = FakeBuffer(self, nbytes)
            self.buffers.append(buffer)
            return buffer

    def submit_allreduce(self, contribution, result, count, dtype, kind, op_class, tag, deadline, loss_scale):
        with self.lock:
            if len(self.open) >= self.window:
                raise TooManyOps("64 ops are open")
            op = len(self.submitted) + 1
            self.submitted.append((tag, count, dtype, kind, op_class, bytes(contribution.memory)))
            self.open[op] = (contribution, result)
            self.most_open = max(self.most_open, len(self.open))
            return op

    def _report(self, op, events):
        raw = _abi.Report(status=self.status.get(op, 0), events=events, op_seq=op, total_us=1500, blocks_expected=4,
                          blocks_received=4, worst_node=_abi.NO_NODE)
        raw.text = b"rank 1 has float32 x 7" if op in self.status else b""
        return Report(raw)

    def wait_result(self, op, timeout, check):
        if not self.gate.wait(timeout):
            raise Timeout("no result yet")
        contribution, result = self.open[op]
        ctypes.memmove(result.address, contribution.address, min(result.nbytes, contribution.nbytes))
        if not self.fates.is_set():
            return self._report(op, 1)
        del self.open[op]
        return self._report(op, 3)

    def wait(self, op, timeout, check):
        if not self.fates.wait(timeout):
            raise Timeout("no fate yet")
        with self.lock:
            del self.open[op]
        return self._report(op, 3)


@pytest.fixture
def make():
    engines = []

    def build(job, timeout=10.0):
        engine = Engine(job, "consistent", None, timeout, Stats(), lambda part, report: None)
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.job.gate.set()
        engine.stop()


def send(engine, tensor, tag=7, delivered=None):
    """Submits a float tensor; returns (work, event of its delivery)."""
    event = threading.Event()

    def deliver(work):
        if delivered is not None:
            delivered.append(tag)
        event.set()

    work = Work(tensor.data_ptr(), tensor.numel() * 4, deliver, keep=tensor)
    cuts = engine.parts_of(work.nbytes)
    tags = [_names.part_tag(tag, index, len(cuts)) for index in range(len(cuts))]
    engine.submit(work, tensor.numel(), "f32", tags, cuts, "p", 0.0)
    return work, event


def test_a_bucket_goes_and_comes(make):
    job = FakeJob()
    engine = make(job)
    tensor = torch.arange(1000, dtype=torch.float32)
    work, event = send(engine, tensor)
    assert event.wait(5) and work.error is None
    assert torch.equal(tensor, torch.arange(1000, dtype=torch.float32))
    assert job.submitted[0][:5] == (7, 1000, "f32", "mean", "consistent")
    assert not job.buffers  # both slots came back
    report = engine.stats.report()
    assert report["ops"] == 1 and report["bytes"] == 4000 and report["round_ms"]["p50"] == 1.5


def test_an_empty_bucket_is_an_op(make):
    job = FakeJob()
    engine = make(job)
    _, event = send(engine, torch.empty(0))
    assert event.wait(5) and job.submitted[0][1] == 0


def test_a_large_bucket_is_cut_alike_on_all_ranks(make):
    job = FakeJob(max_op_bytes=1024)
    engine = make(job)
    tensor = torch.arange(1000, dtype=torch.float32)
    _, event = send(engine, tensor.clone())
    assert event.wait(5)
    sent = b"".join(entry[5][:entry[1] * 4] for entry in job.submitted)
    assert sent == tensor.numpy().tobytes()
    assert all(entry[1] * 4 <= 1024 for entry in job.submitted)
    assert len({entry[0] for entry in job.submitted}) == len(job.submitted) == 4  # tags of their own


@pytest.mark.parametrize("nbytes", [0, 4, 1023, 1024, 1028, 4096, 65536 + 4])
def test_cuts_tile_the_bucket(make, nbytes):
    engine = make(FakeJob(max_op_bytes=1024))
    cuts = engine.parts_of(nbytes)
    assert sum(size for _, size in cuts) == nbytes
    position = 0
    for offset, size in cuts:
        assert offset == position and offset % 64 == 0 and size <= 1024
        position += size


def test_results_come_in_order_and_submission_does_not_wait(make):
    job, order = FakeJob(), []
    engine = make(job)
    job.gate.clear()
    events = [send(engine, torch.ones(10), tag, order)[1] for tag in (3, 1, 2)]
    assert len(job.submitted) == 3 and not order
    job.gate.set()
    assert all(event.wait(5) for event in events) and order == [3, 1, 2]


def test_a_full_arena_waits_for_the_oldest_op(make):
    job = FakeJob(arena=2 * 4096 + 100)
    engine = make(job)
    job.gate.clear()
    first = send(engine, torch.ones(1024))[1]
    threading.Timer(0.2, job.gate.set).start()
    began = time.monotonic()
    second = send(engine, torch.ones(1024))[1]
    assert time.monotonic() - began > 0.1 and first.is_set()
    assert second.wait(5) and not job.buffers


def test_a_full_window_waits_for_the_oldest_op(make):
    job = FakeJob(window=2)
    engine = make(job)
    job.gate.clear()
    threading.Timer(0.2, job.gate.set).start()
    events = [send(engine, torch.ones(8), tag)[1] for tag in range(1, 6)]
    assert all(event.wait(5) for event in events) and job.most_open == 2


def test_a_bucket_that_never_fits_is_an_error_at_once(make):
    engine = make(FakeJob(arena=100))
    began = time.monotonic()
    with pytest.raises(ArenaFull, match="so and so"):
        send(engine, torch.ones(1024))
    assert time.monotonic() - began < 5


def test_late_fates_hold_the_contribution_only(make):
    job = FakeJob()
    engine = make(job)
    job.fates.clear()
    _, event = send(engine, torch.ones(16))
    assert event.wait(5) and len(job.buffers) == 1  # the result slot is back, the contribution is the daemon's
    job.fates.set()
    end = time.monotonic() + 5
    while job.buffers and time.monotonic() < end:
        time.sleep(0.01)
    assert not job.buffers


def test_slots_that_wait_for_their_fate_count_as_full(make):
    job = FakeJob(arena=3 * 4096 + 100)
    engine = make(job)
    job.fates.clear()
    assert send(engine, torch.ones(1024))[1].wait(5)
    assert send(engine, torch.ones(1024))[1].wait(5)
    threading.Timer(0.2, job.fates.set).start()
    assert send(engine, torch.ones(1024))[1].wait(5)


def test_a_failed_op_fails_all_that_follow_with_its_text(make):
    job = FakeJob()
    engine = make(job)
    job.gate.clear()
    job.status[1] = 16
    pairs = [send(engine, torch.ones(4), tag) for tag in (1, 2, 3)]
    job.gate.set()
    assert all(event.wait(5) for _, event in pairs)
    for work, _ in pairs:
        assert isinstance(work.error, Mismatch)
    assert "job fake, rank 0, op 1, tag 0000000000000001 (p): MISMATCH: rank 1 has float32 x 7" in str(pairs[0][0].error)
    with pytest.raises(Mismatch):
        send(engine, torch.ones(4))


def test_an_op_without_a_sign_times_out_with_its_name(make):
    job = FakeJob()
    engine = make(job, timeout=0.3)
    job.gate.clear()
    work, event = send(engine, torch.ones(4))
    assert event.wait(5) and isinstance(work.error, Timeout) and "op 1, tag 0000000000000007 (p)" in str(work.error)


def test_closing_fails_what_is_in_flight(make):
    job = FakeJob()
    engine = make(job)
    job.gate.clear()
    work, event = send(engine, torch.ones(4))
    engine.stop()
    assert event.wait(5) and "closed" in str(work.error)


# --- Tags


def parameters(*shapes):
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def test_a_tag_is_the_names_shapes_and_order():
    weight, bias = parameters((3, 4), (3,))
    buffer = torch.zeros(15)
    names = _names.Names()
    tag = names.tag([weight, bias], buffer)
    assert tag == names.tag([weight, bias], torch.zeros(15)) != 0
    assert tag != names.tag([bias, weight], buffer)
    assert tag != names.tag([weight], buffer)
    assert tag != names.tag([weight, bias], buffer.half())
    # Another process that sees the same buckets first makes the same tag.
    other = _names.Names()
    assert other.tag(parameters((3, 4), (3,)), buffer) == tag
    assert _names.Names().tag(parameters((4, 3), (3,)), buffer) != tag


def test_model_names_do_not_depend_on_order():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    names, other = _names.Names(), _names.Names()
    names.learn(model)
    other.learn(model)
    other.tag([model[1].weight], torch.zeros(6))
    bucket = [model[0].weight, model[0].bias]
    assert names.tag(bucket, torch.zeros(15)) == other.tag(bucket, torch.zeros(15))
    assert names.describe([model[0].weight]) == "0.weight"


# --- Sparse


@pytest.mark.parametrize("sparse_dim", [1, 2, 3])
@pytest.mark.parametrize("nnz", [0, 5])
def test_densify_and_back(sparse_dim, nnz):
    shape = (6, 4, 3)
    torch.manual_seed(nnz)
    indices = torch.stack([torch.randint(0, shape[d], (nnz,)) for d in range(sparse_dim)])
    tensor = torch.sparse_coo_tensor(indices, torch.randn(nnz, *shape[sparse_dim:]), shape)
    back = _sparse.sparsify(_sparse.densify(tensor), shape, sparse_dim)
    assert back.is_coalesced() and back.sparse_dim() == sparse_dim
    assert torch.equal(back.indices(), tensor.coalesce().indices())
    assert torch.equal(back.values(), tensor.coalesce().values())


def test_a_touched_row_of_zeros_stays_touched():
    tensor = torch.sparse_coo_tensor([[2]], torch.zeros(1, 3), (5, 3))
    assert _sparse.sparsify(_sparse.densify(tensor), (5, 3), 1).indices().tolist() == [[2]]


# --- Settings and figures


def settings(**changes):
    return _settings.make(**{**dict(job="j", deadline="auto", op_class="consistent", fallback=None, timeout=1.0, socket=None,
                                    max_bucket_bytes=None, arena_bytes=None, on_incomplete="resync", model=None), **changes})


@pytest.mark.parametrize("changes, text", [
    ({"job": "a b"}, "printable ASCII"), ({"job": ""}, "printable ASCII"), ({"job": "x" * 64}, "1 to 63"),
    ({"op_class": "fast"}, "'consistent', 'exact' and 'best_effort'"),
    ({"fallback": "x"}, "None .raise an error. and 'allreduce'"), ({"on_peer_loss": "x"}, "'fail' and 'continue'"),
    ({"rejoin_timeout": 0}, "rejoin_timeout"),
    ({"deadline": "soon"}, "'auto', or seconds"), ({"deadline": 0}, "'auto', or seconds"),
    ({"timeout": 0}, "seconds above 0"), ({"on_incomplete": "correct"}, "'resync' and 'ignore'"),
    ({"max_bucket_bytes": 3}, "at least 64"),
])
def test_a_wrong_setting_is_named(changes, text):
    with pytest.raises(Exception, match="sluice: .*" + text):
        settings(**changes)


def test_the_arena_fits_the_model():
    model = torch.nn.Linear(1000, 1000)  # 4,004,000 bytes of gradients
    made = settings(model=model)
    assert made.max_op_bytes == -(-(25 * _settings.MIB + 4_000_000) // 64) * 64
    assert made.arena_bytes == 3 * (4_004_000 + made.max_op_bytes), "a contribution that waits for the next step has room, too"
    assert settings(model=model, op_class="exact").arena_bytes == 2 * (4_004_000 + made.max_op_bytes)
    assert settings().arena_bytes == 0 and settings().max_op_bytes == 64 * _settings.MIB


def test_quantiles():
    assert quantile([], 0.5) == 0.0 and quantile([3, 1, 2], 0.5) == 2 and quantile(range(100), 0.99) == 99


def test_time_units():
    assert _core._milliseconds(0.0001) == 1 and _core._milliseconds(0) == 0 and _core._microseconds(0.005) == 5000
    with pytest.raises(Exception, match="negative"):
        _core._milliseconds(-1)


# --- State dicts on their way


@pytest.mark.parametrize("make_optimizer", [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True),
    lambda p: torch.optim.AdamW(p, 1 / 3), lambda p: torch.optim.RMSprop(p, 0.01)], ids=["SGD", "Adam", "AdamW", "RMSprop"])
def test_optimizer_states_survive_the_codec(make_optimizer):
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    state = optimizer.state_dict()
    text, tensors = _codec.encode(state)
    build, blank = _codec.decode(text)
    for empty, tensor in zip(blank, tensors):
        empty.copy_(tensor)
    built = build()
    assert built["param_groups"] == state["param_groups"]
    assert list(built["state"]) == list(state["state"])
    for key, entry in state["state"].items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(built["state"][key][name]), torch.as_tensor(value)), name
    make_optimizer(torch.nn.Linear(3, 2).parameters()).load_state_dict(built)


def test_the_codec_keeps_types():
    value = {1: (True, None, 0.1), "a": [float("inf"), -0.0, 2**60], (1, 2): {}, "t": torch.tensor(3, dtype=torch.bool)}
    build, blank = _codec.decode(_codec.encode(value)[0])
    blank[0].fill_(True)
    built = build()
    assert list(built) == [1, "a", (1, 2), "t"] and built[1] == (True, None, 0.1) and built["a"] == value["a"]
    assert str(built["a"][1]) == "-0.0" and built["t"].dtype == torch.bool and built["t"].shape == ()


@pytest.mark.parametrize("value", [{"x": object()}, [torch.zeros(2).to_sparse()], {"f": print}])
def test_the_codec_refuses_what_it_does_not_know(value):
    with pytest.raises(TypeError):
        _codec.encode(value)
