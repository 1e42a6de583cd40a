"""What a State notices of its rounds on the completion thread; the training thread says it later, as warnings."""
import torch

from .. import _abi
from .._errors import InvalidArgument

DIFFERS = "This rank's parameters now differ from the others': call state.resync(model, optimizer) on all ranks"


class Notices:
    """What State inherits: it brings the fields that are used here."""

    def _seen(self, part, report):
        """Completion thread: a result came in."""
        if report.ok and report.text:  # it waited long for a node, which the text names
            self._long_waits += 1
            if self._long_waits & (self._long_waits - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
                self._said.append(f"sluice: job {self.job}, rank {self.rank}: {report.text} ({self._long_waits} such ops so far)")
        if report.status_code not in (_abi.INCOMPLETE, _abi.DIVERGED) or self._settings.on_incomplete == "ignore":
            return
        follows = self._job.corrects and report.status_code == _abi.INCOMPLETE  # else _fate says that they do not
        self.needs_resync |= not follows
        count = self._stats.counts["incomplete"]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            missing = report.blocks_expected - report.blocks_received
            self._said.append(
                f"sluice: job {self.job}, rank {self.rank}, op {report.op}, tag {part.tag:016x} ({part.parameters}): "
                f"{missing} of {report.blocks_expected} blocks did not come in time and are zero on this rank only "
                f"({count} such ops so far){'; ' + report.text if report.text else ''}. "
                + ("They are added to a later result here" if follows else DIFFERS))

    def _fate(self, part, report):
        """Completion thread: what became of an op after its result."""
        if report.status_code == _abi.DIVERGED and not self.needs_resync and self._settings.on_incomplete != "ignore":
            self.needs_resync = True
            self._said.append(f"sluice: job {self.job}, rank {self.rank}, op {report.op}, tag {part.tag:016x} "
                              f"({part.parameters}): holes of its result will not be filled. {DIFFERS}")

    def _check_scaler(self):
        """Once: gradients that are scaled must not be carried over to a step with another scale without our knowing it."""
        if self.grad_scaler is not None:
            return
        import gc
        # torch.amp.GradScaler from torch 2.3 on, whose child the other one then is.
        scaler = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)
        for found in gc.get_objects():
            # (isinstance() asks the object, and a weakref.proxy to a dead one raises.)
            if issubclass(type(found), scaler) and found.is_enabled():
                raise InvalidArgument(
                    "sluice: this process has a GradScaler that the State does not know. The daemons carry over what a step did "
                    "not count (exchange.carry_over), and the next step may have another loss scale: pass "
                    "State(grad_scaler=scaler), or use op_class='exact', or turn exchange.carry_over off on all nodes")
