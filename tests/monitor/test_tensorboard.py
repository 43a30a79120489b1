import re
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.monitor.journal import Journal
from multigpu_cli.monitor.tensorboard import TensorBoard
from tests.support import disk_fault_model
from tests.support.browser import pixels, screenshot
from tests.support.fork import exit_code


def read_board(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def points(folder: Path, tag: str) -> list[tuple[int, Any]]:
    return [(point.step, pytest.approx(point.value)) for point in read_board(folder).Scalars(tag)]


def test_numbers_are_grouped_and_placed_at_their_step(tmp_path: Path) -> None:
    with closing(TensorBoard(tmp_path)) as board, closing(Journal(None, [board])) as journal:
        journal.write("start", versions={"torch": "2"})
        journal.write(
            "train",
            step=5,
            epoch=0,
            samples=320,
            loss=2.5,
            lr=1e-3,
            grad_norm=None,
            samples_per_second=900.0,
            memory=[1, 2],
        )
        journal.write("eval", epoch=1, step=10, split="val", loss=1.5, accuracy=0.75, samples=180)
        journal.write("eval", epoch=1, step=10, split="test", loss=1.25, accuracy=0.5, samples=360)
    assert set(read_board(tmp_path).Tags()["scalars"]) == {
        "train/epoch", "train/loss", "train/lr", "system/samples_per_second", "system/memory/0", "system/memory/1",
        "val/epoch", "val/loss", "val/accuracy", "test/epoch", "test/loss", "test/accuracy",
    }  # fmt: skip
    assert points(tmp_path, "train/loss") == [(5, 2.5)]
    assert points(tmp_path, "val/accuracy") == [(10, 0.75)]
    assert points(tmp_path, "system/memory/1") == [(5, 2)]


def test_after_a_resume_the_curve_does_not_run_backwards(tmp_path: Path) -> None:
    with closing(TensorBoard(tmp_path)) as board, closing(Journal(None, [board])) as journal:
        for step in (1, 2, 3, 4):
            journal.write("train", step=step, loss=float(step))
    with closing(TensorBoard(tmp_path)) as board, closing(Journal(None, [board])) as journal:
        journal.write("resume", step=2, from_world_size=2, world_size=1)
        journal.write("train", step=3, loss=30.0)
    assert points(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_plan_faults_and_hyperparameters_are_kept(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams

    with closing(TensorBoard(tmp_path)) as board, closing(Journal(None, [board])) as journal:
        board.plan([("global batch", "32 × 2 = 64")])
        journal.write("fault", step=7, kind="nonfinite", action="skipped")
        board.hyperparameters(
            {"optimizer": {"name": "adamw", "lr": None}, "epochs": 3}, {"test_accuracy": 0.975, "test_loss": None}
        )
    found = read_board(tmp_path)
    assert b"32 \xc3\x97 2 = 64" in found.Tensors("plan/text_summary")[0].tensor_proto.string_val[0]
    assert b"nonfinite: skipped" in found.Tensors("faults/text_summary")[0].tensor_proto.string_val[0]
    assert points(tmp_path, "final/test_accuracy") == [(7, 0.975)]
    assert "final/test_loss" not in found.Tags()["scalars"]
    given = {"optimizer.name": "adamw", "optimizer.lr": "None", "epochs": 3}
    for each in hparams(given, {"final/test_accuracy": 0.975}):
        value = each.value[0]  # as torch writes them, which loads 13 MiB for it
        kept, theirs = HParamsPluginData(), HParamsPluginData()
        kept.ParseFromString(found.SummaryMetadata(value.tag).plugin_data.content)
        theirs.ParseFromString(value.metadata.plugin_data.content)
        assert kept == theirs


def test_nothing_written_means_nothing_loaded_and_no_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from multigpu_cli.monitor.tensorboard import TensorBoard\n"
        f"board = TensorBoard({str(tmp_path / 'tb')!r}); board({{'event': 'start', 'time': 1.0}}); board.close()\n"
        "print([name for name in ('torch', 'tensorboard') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert not (tmp_path / "tb").exists()


def test_curves_load_the_messages_of_tensorboard_and_no_clients_of_cloud_stores(tmp_path: Path) -> None:
    code = (
        "import sys; from multigpu_cli.monitor.tensorboard import TensorBoard\n"
        f"board = TensorBoard({str(tmp_path / 'tb')!r}); board({{'event': 'train', 'time': 1.0, 'loss': 2.0}})\n"
        "board.hyperparameters({'epochs': 3}, {'val_loss': 2.0}); board.close()\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'boto3', 'fsspec', 'urllib3'})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_a_full_disk_makes_a_gap_and_is_said_once(tmp_path: Path) -> None:
    """torch's own writer would raise in the training loop, and print a traceback from its thread."""

    def run() -> None:
        said: list[str] = []
        with closing(TensorBoard(tmp_path / "tb", said.append)) as board:
            for step in range(1, 9):
                {3: disk_fault_model.full, 6: disk_fault_model.room}.get(step, lambda: None)()
                board({"event": "train", "time": 1.0, "step": step, "loss": float(step)})
        assert points(tmp_path / "tb", "train/loss") == [(step, float(step)) for step in (1, 2, 6, 7, 8)]
        assert said == ["TensorBoard's curves have a gap ([Errno 27] File too large); the journal has all values"]

    assert exit_code(run) == 0


def test_curves_that_somebody_removes_stay_away(tmp_path: Path) -> None:
    said: list[str] = []
    with closing(TensorBoard(tmp_path / "tb", said.append)) as board:
        board({"event": "train", "time": 1.0, "step": 1, "loss": 1.0})
        shutil.rmtree(tmp_path / "tb")
        for step in (2, 3):
            board({"event": "train", "time": 1.0, "step": step, "loss": 1.0})
    assert not (tmp_path / "tb").exists()
    assert len(said) == 1


def test_any_name_of_a_setting_is_shown(tmp_path: Path) -> None:
    """YAML has keys that are numbers: model.args.widths={1: 16}."""
    with closing(TensorBoard(tmp_path)) as board:
        board.hyperparameters({"model.args": {"widths": {1: 16}}}, {"loss": 1.0})
    assert any(b"model.args.widths.1" in file.read_bytes() for file in tmp_path.iterdir())


def write_a_run(folder: Path) -> None:
    with closing(TensorBoard(folder)) as board, closing(Journal(None, [board])) as journal:
        for step in range(1, 60):
            rates: dict[str, Any] = {"samples_per_second": 900.0 + step, "step_ms": 30.0, "data_wait_share": 0.1}
            rates |= {"mfu": 0.4, "noise_scale": 50.0 + step, "own_ms": [29.0, 30.0], "episode_reward": step}
            rates |= {f"gpu_{name}": [step, None] for name in ("utilisation", "temperature", "power")}
            rates |= {"tokens_per_second": 50.0, "all_tokens_per_second": 80.0, "padding_share": 0.1}
            rates["cpu_utilisation"] = [90.0, 80.0]
            journal.write(
                "train", step=step, mean_loss=2 / step, lr=0.1, grad_norm=1.0, memory=[step, 2 * step], **rates
            )
        journal.write("eval", epoch=1, step=59, split="val", loss=1.5, accuracy=0.75, perplexity=4.5, samples=180)


def test_every_chart_of_the_layout_has_a_curve(tmp_path: Path) -> None:
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    write_a_run(tmp_path)
    found = read_board(tmp_path)
    layout = Layout()
    layout.ParseFromString(found.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = [chart for category in layout.category for chart in category.chart]
    assert len(charts) >= 8
    for chart in charts:
        patterns = list(chart.multiline.tag)
        assert any(re.fullmatch(patterns[0], tag) for tag in found.Tags()["scalars"]), chart.title


@pytest.mark.browser
def test_the_page_shows_curves(tmp_path: Path) -> None:
    """TensorBoard's own page with our layout: its one run is drawn in orange."""
    write_a_run(tmp_path / "run")
    command = [sys.executable, "-W", "ignore", "-m", "tensorboard.main", "--logdir", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            said = next(line for line in server.stderr or () if " at http" in line)
            address = said.partition(" at ")[2].split()[0] + "?darkMode=false#custom_scalars"
            time.sleep(5)  # it reads the files in a thread of its own
            image = screenshot(address, tmp_path / "page.png", width=1200, height=1400, wait_ms=20_000)
        finally:
            server.kill()
    assert pixels(image, "#ff7043") > 2500
