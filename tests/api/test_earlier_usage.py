"""The usage blocks of earlier documents run as written, beside the names that they leave out."""

import re
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import train_multi_gpu
from multigpu_cli.errors import RequestError

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "founding"
CONFIGS, FUNCTIONS = "000_0bc5bd2c643fcc8a.txt", "002_e0033ca4cac79160.txt"
REFUSED = {
    (CONFIGS, "Basic DataParallel Training"): "^device_ids 0,1,2,3: there is no GPU 0,1,2,3",
    (
        CONFIGS,
        "DistributedDataParallel Training",
    ): "^rank=0 of world_size=8: the address of the other",
}
"""Blocks that can't be meant on a machine without GPUs, or in the only process there is."""

pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="no earlier documents"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]


def usage_blocks(file: str) -> list[tuple[str, str]]:
    """(heading, code) of each block that uses names, in order; not those that define them."""
    text = (FOLDER / file).read_text()
    found = []
    for block in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        heading = text[: block.start()].rstrip().splitlines()[-1].strip("#* 0123456789.")
        if not re.search(r"^(def |class MultiGPUTrainer)", block[1], re.MULTILINE):
            found.append((heading, block[1]))
    return found


def supply_names(made: list[Any]) -> dict[str, Any]:
    """The API, and what the blocks speak of and do not define.

    Args:
        made: gets all managers, to be finished at the end.
    """

    class Manager(train_multi_gpu.MultiGPUTrainingManager):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    dataset = TensorDataset(torch.randn(64, 100), torch.randint(0, 10, (64,)))
    model = nn.Linear(100, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    manager = Manager(train_multi_gpu.MultiGPUConfig(save_dir="supplied"))
    _, loader, _ = manager.setup_training(nn.Linear(100, 10), dataset)
    numbers = dict.fromkeys(
        ["elapsed_time", "samples_per_second", "gpu_memory_gb", "utilization_percent", "batch_idx", "epoch"], 0
    )
    numbers |= {"num_gpus": 1, "num_epochs": 1, "batch_size": 32, "optimal_batch_size": 32}
    return {
        **{name: getattr(train_multi_gpu, name) for name in dir(train_multi_gpu) if not name.startswith("_")},
        "MultiGPUTrainingManager": Manager,
        "torch": torch,
        "nn": nn,
        "timedelta": timedelta,
        "logger": StructuredLogger(),
        "YourModel": lambda: nn.Linear(100, 10),
        "YourDataset": lambda: dataset,
        "dataset": dataset,
        "val_dataset": dataset,
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "train_loader": DataLoader(dataset, 8, shuffle=True),
        "loss": torch.tensor(1.0),
        "loss_values": [],
        "supplied": manager,
        "batch": next(iter(loader)),
        "results": {},
        "metrics_history": [],
        "current_epoch": 0,
        "current_step": 0,
        **numbers,
    }


class StructuredLogger:
    def info(self, event: str, **fields: Any) -> None:
        self.last = (event, fields)

    def error(self, event: str) -> None:
        raise AssertionError(event)


@pytest.mark.parametrize("file", [CONFIGS, FUNCTIONS])
def test_the_blocks_run_in_their_order(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[Any] = []
    names, refused = supply_names(made), []
    earlier = ModuleType("multi_gpu_training")
    vars(earlier).update(names)
    monkeypatch.setitem(sys.modules, "multi_gpu_training", earlier)
    for heading, block in usage_blocks(file):
        code = re.sub(r"^.*from_pretrained.*$", "", block, flags=re.MULTILINE)  # a download
        if heading == "Error Recovery":
            names["manager"] = names["supplied"]  # one that trains: the last one in the text was refused
        if message := REFUSED.get((file, heading)):
            with pytest.raises(RequestError, match=message):
                exec(code, names)
            refused.append(heading)
            code = re.sub(r"^ *device_ids=.*$", "", code, flags=re.MULTILINE)
            if "rank=0" in code:
                continue  # it is for one of eight processes
        exec(code, names)
    assert len(refused) == sum(name == file for name, _ in REFUSED), "each is still in the text"
    steps = [manager.finish()["steps"] for manager in made if manager.trainer.run]
    assert steps == ([1, 2, 0] if file == CONFIGS else [0])
