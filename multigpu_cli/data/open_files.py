"""Reads bytes of many files by their places; only some of the files are open at a time."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from multigpu_cli.errors import RequestError

_MOST = 64
UNCHANGED = "files that are whole and stay as they are while they are read; the next run indexes them anew"


class OpenFiles:
    """Files that are opened when they are read, without a position: forked processes may share them.

    Args:
        files: in order.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._open: OrderedDict[int, int] = OrderedDict()

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Some bytes of a file.

        Raises:
            RequestError: the file is gone, ends before or can't be read.
        """
        try:
            content = os.pread(self._get_number(file), size, offset)
        except OSError as error:
            raise RequestError(f"--data: {self.files[file]}: {error.strerror}", remedy=UNCHANGED) from error
        if len(content) != size:
            raise RequestError(
                f"--data: {self.files[file]} ends at byte {offset + len(content)} of {offset + size}", remedy=UNCHANGED
            )
        return content

    def _get_number(self, file: int) -> int:
        number = self._open.get(file)
        if number is None:
            if len(self._open) == _MOST:
                os.close(self._open.popitem(last=False)[1])
            number = self._open[file] = os.open(self.files[file], os.O_RDONLY | os.O_CLOEXEC)
        return number

    def __del__(self) -> None:
        for number in self._open.values():
            os.close(number)
