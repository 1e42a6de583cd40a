"""Fashion-MNIST from Debian's package dataset-fashion-mnist, as tensors."""
import gzip
import os

import numpy
import torch

FOLDER = "/usr/share/datasets/fashion-mnist"
IMAGE_HEADER, LABEL_HEADER = 16, 8  # bytes of the idx format before the data
PIXELS = 784
MEAN, DEVIATION = 0.2860, 0.3530  # of the training images' pixels in 0..1


def _read(folder, name, header):
    with gzip.open(os.path.join(folder, name), "rb") as file:
        return numpy.frombuffer(file.read(), numpy.uint8, offset=header).copy()


def load(part, folder=FOLDER):
    """(images n x 784 float32, standardised, labels n) of part "train" (60,000) or "t10k" (10,000)."""
    images = _read(folder, f"{part}-images-idx3-ubyte.gz", IMAGE_HEADER).reshape(-1, PIXELS)
    labels = _read(folder, f"{part}-labels-idx1-ubyte.gz", LABEL_HEADER)
    if len(images) != len(labels):
        raise ValueError(f"{folder}: {len(images)} images and {len(labels)} labels of {part} do not belong together")
    return torch.from_numpy(images).float().div_(255).sub_(MEAN).div_(DEVIATION), torch.from_numpy(labels).long()
