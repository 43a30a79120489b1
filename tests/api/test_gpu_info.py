"""What the Python API says of GPUs, with answers of NVML that were planted."""

import pytest
import torch

from multigpu_cli.api import monitoring
from multigpu_cli.api.monitoring import clear_gpu_memory, gpu_utilisation
from multigpu_cli.monitor import gpu
from tests.support.fake_nvml import Nvml, a100


def test_use_of_each_gpu_also_where_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "open_nvml", lambda: Nvml([a100(busy=40), a100(lost=True), a100(busy=None)]))
    assert gpu_utilisation() == {"gpu_0": 40, "gpu_1": None, "gpu_2": None}


def test_clearing_memory_turns_to_no_gpu_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make a GPU the current one takes some hundred MB there, on all eight from all eight ranks."""
    asked: list[str] = []
    monkeypatch.setattr(monitoring, "count_visible_gpus", lambda: 8)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("emptied"))
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda number: asked.append(f"GPU {number}") or 0)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda number: 0)
    clear_gpu_memory()
    assert asked == ["emptied"]
