"""A rank process of the tests: runs the cases that it reads from stdin, one JSON line each, and answers likewise."""
import json
import os
import sys
import traceback
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "..", "lib", "python")]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import carry_cases  # noqa: E402
import cases  # noqa: E402
import drift_cases  # noqa: E402
import rejoin_cases  # noqa: E402


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a case prints is noise
    for line in sys.stdin:
        request = json.loads(line)
        warnings.simplefilter("always")
        torch.manual_seed(0)
        try:
            module = next(m for m in (cases, drift_cases, carry_cases, rejoin_cases) if hasattr(m, request["case"]))
            function = getattr(module, request["case"])
            value = function(dist.get_rank(), dist.get_world_size(), request["job"], **request["arguments"])
            answer = {"value": value}
        except cases.Dies:
            raise
        except BaseException as error:
            answer = {"error": traceback.format_exc(), "type": type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
