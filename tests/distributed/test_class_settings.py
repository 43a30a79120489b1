"""Weights of classes and mixed samples in whole runs: the same on any number of workers, and after a resume."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from multigpu_cli.run.request import spec
from tests.support.run_training import run_training
from tests.support.uneven_classes import Items

ALL = (
    "task.class_weights=balanced",
    "data.sample_weights={0: 1, 1: 2, 2: 4}",
    "data.mixup=0.2",
    "data.cutmix=1",
    "data.random_resized_crop=0.4",
    "data.rand_augment=9",
)
UNEVEN: dict[str, Any] = {
    "data": "tests.support.uneven_classes:tensors",
    "global_batch_size": 12,
    "batch_size": 3,
    "exact": True,
}


@pytest.mark.parametrize("data", ["tensors", "Items"])
def test_the_same_bits_on_any_number_of_workers_and_after_a_resume(tmp_path: Path, data: str) -> None:
    flags = UNEVEN | {"data": f"tests.support.uneven_classes:{data}", "num_workers": 0, "epochs": 2, "max_steps": 8}
    flags |= {"checkpoint_every": "1"}

    def train(name: str, workers: int, sets: tuple[str, ...] = ALL, **environ: str) -> Any:
        ended = run_training(workers, sets=sets, save_dir=str(tmp_path / name), environ=environ, **flags)
        assert ended.error == ""
        return ended.summary.get("fingerprint")

    one = train("one", 1)
    assert train("two", 2) == one
    assert train("three", 1, OWN_DEED="0:26:SIGKILL") is None, "killed in step 7, in the middle of an epoch"
    assert train("three", 2) == one
    if data == "tensors":
        without = {train(str(number), 1, ALL[:number] + ALL[number + 1 :]) for number in range(len(ALL))}
        assert len(without | {one}) == len(ALL) + 1, "each of them changes the result"


def test_a_run_shows_them_and_keeps_them(tmp_path: Path) -> None:
    plan = run_training(sets=ALL, save_dir=str(tmp_path), epochs=1, dry_run=True, **UNEVEN).summary
    assert plan["contents"].endswith("mixup 0.2, cutmix 1.0, random resized crop 0.4, rand augment 9")
    assert "class weights balanced, sample weights {'0': 1.0, '1': 2.0, '2': 4.0}, mixup" in plan["contents"]
    run_training(sets=ALL, save_dir=str(tmp_path), epochs=1, **UNEVEN)
    again = run_training(sets=["data.mixup=0.5"], epochs=2, save_dir=str(tmp_path))
    assert "data.mixup 0.5 differs from 0.2" in again.error
    assert "mixup: 0.2" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("data", "sets", "message"),
    [
        ("uneven_classes:tensors", ["data.sample_weights=[1, 2]"], "data.sample_weights: 2 weights for 3 classes"),
        ("uneven_classes:tensors", ["task.class_weights={3: 1}"], "task.class_weights: the data has no class '3'"),
        ("uneven_classes:tensors", ["task.class_weights=[0, 0, 0]"], "task.class_weights: no class has a weight above"),
        ("uneven_classes:tensors", ["task.name=regression", "data.mixup=1"], "data.mixup is for --task classification"),
        (
            "uneven_classes:tensors",
            ["task.name=regression", "label_smoothing=0.1"],
            "--label-smoothing is for --task class",
        ),
        ("uneven_classes:tensors", ["task.name=from-model", "label_smoothing=0.1"], "dpo, not from-model"),
        ("user_code:tensors", ["data.cutmix=1"], "inputs are float32 (2, 6), and can't be mixed"),
        ("user_code:tensors", ["data.random_resized_crop=1"], "data.random_resized_crop: inputs are float32 (2, 6)"),
        ("user_code:tensors", ["data.rand_augment=9"], "data.rand_augment: inputs are float32 (2, 6)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, data: str, sets: list[str], message: str
) -> None:
    ended = run_training(sets=sets, save_dir=str(tmp_path / "run"), **UNEVEN | {"data": f"tests.support.{data}"})
    assert ended.kind == "RequestError"
    assert message in ended.error
    assert not (tmp_path / "run").exists()


class Swapped(Items):
    """Its samples have other labels than it lists, but for the first."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, label = super().__getitem__(index)
        return inputs, (2, 1, 0)[label] if index else label


@pytest.mark.parametrize("setting", ["task.class_weights=balanced", "data.sample_weights=[1, 2, 3]"])
def test_labels_that_are_not_those_of_the_samples_weigh_nothing(tmp_path: Path, setting: str) -> None:
    flags = UNEVEN | {"data": f"{__name__}:Swapped", "save_dir": str(tmp_path / "run"), "epochs": 1}
    ended = run_training(sets=[setting], **flags)
    assert ended.kind == "RequestError"
    assert "sample 30 has the label 2, and the dataset lists 0 for it" in ended.error
    assert not (tmp_path / "run").exists()
    assert run_training(sets=["task.class_weights=[1, 2, 3]"], **flags).error == "", "they need no labels"


def test_a_run_from_before_a_setting_was_refused_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = UNEVEN | {"label_smoothing": 0.1, "save_dir": str(tmp_path)}
    assert run_training(epochs=1, **flags).error == ""
    monkeypatch.setattr(spec, "_SMOOTHED", ("multi-label",))
    assert run_training(epochs=2, **flags).summary["epochs"] == 2
