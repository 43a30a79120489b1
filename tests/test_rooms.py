"""Each capability is a room that can be taken out: without it help answers, and a tensor dataset trains."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_house_rules import CAPABILITIES, ROOT

TRAIN = """
import main_multi_gpu, torch
from torch.utils.data import TensorDataset
from train_multi_gpu import train_with_multi_gpu

assert main_multi_gpu.run(["--help"]) == 0
loader = torch.utils.data.DataLoader(TensorDataset(torch.randn(40, 3), torch.arange(40) % 2), batch_size=10)
model, loss = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
results = train_with_multi_gpu(
    model, loader, torch.optim.SGD(model.parameters(), 0.1), loss, num_epochs=1, save_dir="run"
)
print("trained to", results["final_loss"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("room", [*sorted(CAPABILITIES), "tune", "watch"])
def test_without_a_room_help_answers_and_a_tensor_dataset_trains(room: str, tmp_path: Path) -> None:
    for name in ("multigpu_cli", "main_multi_gpu.py", "train_multi_gpu.py", "configs"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    place = tmp_path / "multigpu_cli" / room.replace(".", "/")
    shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
    table = tmp_path / "multigpu_cli" / "capabilities.py"
    entry = re.compile(rf'(?:"[^"]*": )?"multigpu_cli\.{re.escape(room)}[.:][^"]*",? ?')
    before = table.read_text()
    table.write_text(entry.sub("", before))
    assert table.read_text() != before
    done = subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "trained to" in done.stdout, done.stderr[-2000:]
