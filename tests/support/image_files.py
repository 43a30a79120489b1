"""Encoders of images of more than 8 bits, written by hand: Pillow can't save all that it reads."""

import struct
import zlib
from itertools import chain

import numpy as np


def make_png(values: np.ndarray, *, bits: int = 16) -> bytes:
    """A PNG of 16 bits: values (h, w) gray, or (h, w, 2 to 4) gray with alpha, RGB or RGBA; or gray of 1 to 4 bits."""
    height, width, channels = *values.shape[:2], values.shape[2] if values.ndim > 2 else 1
    rows = b"".join(b"\0" + (row.astype(">u2").tobytes() if bits == 16 else _pack(row, bits)) for row in values)
    header = struct.pack(">IIBBBBB", width, height, bits, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    packed = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def _pack(row: np.ndarray, bits: int) -> bytes:
    """Several values in each byte, the first in its high bits."""
    single = np.unpackbits(row.astype("uint8")[:, None], axis=1)[:, 8 - bits :]
    return np.packbits(single.ravel()).tobytes()


def make_tiff(values: np.ndarray, *, bits: int = 0, photometric: int = 1, orientation: int = 1) -> bytes:
    """A gray TIFF of values (h, w) in their own type and byte order; 12 bits are packed, two values in three bytes."""
    order = ">" if values.dtype.byteorder == ">" else "<"
    data, kind = values.tobytes(), {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    if bits == 12:
        pairs = values.reshape(-1, 2).tolist()
        data = bytes(chain.from_iterable((a >> 4, (a & 15) << 4 | b >> 8, b & 255) for a, b in pairs))
    height, width = values.shape
    tags = {256: width, 257: height, 258: bits or 8 * values.itemsize, 259: 1, 262: photometric, 273: 0}
    tags |= {274: orientation, 277: 1, 278: height, 279: len(data), 339: kind}
    tags[273] = 8 + 2 + 12 * len(tags) + 4  # where the data begin
    entries = (struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags.items())
    mark = b"MM\0*" if order == ">" else b"II*\0"
    count = struct.pack(f"{order}H", len(tags))
    return mark + struct.pack(f"{order}I", 8) + count + b"".join(entries) + struct.pack(f"{order}I", 0) + data
