"""Sparse COO gradients as flat dense tensors, until sluiced moves rows itself.

The dense tensor is followed by one flag per row: 1 where this rank's gradient has the row. Their mean says which rows any
rank touched, so that the result has exactly the union, also where values cancel to zero: lazy optimizers need that.
"""
import torch

# Newer versions warn when they are not told whether to check what is built here, which is right by construction.
_UNCHECKED = {"check_invariants": False} if hasattr(torch.sparse, "check_sparse_tensor_invariants") else {}


def _rows_and_width(shape, sparse_dim):
    rows = width = 1
    for size in shape[:sparse_dim]:
        rows *= size
    for size in shape[sparse_dim:]:
        width *= size
    return rows, width


def _row_numbers(indices, shape):
    """Positions of multi-dimensional rows in row-major order."""
    numbers = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    for dimension in range(indices.shape[0]):
        numbers = numbers * shape[dimension] + indices[dimension]
    return numbers


def densify(tensor):
    """rows x width values, then one flag per row, all of the tensor's type; 1-D."""
    tensor = tensor.coalesce()
    rows, width = _rows_and_width(tensor.shape, tensor.sparse_dim())
    flat = torch.zeros(rows * (width + 1), dtype=tensor.dtype, device=tensor.device)
    numbers = _row_numbers(tensor.indices(), tensor.shape)
    if numbers.numel():
        flat[:rows * width].view(rows, width).index_copy_(0, numbers, tensor.values().reshape(-1, width))
        flat[rows * width:].index_fill_(0, numbers, 1)
    return flat


def sparsify(flat, shape, sparse_dim):
    """The other way round, coalesced."""
    rows, width = _rows_and_width(shape, sparse_dim)
    touched = flat[rows * width:].nonzero().view(-1)
    values = flat[:rows * width].view(rows, width)[touched].reshape((touched.numel(), *shape[sparse_dim:]))
    indices = []
    rest = touched
    for size in reversed(shape[:sparse_dim]):
        indices.append(rest % size)
        rest = torch.div(rest, size, rounding_mode="floor")
    result = torch.sparse_coo_tensor(torch.stack(indices[::-1]), values, tuple(shape), **_UNCHECKED)
    return result._coalesced_(True)
