"""CUDA buckets: through pinned host memory, on a side stream, so that the compute stream never waits for a copy.

The way of a bucket: the side stream waits for the gradients, copies them to a pinned staging tensor and records an event;
one submitter thread waits for that event and submits (so the hook returns at once and ops keep their order); the completion
thread has the result in the same staging tensor, copies it back on the side stream and completes a future that belongs to
the device: whoever waits for it makes its own stream wait for the side stream, not the host.

Version 0.1 was built and tested on machines without a GPU: this file is exercised by the tests only where CUDA exists.
"""
import queue
import threading

import torch


class Stager:
    """Side stream, staging tensors and submitter thread of one device."""

    def __init__(self, device, submit, fail):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._submit, self._fail = submit, fail
        self._free = {}  # bytes -> staging tensors that are not in use
        self._lock = threading.Lock()
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"sluice-{device}", daemon=True)
        self._thread.start()

    def stage(self, tensor, submission):
        """Starts the copy of a flat tensor to the host; submission(staging) runs on the submitter thread when it is done.
        Buckets are submitted in the order of these calls."""
        staging = self._take(tensor)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            staging.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        # The allocator must not give the bucket away while the side stream reads or writes it.
        tensor.record_stream(self.stream)
        self._queue.put((event, staging, submission))

    def deliver(self, staging, tensor, future):
        """The result back to the device; completes the future with `tensor`. Completion thread."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            tensor.copy_(staging, non_blocking=True)
            future.set_result(tensor)  # records the current stream, which is the side stream
        with self._lock:
            self._free.setdefault(staging.numel() * staging.element_size(), []).append(staging)

    def _take(self, tensor):
        nbytes = tensor.numel() * tensor.element_size()
        with self._lock:
            waiting = self._free.get(nbytes)
            staging = waiting.pop() if waiting else None
        if staging is None:
            return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        # Its last result left by this same stream, so the copy that comes now is ordered behind that.
        return staging.view(tensor.dtype)

    def _run(self):
        while True:
            item = self._queue.get()
            if item is None:
                return
            event, staging, submission = item
            try:
                event.synchronize()
                self._submit(submission, staging)
            except BaseException as error:  # reported by the future and by the next hook call
                self._fail(submission, error)

    def stop(self):
        self._queue.put(None)
        self._thread.join()
