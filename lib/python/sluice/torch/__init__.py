"""Sluice for PyTorch DDP.

    dist.init_process_group("gloo")                       # or nccl; Sluice only carries gradients
    ddp = DDP(model)
    state = sluice.torch.State(job="bert", model=ddp)     # joins through this node's sluiced
    ddp.register_comm_hook(state, sluice.torch.hook)      # the one line

docs/pytorch.md says what happens on loss, how errors look, and how to use it from Accelerate and Lightning.
"""
from ._hook import hook
from ._state import SluiceWarning, State

__all__ = ["SluiceWarning", "State", "hook"]
