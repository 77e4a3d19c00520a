"""From stored bytes to what a model eats: pad, crop, flip, channels first, normalise. Whole batches at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

MARGIN = 4  # pixels of black around an image that a random crop may reach into


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Its own stream for each epoch; torch's global generator belongs to the experiment."""
    return np.random.default_rng((seed, epoch))


@dataclass(frozen=True)
class Crops:
    """Where each image of a batch is cut out, and whether it is mirrored."""

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    mirrored: NDArray[np.bool_]

    def rows(self, rows: NDArray[np.int64]) -> Crops:
        return Crops(self.top[rows], self.left[rows], self.mirrored[rows])


def draw(rng: np.random.Generator, count: int) -> Crops:
    """For a global batch: every rank draws all of it and takes its rows, so the number of ranks changes no image."""
    top, left = rng.integers(0, 2 * MARGIN + 1, (2, count))
    return Crops(top, left, rng.random(count) < 0.5)


def pad(images: Bytes, margin: int) -> Bytes:
    """N x H x W x C with a black frame of `margin` pixels."""
    if not margin:
        return images
    count, height, width, channels = images.shape
    framed = np.zeros((count, height + 2 * margin, width + 2 * margin, channels), np.uint8)
    framed[:, margin:-margin, margin:-margin] = images
    return framed


def channels_first(images: Bytes) -> Bytes:
    """N x H x W x C to N x C x H x W, contiguous."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def crop_and_flip(images: Bytes, crops: Crops) -> Bytes:
    """Random crop out of a frame of 4 and a mirror image for every other one; N x H x W x C to N x C x H x W."""
    count, height, width, _ = images.shape
    windows = sliding_window_view(pad(images, MARGIN), (height, width), axis=(1, 2))  # N x 9 x 9 x C x H x W, a view
    cropped = np.ascontiguousarray(windows[np.arange(count), crops.top, crops.left])
    cropped[crops.mirrored] = cropped[crops.mirrored, ..., ::-1]
    return cropped


def normalise(
    images: Bytes, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(pixel / 255 - mean) / std, in the order of torchvision's transforms, so that the bits are the same."""
    pixels = torch.from_numpy(images).to(dtype).div_(255)
    centre, scale = (torch.tensor(values, dtype=dtype).view(-1, 1, 1) for values in (mean, std))
    return pixels.sub_(centre).div_(scale)
