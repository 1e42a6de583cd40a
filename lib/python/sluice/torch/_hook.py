"""The DDP communication hook. This module must not use postponed annotations: DDP compares them by identity."""
import torch
import torch.distributed as dist


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """ddp.register_comm_hook(state, sluice.torch.hook): averages each gradient bucket over the ranks by sluiced.

    Returns at once; the future completes with the bucket's own tensor, holding the mean. A failure comes out of
    backward() as a RuntimeError with the text of the sluice.Error, which state.error keeps with its type.
    """
    return state.reduce(bucket.buffer(), bucket.parameters(), bucket.is_last())
