"""How the ranks of a job find each other: what each has to say travels through torch.distributed, once, before the join.

What travels: the card of each rank, the settings that must be equal, and rank 0's key. The key is thereby as secret as the
launcher's own store and Gloo's connections are. A rank that failed to reach its daemon says so here, so that all ranks
fail together with its name, instead of waiting for it.
"""
import base64
import datetime
import itertools
import json

import torch.distributed as dist

from .._errors import Error, InvalidArgument

_rounds = {}  # job -> how many times this process met for it; equal on all ranks, since joining is collective


def group_facts(process_group):
    """(rank, world size) in the group; None is the default group."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidArgument("sluice: torch.distributed is not initialised; call torch.distributed.init_process_group() "
                              "before sluice.torch.State(...): the ranks find each other through it")
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise InvalidArgument("sluice: this process is no member of the process group given to State")
    return rank, dist.get_world_size(process_group)


def _barrier(job, rank, process_group, timeout):
    """Gloo's own patience is the group's, half an hour, and it names nobody."""
    try:
        dist.monitored_barrier(process_group, datetime.timedelta(seconds=timeout), wait_all_ranks=True)
    except RuntimeError as error:
        raise Error(f"sluice: job {job}, rank {rank}: not all ranks came to the rendezvous within {timeout:g} s ({error}); are they "
                    "running, and do they make their State at the same place?") from None


def meet(job, own, process_group, timeout):
    """Gives `own` (a dict that JSON can hold) to all ranks, returns the list of what all gave, in rank order."""
    rank, world_size = group_facts(process_group)
    if world_size == 1:
        return [own]
    backend = str(dist.get_backend(process_group)).lower()
    if backend in ("gloo", "mpi"):  # others may not be able to move CPU tensors
        if backend == "gloo":
            _barrier(job, rank, process_group, timeout)
        everyone = [None] * world_size
        dist.all_gather_object(everyone, own, group=process_group)
        return everyone
    return _meet_in_store(job, own, rank, world_size, process_group, timeout)


def store():
    """The store of the default group."""
    return dist.distributed_c10d._get_default_store()


def _meet_in_store(job, own, rank, world_size, process_group, timeout):
    """The same through the store of the default group, for groups (NCCL alone) that cannot move CPU data."""
    default = store()
    members = "world"
    if process_group is not None:
        members = "-".join(str(dist.distributed_c10d.get_global_rank(process_group, r)) for r in range(world_size))
    count = _rounds.setdefault((job, members), itertools.count())
    prefix = f"sluice/{job}/{members}/{next(count)}"
    default.set(f"{prefix}/{rank}", json.dumps(own))
    everyone = []
    for other in range(world_size):
        try:
            default.wait([f"{prefix}/{other}"], datetime.timedelta(seconds=timeout))
        except RuntimeError as error:
            raise Error(f"sluice: job {job}, rank {rank}: rank {other} did not come to the rendezvous within {timeout:g} s "
                        f"({error}); is it running, and does it make its State at the same place?") from None
        everyone.append(json.loads(default.get(f"{prefix}/{other}")))
    return everyone


def agree(job, card, settings, key, error, process_group, timeout):
    """Returns (cards of all ranks, the job's key). `error`: why this rank has no card, or None. Raises on all ranks when
    one of them has none, or when `settings` (a flat dict) differ."""
    rank, world_size = group_facts(process_group)
    encode = lambda data: base64.b64encode(data).decode() if data else ""  # noqa: E731
    own = {"card": encode(card), "settings": settings, "key": encode(key), "error": error}
    everyone = meet(job, own, process_group, timeout)
    for r, other in enumerate(everyone):
        for name, value in everyone[0]["settings"].items():
            if other["settings"].get(name) != value:
                raise InvalidArgument(f"sluice: job {job}: State settings differ between ranks: {name} is {value!r} on rank 0 "
                                      f"and {other['settings'].get(name)!r} on rank {r}; give all ranks the same")
    failed = [f"rank {r}: {other['error']}" for r, other in enumerate(everyone) if other["error"]]
    if failed:
        raise Error(f"sluice: job {job}: {len(failed)} of {world_size} ranks cannot join: " + "; ".join(failed),
                    "UNREACHABLE")
    return [base64.b64decode(other["card"]) for other in everyone], base64.b64decode(everyone[0]["key"])
