"""State dicts as text and tensors, so that a rank can take them from another without running what it gets (pickle would).

Known: None, bool, int, float, str, list, tuple, dict with keys of these types, and tensors. Floats keep every bit.
"""
import json

import torch

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                                          torch.int16, torch.int8, torch.uint8, torch.bool)}


def encode(value):
    """(text, list of the tensors in it, in order). TypeError for what is not known."""
    tensors = []

    def walk(item):
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, torch.Tensor):
            if str(item.dtype) not in DTYPES or item.layout != torch.strided:
                raise TypeError(f"a tensor of type {item.dtype}, {item.layout}")
            tensors.append(item.detach())
            return {"tensor": str(item.dtype), "shape": list(item.shape)}
        if isinstance(item, (list, tuple)):
            return {type(item).__name__ if type(item) in (list, tuple) else "list": [walk(part) for part in item]}
        if isinstance(item, dict):
            return {"dict": [[walk(key), walk(part)] for key, part in item.items()]}
        raise TypeError(f"a {type(item).__name__}")

    return json.dumps(walk(value)), tensors


def decode(text):
    """(a function without arguments that builds the value, the list of empty host tensors that it will use)."""
    tensors = []

    def allocate(item):
        if not isinstance(item, dict):
            return
        if "tensor" in item:
            item["index"] = len(tensors)
            tensors.append(torch.empty(item["shape"], dtype=DTYPES[item["tensor"]]))
            return
        for part in next(iter(item.values())):
            for inner in part if "dict" in item else [part]:
                allocate(inner)

    def build(item):
        if not isinstance(item, dict):
            return item
        if "tensor" in item:
            return tensors[item["index"]]
        if "dict" in item:
            return {build(key): build(part) for key, part in item["dict"]}
        if "tuple" in item:
            return tuple(build(part) for part in item["tuple"])
        return [build(part) for part in item["list"]]

    root = json.loads(text)
    allocate(root)
    return (lambda: build(root)), tensors
