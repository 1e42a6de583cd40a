"""The settings of a State: checked when it is made, kept when it is pickled, equal on all ranks."""
import dataclasses
import typing

from .._errors import InvalidArgument

MIB = 1024 * 1024
DEFAULT_OP_BYTES = 64 * MIB  # larger buckets travel in parts
DDP_BUCKET_BYTES = 25 * MIB  # DDP's default bucket_cap_mb
DDP_FIRST_BUCKET_BYTES = MIB  # its first bucket is filled up to this, whatever bucket_cap_mb says
OPS_IN_FLIGHT = 16  # the arena is never asked for more than three times this many of the largest ops
MIN_ARENA_BYTES = 16 * MIB


@dataclasses.dataclass(frozen=True)
class Settings:
    job: str
    op_class: str
    deadline: typing.Optional[float]  # seconds; None: the daemon's setting
    timeout: float
    socket: typing.Optional[str]
    on_incomplete: str
    max_op_bytes: int
    arena_bytes: int  # 0: the library's default
    drift_every: int  # backward passes from one sample of the drift to the next; 0: none
    fallback: typing.Optional[str] = None
    on_peer_loss: str = "fail"
    rejoin_timeout: float = 30.0

    def shared(self):
        """What all ranks must have alike."""
        return {"op_class": self.op_class, "deadline": self.deadline, "max_bucket_bytes": self.max_op_bytes,
                "on_incomplete": self.on_incomplete, "drift_every": self.drift_every, "fallback": self.fallback,
                "on_peer_loss": self.on_peer_loss}


def make(job, deadline, op_class, fallback, timeout, socket, max_bucket_bytes, arena_bytes, on_incomplete, model,
         drift_every=0, on_peer_loss="fail", rejoin_timeout=30.0):
    if not isinstance(job, str) or not 1 <= len(job) <= 63 or any(c in "/ " or not c.isprintable() for c in job) \
            or not job.isascii():
        raise InvalidArgument(f"sluice: job={job!r}: a job's name is 1 to 63 printable ASCII characters without space or slash")
    if op_class not in ("exact", "consistent", "best_effort"):
        raise InvalidArgument(f"sluice: op_class={op_class!r}: one of 'consistent', 'exact' and 'best_effort'")
    if fallback not in (None, "allreduce"):
        raise InvalidArgument(f"sluice: fallback={fallback!r}: one of None (raise an error) and 'allreduce'")
    if on_peer_loss not in ("fail", "continue"):
        raise InvalidArgument(f"sluice: on_peer_loss={on_peer_loss!r}: one of 'fail' and 'continue'")
    if not rejoin_timeout > 0:
        raise InvalidArgument(f"sluice: rejoin_timeout={rejoin_timeout!r}: seconds above 0")
    if on_incomplete not in ("resync", "ignore"):
        raise InvalidArgument(f"sluice: on_incomplete={on_incomplete!r}: one of 'resync' and 'ignore'")
    if not isinstance(drift_every, int) or drift_every < 0:
        raise InvalidArgument(f"sluice: drift_every={drift_every!r}: a number of backward passes, or 0")
    if deadline == "auto":
        deadline = None
    elif not isinstance(deadline, (int, float)) or not 1e-6 <= deadline <= 4294:
        raise InvalidArgument(f"sluice: deadline={deadline!r}: 'auto', or seconds from 0.000001 to 4294")
    if not timeout > 0:
        raise InvalidArgument(f"sluice: timeout={timeout!r}: seconds above 0")
    sizes = _gradient_bytes(model) if model is not None else []
    if max_bucket_bytes is None:
        cap = max(getattr(model, "bucket_bytes_cap", DDP_BUCKET_BYTES), DDP_FIRST_BUCKET_BYTES)
        # A bucket is closed when it reaches the cap, so it is at most the cap and one more parameter.
        max_bucket_bytes = min(DEFAULT_OP_BYTES, cap + max(sizes)) if sizes else DEFAULT_OP_BYTES
    if max_bucket_bytes < 64:
        raise InvalidArgument(f"sluice: max_bucket_bytes={max_bucket_bytes!r}: at least 64")
    max_bucket_bytes = -(-max_bucket_bytes // 64) * 64
    if arena_bytes is None:
        arena_bytes = 0
        if sizes:
            # Contribution and result of everything that one backward pass has in flight, and one more bucket. A contribution
            # that came too late may stay in its slot until the next step's: room for one more of each.
            slots = 3 if op_class == "consistent" else 2
            wanted = slots * (sum(sizes) + max_bucket_bytes)
            arena_bytes = max(min(wanted, slots * OPS_IN_FLIGHT * max_bucket_bytes), MIN_ARENA_BYTES)
    return Settings(job, op_class, None if deadline is None else float(deadline), float(timeout), socket, on_incomplete,
                    max_bucket_bytes, arena_bytes, drift_every, fallback, on_peer_loss, float(rejoin_timeout))


def _gradient_bytes(model):
    return [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
