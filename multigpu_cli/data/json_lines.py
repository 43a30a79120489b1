"""A file of JSON lines, indexed by the place of each line and read one line at a time."""

import json
from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any

from multigpu_cli.errors import RequestError

_REMEDY = "one JSON object per line"


class JsonLines:
    """The records of a file, one JSON object per line; empty lines do not count.

    The file is opened anew for each record, so that loader processes share no position in it.

    Attributes:
        digest: SHA-256 of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines, self._starts = array("q"), array("q")  # of each record: its line from 1, and its first byte
        at, digest = 0, sha256()
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if line.strip():
                    self._lines.append(number)
                    self._starts.append(at)
                at += len(line)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One record.

        Raises:
            RequestError: the line is no JSON object, or no text; names it.
        """
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        try:
            record = json.loads(line.decode("utf-8-sig"))
            if rb"\ud" in line.lower():  # half a character, perhaps
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeError as error:
            raise RequestError(
                f"{self.describe(index)}: no text in UTF-8 ({error})", remedy=f"{_REMEDY}, as UTF-8"
            ) from error
        except ValueError as error:
            fault = f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise RequestError(f"{self.describe(index)}: not JSON ({fault})", remedy=_REMEDY) from error
        if not isinstance(record, dict):
            raise RequestError(f"{self.describe(index)}: a {type(record).__name__}, not an object", remedy=_REMEDY)
        return record

    def describe(self, index: int) -> str:
        """The record's place, for messages: file:line."""
        return f"{self.path}:{self._lines[index]}"
