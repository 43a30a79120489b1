"""A file of JSON lines, indexed by the place of each line and read one line at a time."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from multigpu_cli.errors import RequestError

_REMEDY = "one JSON object per line"


class JsonLines:
    """The records of a file, one JSON object per line; empty lines do not count.

    The file is opened anew for each record, so that loader processes share no position in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        places, at = [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    places.append((number, at))
                at += len(line)
        self._places = np.array(places, dtype=np.int64).reshape(-1, 2)  # (n, 2): line from 1, and its first byte

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One record.

        Raises:
            RequestError: the line is no JSON object; names it.
        """
        with self.path.open("rb") as file:
            file.seek(int(self._places[index, 1]))
            line = file.readline()
        try:
            record = json.loads(line)
        except ValueError as error:  # of the syntax, or of the encoding
            raise RequestError(f"{self.describe(index)}: not JSON ({error})", remedy=_REMEDY) from error
        if not isinstance(record, dict):
            raise RequestError(f"{self.describe(index)}: a {type(record).__name__}, not an object", remedy=_REMEDY)
        return record

    def describe(self, index: int) -> str:
        """The record's place, for messages: file:line."""
        return f"{self.path}:{self._places[index, 0]}"
