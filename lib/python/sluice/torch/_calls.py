"""The collective calls of a State beside the gradients."""
from .._errors import Error
from . import _drift, _sync


class Calls:
    """What State inherits: it brings _ready, _collective, _speak, and the fields that are used here."""

    def resync(self, model, optimizer=None, grad_scaler=None, force=False):
        """Collective. If any rank needs it (or force), copies parameters, buffers, the optimizer's state and the
        GradScaler's from the lowest rank that does not, exactly. Returns whether it did. When nobody needs it, it costs
        one small round: call it every some steps, on all ranks at the same step."""
        done = self._collective(lambda engine: _sync.resync(
            engine, self._lacks(engine), self._stats.counts["incomplete"], model, optimizer,
            grad_scaler if grad_scaler is not None else self.grad_scaler, force), False)
        if done:
            self.needs_resync = False
            self._carry.forget_corrections()
            self._stats.add("resyncs")
        self._speak()
        return done

    def _lacks(self, engine):
        """Whether this rank's parameters lack something: holes for good, or holes that a later result would have brought."""
        incomplete = self._stats.counts["incomplete"]
        if getattr(engine.job, "corrects", False) and incomplete != self._corrected_until:
            engine.drain(self._settings.timeout)
            self._carry.take_corrections(engine.job, self._settings.timeout)
            self._corrected_until = incomplete
        return self.needs_resync or bool(self._carry.mine)

    def flush(self):
        """Collective: takes what all ranks' gradients are still owed (carry-over), averages it exactly, and adds it to the
        next step's result of each parameter on all ranks. Returns it by parameter name, as flat tensors without loss
        scale; {} where nothing is owed or the daemons do not carry over. Call it between two steps."""
        def work(engine):
            if self._exchange is not None or not self._carries():
                return {}
            engine.drain(self._settings.timeout)
            return self._carry.flush(engine.job, self._settings.timeout, lambda tensor: _sync.mean(engine, tensor))
        return self._collective(work, {})

    def state_dict(self):
        """Collective: what a checkpoint needs besides model, optimizer and scaler, namely what flush() found. Equal on all
        ranks: rank 0's is enough."""
        self.flush()
        return {"job": self.job, "carry": self._carry.pending()}

    def load_state_dict(self, saved):
        """What state_dict() gave, on all ranks, before the first step: it is added to that step's result."""
        self._carry.load(saved["carry"])

    def sync_buffers(self, model, root=0):
        """Collective: the model's buffers (BatchNorm statistics ...) of rank `root` to all, exactly. Returns the bytes."""
        return self._collective(lambda engine: _sync.broadcast(engine, list(model.buffers()), root), 0)

    def sync_parameters(self, model, root=0):
        """Collective: the model's parameters of rank `root` to all, exactly. Returns the bytes."""
        return self._collective(lambda engine: _sync.broadcast(engine, [p.data for p in model.parameters()], root), 0)

    def parameter_distance(self, model):
        """Collective: the largest distance of a rank's parameters from rank 0's, relative to the norm of rank 0's; equal on
        all ranks. 0.0 means bit-equal up to the sign of zero. Sends the whole model once."""
        return self._collective(lambda engine: _sync.parameter_distance(engine, model), float("nan"))

    def drift(self, model):
        """Collective: an estimate of parameter_distance() from 8 kB a rank, about 4 % off; 0.0 if and only if all ranks'
        parameters are equal bit by bit. report()["drift"] keeps the last one and the largest. Reads all parameters once."""
        sketches = self._collective(lambda engine: _sync.gather(engine, _drift.Sketch(model.parameters()).pack()), None)
        if sketches is None:
            return float("nan")
        value = _drift.distance([_drift.Sketch.unpack(sketch) for sketch in sketches])
        self._stats.drift(value)
        return value

    def _sample_drift(self, step):
        """At the begin of a backward pass, where the parameters are those after the last optimizer step on every rank."""
        self._passes += 1
        model = self._model() if self._model is not None else None
        if model is not None and self._passes % self._settings.drift_every == 0:
            if step is None:
                self.drift(model)
            elif step.error is None:
                self._sample_in(step, model)

    def _sample_in(self, step, model):
        """Within a step, which is a call of its own: what fails here fails the step."""
        try:
            sketches = _sync.gather(self._engine, _drift.Sketch(model.parameters()).pack())
            self._stats.drift(_drift.distance([_drift.Sketch.unpack(sketch) for sketch in sketches]))
        except Error as error:
            self._engine.error = self._engine.error or error
            step.error = step.error or error

    def barrier(self, timeout=None):
        """Collective: ends on no rank before every rank has called it."""
        self._collective(lambda engine: engine.job.barrier(timeout), None)
