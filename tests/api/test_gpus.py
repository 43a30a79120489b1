"""What the Python API says of GPUs, with answers of NVML that were planted."""

import pytest

from multigpu_cli.api.gpus import gpu_utilisation
from multigpu_cli.monitor import gpu
from tests.nvml import Nvml, a100


def test_use_of_each_gpu_also_where_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "opened", lambda: Nvml([a100(busy=40), a100(lost=True), a100(busy=None)]))
    assert gpu_utilisation() == {"gpu_0": 40, "gpu_1": None, "gpu_2": None}
