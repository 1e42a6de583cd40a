"""Carry-over across what changes under it: buckets that DDP cuts anew, checkpoints, an arena that is full.

Where the daemons carry over, a daemon keeps for each tag what rank owes: the part of its gradients that no sum had yet. A
tag is one cut of the parameters into buckets. Here everything is kept by parameter, so that it fits the next cut:

owed   what this rank takes back from its daemon (tag_retire) and adds to its next contribution that has the parameter
due    what all ranks hold alike (flush, load_state_dict) and add to the next result that has the parameter
mine   what this rank's results still lack (take_correction) and it alone adds to its next result that has the parameter

All without loss scale; they take that of the step they go out with. Threads: as the State, one lock.
"""
import threading

import torch

from .. import _abi
from .._errors import InvalidArgument, Timeout

SUMS = {"f32": torch.float32, "f16": torch.float32, "bf16": torch.float32, "f64": torch.float64}
RESCUE_S = 1.0  # how long taking back may last while the arena is full


class Layout:
    """One bucket: names and elements of what is in it, and the ops it travels in: [(tag, first element, elements)]."""

    def __init__(self, names, sizes, dtype, parts):
        self.names, self.sizes, self.dtype, self.parts = names, sizes, dtype, parts
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]


class Carry:
    def __init__(self):
        self._lock = threading.Lock()
        self.layouts = {}  # tag of the bucket -> Layout, in the order of first use, which is the same on all ranks
        self._part = {}  # tag of an op -> (Layout, first element)
        self.owed, self.due, self.mine = {}, {}, {}  # name -> flat tensor

    def layout(self, job, tag, names, sizes, dtype, tags, cuts, timeout):
        """The layout of a bucket. A new one takes the place of those that had its parameters: what is owed under their
        tags is taken back."""
        known = self.layouts.get(tag)
        if known is not None:
            return known
        with self._lock:
            _check_sizes(self.due, names, sizes)
        width = _abi.TYPES[dtype][1]
        new = Layout(names, sizes, dtype, [(t, offset // width, nbytes // width) for t, (offset, nbytes) in zip(tags, cuts)])
        for old in [old for old, layout in self.layouts.items() if not set(layout.names).isdisjoint(names)]:
            layout = self.layouts.pop(old)
            for part, _, _ in layout.parts:
                self._part.pop(part)
            if job.carry_over:
                self._retire(job, layout, layout.parts, timeout)
            if job.corrects:
                self._correction(job, layout, timeout)
        self.layouts[tag] = new
        for part, first, _ in new.parts:
            self._part[part] = (new, first)
        return new

    def _retire(self, job, layout, parts, timeout):
        for tag, first, count in parts:
            self._keep(self.owed, layout, first, take(job.tag_retire, layout.dtype, tag, count, timeout))

    def _correction(self, job, layout, timeout):
        for tag, first, count in layout.parts:
            self._keep(self.mine, layout, first, take(job.take_correction, layout.dtype, tag, count, timeout))

    def take_corrections(self, job, timeout):
        """Takes what waits in the daemon to be added to results of this rank."""
        for layout in self.layouts.values():
            self._correction(job, layout, timeout)

    def forget_corrections(self):
        """Parameters were copied, or are what the others copied."""
        with self._lock:
            self.mine = {}

    def _keep(self, where, layout, first, values):
        """Adds values, which begin at element `first` of a bucket, to what is kept of its parameters."""
        if not bool(values.any()):
            return
        with self._lock:
            for name, offset, size in zip(layout.names, layout.offsets, layout.sizes):
                low, high = max(offset, first), min(offset + size, first + values.numel())
                if low >= high or not bool(values[low - first:high - first].any()):
                    continue
                kept = where.get(name)
                if kept is None:
                    kept = where[name] = torch.zeros(size, dtype=values.dtype)
                kept[low - offset:high - offset] += values[low - first:high - first]

    def _add(self, where, layout, tensor, scale):
        if not where:
            return
        flat = tensor.view(-1)
        with self._lock:
            for name, offset, size in zip(layout.names, layout.offsets, layout.sizes):
                kept = where.pop(name, None)
                if kept is not None:
                    flat[offset:offset + size] += (kept * (scale or 1.0)).to(flat.dtype).to(flat.device)

    def add_owed(self, layout, tensor, scale):
        """To a contribution that is about to be sent."""
        self._add(self.owed, layout, tensor, scale)

    def add_due(self, layout, tensor, scale):
        """To a result that came."""
        self._add(self.due, layout, tensor, scale)
        self._add(self.mine, layout, tensor, scale)

    def rescue(self, job, part):
        """The arena is full of contributions that wait for a later op: takes the tag's back, which frees their slots.
        True if it did."""
        known = self._part.get(part.tag)
        if known is None:
            return False
        layout, first = known
        try:
            self._retire(job, layout, [(part.tag, first, part.count)], RESCUE_S)
        except Timeout:
            return False
        return True

    def flush(self, job, timeout, add_up):
        """Collective: what all ranks owe, averaged, goes to `due` on all of them; returns it by name.
        add_up(tensor): the mean over the ranks, exact, in place."""
        found = {}
        for layout in self.layouts.values():
            total = torch.zeros(sum(layout.sizes), dtype=SUMS[layout.dtype])
            with self._lock:
                for name, offset, size in zip(layout.names, layout.offsets, layout.sizes):
                    kept = self.owed.pop(name, None)
                    if kept is not None:
                        total[offset:offset + size] += kept
            add_up(total)
            for tag, first, count in layout.parts:
                total[first:first + count] += take(job.flush, layout.dtype, tag, count, timeout)
            self._keep(self.due, layout, 0, total)
            for name, offset, size in zip(layout.names, layout.offsets, layout.sizes):
                found[name] = total[offset:offset + size]
        return {name: values.clone() for name, values in found.items() if bool(values.any())}

    def load(self, carry):
        """What a checkpoint had, to be added to the next results."""
        due = {name: values.detach().clone().view(-1) for name, values in carry.items()}
        with self._lock:
            for layout in self.layouts.values():
                _check_sizes(due, layout.names, layout.sizes)
            self.due = due

    def forget_due(self):
        """A new view: some ranks have added what is due to a result already, others have not, so nobody does any more.
        How many elements that were."""
        with self._lock:
            dropped, self.due, self.mine = self.due, {}, {}
        return sum(values.numel() for values in dropped.values())

    def empty(self):
        with self._lock:
            return not self.owed and not self.due

    def pending(self):
        """What is to be added to the next results, by name."""
        with self._lock:
            return {name: values.clone() for name, values in self.due.items()}


def _check_sizes(kept, names, sizes):
    """Before they are added to anything: a checkpoint may be of another model."""
    for name, size in zip(names, sizes):
        if name in kept and kept[name].numel() != size:
            raise InvalidArgument(f"sluice: load_state_dict(): parameter {name} has {size} elements here, {kept[name].numel()} in the "
                                  "carry-over of the checkpoint; it is of another model, or the parameters have other names")


def take(function, dtype, tag, count, timeout):
    """The accumulators that Job.flush, Job.tag_retire or Job.take_correction give."""
    values = torch.zeros(count, dtype=SUMS[dtype])
    function(tag, "mean", dtype, count, values.data_ptr(), timeout)
    return values
