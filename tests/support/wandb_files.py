"""Reads W&B's offline files: records of protobuf in LevelDB's log format (blocks of 32 KiB, header of 7 bytes each)."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, struct.Struct("<IHB")  # checksum, length, type
_WHOLE, _LAST = 1, 4


def read_records(file: Path) -> Iterator[Any]:
    """The records of a run-ID.wandb file, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    assert content[:4] == b":W&B"
    at, parts = _HEADER.size, b""
    while at + _HEADER.size <= len(content):
        if _BLOCK - at % _BLOCK < _HEADER.size:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = _HEADER.unpack_from(content, at)
        if not length and not kind:
            return
        at += _HEADER.size
        parts += content[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
