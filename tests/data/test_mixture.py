from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.loader import Loader
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import plan_batches
from tests.support.row_files import ROWS, write_arrow

NUMBERS = {"target": "label", "ignore": ["kind"]}


def mix(*entries: dict[str, Any], **args: Any) -> Any:
    given = tuple({"data_dir": None, "args": {}, "weight": 1.0} | each for each in entries)
    return load_data_source(DataConfig(name="mixture", mix=given, args=args), 42)


def two(folder: Path, **args: Any) -> Any:
    write_arrow(folder / "a")
    write_arrow(folder / "b", [{**row, "a": row["a"] + 1000} for row in ROWS[:30]])
    places = [(folder / "a", 1.0), (folder / "b", 3.0)]
    return mix(
        *({"data": "arrow", "data_dir": str(place), "args": NUMBERS, "weight": weight} for place, weight in places),
        **args,
    )


def list_batches(source: DataSource, workers: int, epoch: int, start: int = 0) -> dict[tuple[int, int], list[Any]]:
    """Step and number of each micro-batch → its sample numbers and inputs, of all workers."""
    plan = plan_batches(samples=source.num_train_samples, micro_batch=4, workers=workers, global_batch=16)
    found = {}
    for rank in range(workers):
        loader = Loader(source.train, source, DataConfig(num_workers=0), device=torch.device("cpu"), seed=42)
        for step, (_, work) in enumerate(loader.epoch(plan, epoch, start, rank, 1), start):
            for batch in work:
                found[step, batch.micro_batch_index] = [batch.sample_indices.tolist(), batch.inputs.tolist()]
    return found


def test_batches_are_the_same_on_any_number_of_workers_and_from_any_step(tmp_path: Path) -> None:
    source = two(tmp_path)
    assert source.num_train_samples == 72
    alone = list_batches(source, 1, 1)
    assert list_batches(source, 2, 1) == alone
    later = list_batches(two(tmp_path), 2, 1, start=3)
    assert later == {place: batch for place, batch in alone.items() if place[0] >= 3}


def test_each_sample_is_its_number_and_shares_follow_weights(tmp_path: Path) -> None:
    source = two(tmp_path, samples=40)
    found = [each for batch in list_batches(source, 1, 0).values() for each in zip(*batch, strict=True)]
    large = [number for number, _ in found if number >= 48]
    assert (len(found), len(large)) == (40, 30)
    for number, inputs in found:
        stored = source.train[number][0]
        assert torch.equal(source.prepare(stored[None])[0], torch.tensor(inputs))
    assert len(source.val) == 6 + 3
    assert "25.0 % from 48 samples" in source.note


def test_in_memory_and_on_disk(tmp_path: Path) -> None:
    same = mix({"data": "digits"}, {"data": "digits", "weight": 2.0})
    assert isinstance(same.train, torch.utils.data.TensorDataset)
    assert same.num_train_samples == len(same.train)
    assert list_batches(same, 1, 0) == list_batches(same, 2, 0)


@pytest.mark.parametrize(
    ("entries", "args", "message"),
    [
        (
            [{"data": "digits"}, {"data": "synthetic", "args": {"shape": [5], "classes": 10}}],
            {},
            "of digits and synthet",
        ),
        ([{"data": "digits"}, {"data": "digits", "weight": 1e-7}], {}, "gets no sample in an epoch"),
        ([{"data": "digits"}, {"data": "digits"}], {"samples": 1}, "data.samples: 1"),
        ([], {}, "needs data.mix"),
        ([{"data": "mixture"}, {"data": "digits"}], {}, "mixtures can't be nested"),
    ],
)
def test_what_can_not_be_mixed_is_refused(entries: list[dict[str, Any]], args: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        mix(*entries, **args)


def test_the_setting_names_the_dataset() -> None:
    config = resolve(
        {}, ["data.mix=[{data: digits}, {data: csv, data_dir: a.csv, args: {target: y}, weight: 2}]"], None
    )
    assert config.data.name == "mixture"
    assert config.data.mix[1] == {"data": "csv", "data_dir": "a.csv", "args": {"target": "y"}, "weight": 2.0}


@pytest.mark.parametrize("text", ["[{data: digits}]", "[{data: a, wieght: 2}, {data: b}]", "[{weight: 1}, {data: b}]"])
def test_a_list_that_is_no_mixture_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"data\.mix"):
        resolve({}, [f"data.mix={text}"], None)
