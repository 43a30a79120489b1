"""Samples the load of one GPU in a thread beside the training."""

import math
import threading
from collections.abc import Callable
from typing import Any

from multigpu_cli.monitor.gpu import GpuLoad, NoNvml, find_handle, open_nvml, read_load


class Sampler:
    """Queries one GPU at regular intervals, in a thread beside the training; values that NVML does not report are NaN.

    Args:
        uuid: of the GPU, or of the MIG instance, as torch writes it.
        nvml: the library; None opens the real one.
        every: seconds between two queries.

    Attributes:
        missing: why some value is unknown, by NVML's last error; "" where it has answered everything.
    """

    def __init__(self, uuid: str, nvml: Any = None, every: float = 1.0) -> None:
        self.missing = ""
        self._every, self._lock, self._over = every, threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[GpuLoad] = []
        self._last = GpuLoad()
        try:
            self._nvml = open_nvml() if nvml is None else nvml
            self._handle = find_handle(self._nvml, uuid)
        except NoNvml as reason:
            self.missing = str(reason)
            return
        self._last = read_load(self._nvml, self._query)
        self._thread = threading.Thread(target=self._sample, name="gpu sampler", daemon=True)
        self._thread.start()

    def read(self) -> list[float]:
        """Means since the last call: utilisation in %, °C, watts, bytes of memory in use; NaN where unknown.

        Without a sample since then, the values of the last one.
        """
        with self._lock:
            samples, self._samples = self._samples or [self._last], []
            self._last = samples[-1]
        columns = list(zip(*samples, strict=True))[:4]  # without the total memory
        known = [[value for value in column if value is not None] for column in columns]
        return [sum(values) / len(values) if values else math.nan for values in known]

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread:
            self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(self._every):
            now = read_load(self._nvml, self._query)
            with self._lock:
                self._samples.append(now)

    def _query(self, function: Callable[..., Any], *more: Any) -> Any:
        try:
            return function(self._handle, *more)
        except self._nvml.NVMLError as error:
            self.missing = f"NVML: {error}"
            return None
