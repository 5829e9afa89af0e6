"""A picture of a sample as PNG, for pages that load nothing."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np

from mlcompute.ops.bfloat16 import is_numeric

#: Longer sides are thinned out: a page shows many pictures.
MOST_PIXELS = 96


def picture_of(sample: Any) -> str:
    """A data: address of an image (h, w), (1, h, w), (3, h, w), (h, w, 1) or (h, w, 3); empty for anything else.

    Numbers from 0 to 1, or bytes, are taken as they are; others are spread from black to white.
    """
    pixels = _channels_last(np.asarray(sample))
    if pixels is None or not is_numeric(pixels.dtype):
        return ""
    pixels = pixels[:: -(-pixels.shape[0] // MOST_PIXELS), :: -(-pixels.shape[1] // MOST_PIXELS)]
    if pixels.dtype != np.uint8:
        values = np.nan_to_num(pixels.astype(np.float64), posinf=0.0, neginf=0.0)
        low, high = float(values.min()), float(values.max())
        if low >= 0 and high <= 1:
            low, high = 0.0, 1.0
        pixels = np.round((values - low) / ((high - low) or 1.0) * 255).astype(np.uint8)
    return "data:image/png;base64," + base64.b64encode(_png(np.ascontiguousarray(pixels))).decode()


def _channels_last(sample: Any) -> Any:
    if sample.ndim == 2:
        sample = sample[:, :, None]
    if sample.ndim != 3 or min(sample.shape[:2]) < 1:
        return None
    if sample.shape[0] in (1, 3):  # what the layers take
        sample = sample.transpose(1, 2, 0)
    return sample if sample.shape[2] in (1, 3) and min(sample.shape[:2]) > 2 else None


def _png(pixels: Any) -> bytes:
    """The file: signature, header, one compressed chunk of rows that each begin with filter type 0, end."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
