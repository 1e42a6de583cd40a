"""How far the parameters of the ranks are apart, measured over Gloo, so that it judges Sluice from outside."""
import torch
import torch.distributed as dist


def parameter_distance(model):
    """Of a rank's parameters from rank 0's, relative; the largest of all ranks. A collective call."""
    own = torch.cat([p.detach().view(-1) for p in model.parameters()])
    reference = own.clone()
    dist.broadcast(reference, 0)
    distance = ((own - reference).double().norm() / reference.double().norm()).reshape(1)
    dist.all_reduce(distance, op=dist.ReduceOp.MAX)
    return float(distance)
