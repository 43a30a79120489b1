import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data import fetcher
from multigpu_cli.data.collate import SampleForm
from multigpu_cli.data.fetcher import LoaderContext, SeededDataset, ignore_group_signals
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.order import EVAL_EPOCH, KeyedRandom, shuffle_numbers
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import BatchPlan
from tests.support.world import CPU

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core

ROOT = Path(__file__).resolve().parents[2]
PLAN = BatchPlan(samples=37, micro_batch=4, global_batch=12, workers=1)


class Noisy(Dataset[Any]):
    """A user's dataset: each item draws from all three generators, and says which process made it."""

    def __init__(self, count: int = 37) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[dict[str, Any], int]:
        draws = torch.stack([torch.rand(()), torch.tensor(random.random()), torch.tensor(numpy.random.rand())])
        return {"x": torch.tensor(float(index)), "draws": draws, "process": os.getpid()}, index % 3


def source(split: Dataset[Any], **changed: Any) -> DataSource:
    return replace(DataSource(train=split, val=None, test=None, input_shape=(1,), num_classes=3), **changed)


def in_memory(count: int = 37) -> TensorDataset:
    return TensorDataset(torch.arange(count).view(-1, 1).float(), torch.arange(count) % 3)


def loader(split: Dataset[Any], processes: int | str = 0, seed: int = 42, **changed: Any) -> Loader:
    return Loader(split, source(split, **changed), DataConfig(num_workers=processes), device=CPU, seed=seed)


def epoch(
    served: Loader,
    plan: BatchPlan = PLAN,
    number: int = 0,
    *,
    start: int = 0,
    rank: int = 0,
    replicas_per_process: int = 1,
) -> list[list[Batch]]:
    return [list(work) for _, work in served.epoch(plan, number, start, rank, replicas_per_process)]


def indices(steps: list[list[Batch]]) -> list[list[list[int]]]:
    return [[batch.sample_indices.tolist() for batch in work] for work in steps]


@pytest.fixture
def closing() -> Iterator[list[Loader]]:
    """Loaders whose processes end with the test."""
    opened: list[Loader] = []
    yield opened
    for each in opened:
        each.close()


@pytest.mark.parametrize("kind", [in_memory, Noisy])
def test_an_epoch_follows_the_order_and_the_plan(kind: Any) -> None:
    order = shuffle_numbers(37, 42, 0)
    expected = [
        [order[start:stop].tolist() for _, start, stop in PLAN.all_micro_batches(step)]
        for step in range(PLAN.steps_per_epoch)
    ]
    steps = epoch(loader(kind()))
    assert indices(steps) == expected
    assert [[batch.micro_batch_index for batch in work] for work in steps] == [[0, 1, 2]] * 3 + [[0]]
    assert sorted(order.tolist()) == list(range(37))


@pytest.mark.parametrize("kind", [in_memory, Noisy])
def test_inputs_and_targets_belong_to_their_indices(kind: Any) -> None:
    for work in epoch(loader(kind())):
        for batch in work:
            inputs = batch.inputs["x"] if isinstance(batch.inputs, dict) else batch.inputs.flatten()
            assert inputs.tolist() == batch.sample_indices.tolist()
            assert batch.targets.tolist() == [index % 3 for index in batch.sample_indices.tolist()]
            assert len(batch) == len(batch.sample_indices)


@pytest.mark.parametrize("workers", [2, 3, 4, 13])
@pytest.mark.parametrize("kind", [in_memory, Noisy])
def test_workers_together_get_what_one_gets(workers: int, kind: Any) -> None:
    alone = indices(epoch(loader(kind())))
    shared = replace(PLAN, workers=workers)
    ranks = [indices(epoch(loader(kind()), shared, rank=rank)) for rank in range(workers)]
    assert [[batch for work in step for batch in work] for step in zip(*ranks, strict=True)] == alone


def read_draws(steps: list[list[Batch]]) -> dict[int, list[float]]:
    """The random numbers that each sample met."""
    return {
        int(index): draws.tolist()
        for work in steps
        for batch in work
        for index, draws in zip(batch.sample_indices, batch.inputs["draws"], strict=True)
    }


def test_items_draw_the_same_numbers_in_any_process_and_on_any_worker(closing: list[Loader]) -> None:
    here = loader(Noisy())
    expected = read_draws(epoch(here))
    for processes in (1, 2):
        other = loader(Noisy(), processes)
        closing.append(other)
        steps = epoch(other)
        assert read_draws(steps) == expected
        makers = {int(maker) for work in steps for batch in work for maker in batch.inputs["process"]}
        assert len(makers) == processes
        assert os.getpid() not in makers
    halves = [read_draws(epoch(here, replace(PLAN, workers=2), rank=rank)) for rank in range(2)]
    assert halves[0] | halves[1] == expected


class Curriculum(Dataset[tuple[Tensor, int]]):
    """A user's dataset whose own `set_epoch` takes the epochs that it knows."""

    def set_epoch(self, epoch: int) -> None:
        raise IndexError(epoch)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1), index


def test_set_epoch_of_a_users_dataset_is_left_to_the_user() -> None:
    """Loader processes would call it for each sample, and evaluations with a number beyond any epoch."""
    assert SeededDataset(Curriculum(), seed=0)[EVAL_EPOCH, 3][1][1] == 3


def test_items_draw_other_numbers_in_other_epochs_and_with_other_seeds() -> None:
    first, second = (read_draws(epoch(loader(Noisy()), number=number)) for number in (0, 1))
    other = read_draws(epoch(loader(Noisy(), seed=43)))
    for index in range(37):
        numbers = [first[index], second[index], other[index]]
        assert all(one != two for column in zip(*numbers, strict=True) for one, two in [column[:2], column[1:]])


def test_no_two_samples_draw_the_same_numbers() -> None:
    found = read_draws(epoch(loader(Noisy())))
    assert len({tuple(numbers) for numbers in found.values()}) == 37


@pytest.mark.parametrize("processes", [0, 2])
def test_an_epoch_can_be_entered_at_any_step(processes: int, closing: list[Loader]) -> None:
    served = loader(Noisy(), processes)
    closing.append(served)
    whole = epoch(served)
    for start in (1, 3, 4):
        later = epoch(loader(Noisy()), start=start)
        assert indices(later) == indices(whole)[start:]
        assert read_draws(later).items() <= read_draws(whole).items()


@pytest.mark.parametrize("processes", [0, 2])
def test_a_pass_that_was_left_in_the_middle_does_not_disturb_the_next(processes: int, closing: list[Loader]) -> None:
    served = loader(Noisy(), processes)
    closing.append(served)
    for _, work in islice(served.epoch(PLAN, 0, 0, 0, 1), 2):
        list(work)
    again = epoch(served, number=1)
    assert indices(again) == indices(epoch(loader(Noisy()), number=1))
    assert read_draws(again) == read_draws(epoch(loader(Noisy()), number=1))


def test_lanes_join_neighbouring_micro_batches() -> None:
    plain, joined = (
        indices(epoch(loader(in_memory()), replace(PLAN, workers=2), replicas_per_process=replicas_per_process))
        for replicas_per_process in (1, 2)
    )
    whole = indices(epoch(loader(in_memory())))
    assert len(joined) == len(plain)
    assert [[[*work[0], *work[1]], work[2]] for work in whole[:3]] == joined[:3]
    assert joined[3] == whole[3]


@pytest.mark.parametrize("kind", [in_memory, Noisy])
@pytest.mark.parametrize("workers", [1, 2, 5, 20])
def test_held_out_samples_are_served_once_in_order(kind: Any, workers: int) -> None:
    batches = [batch for rank in range(workers) for batch in loader(kind()).eval_batches(4, rank, workers)]
    assert [index for batch in batches for index in batch.sample_indices.tolist()] == list(range(37))
    assert [batch.micro_batch_index for batch in batches] == list(range(10))
    assert {len(batch) for batch in batches[:-1]} == {4}


@pytest.mark.parametrize("kind", [in_memory, Noisy])
def test_the_first_batch_makes_no_others(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start takes one batch of two samples, of however many samples."""
    served, made = loader(kind(3000)), []
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *given, **named: made.append(given) or arange(*given, **named))
    assert next(served.eval_batches(2, 0, 1)).sample_indices.tolist() == [0, 1]
    assert len(made) < 10


def test_held_out_items_never_change() -> None:
    served = loader(Noisy())
    first, second = (read_draws([list(served.eval_batches(4, 0, 1))]) for _ in range(2))
    assert first == second
    assert first[0] != read_draws(epoch(served))[0], "and have numbers of their own"


def augmenting(inputs: Tensor, draws: KeyedRandom) -> Tensor:
    return inputs + draws.uniform(0)


def test_augmentation_belongs_to_the_sample_and_is_for_training_only() -> None:
    served = loader(in_memory(), augment=augmenting, prepare=lambda inputs: inputs * 10)
    noise: dict[int, float] = {}
    for work in epoch(served):
        for batch in work:
            added = batch.inputs.flatten() / 10 - batch.sample_indices
            noise |= dict(zip(batch.sample_indices.tolist(), added.tolist(), strict=True))
    assert all(-1e-5 <= value < 1.0001 for value in noise.values())
    assert len(set(noise.values())) == 37
    for rank in range(3):
        for work in epoch(served, replace(PLAN, workers=3), rank=rank):
            for batch in work:
                added = batch.inputs.flatten() / 10 - batch.sample_indices
                assert added.tolist() == [noise[index] for index in batch.sample_indices.tolist()]
    for batch in served.eval_batches(4, 0, 1):
        assert batch.inputs.flatten().tolist() == [10.0 * index for index in batch.sample_indices.tolist()]


def test_bytes_become_numbers_from_0_to_1_where_nothing_else_is_asked_for() -> None:
    split = TensorDataset(torch.tensor([[0], [255]], dtype=torch.uint8), torch.tensor([0, 1]))
    [batch] = loader(split).eval_batches(4, 0, 1)
    assert batch.inputs.flatten().tolist() == [0.0, 1.0]


def test_nested_inputs_stay_nested() -> None:
    class Nested(Noisy):
        def __getitem__(self, index: int) -> Any:
            return [torch.ones(2), {"deep": (torch.zeros(1), index)}], 0

    [batch] = loader(Nested(3)).eval_batches(4, 0, 1)
    assert batch.inputs[0].shape == (3, 2)
    assert batch.inputs[1]["deep"][1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("item", [torch.ones(2), (1, 2, 3), "ab"])
def test_an_item_that_is_no_pair_is_named(item: Any) -> None:
    class Wrong(Noisy):
        def __getitem__(self, index: int) -> Any:
            return item

    with pytest.raises(RequestError, match=r"sample \d+ must be \(input, target\), not"):
        epoch(loader(Wrong()))


def test_a_tensor_dataset_of_one_or_three_is_refused() -> None:
    with pytest.raises(RequestError, match=r"\(input, target\), not tuple of 3"):
        loader(TensorDataset(*[torch.ones(3)] * 3))


def test_in_memory_batches_are_copies() -> None:
    split = in_memory()
    for work in epoch(loader(split)):
        for batch in work:
            batch.inputs.zero_()
    assert split.tensors[0].sum() > 0


def test_loader_processes_do_not_die_of_a_signal_to_the_whole_group(closing: list[Loader]) -> None:
    """Ctrl-C reaches them too, and the trainer still needs them to finish its step."""
    served = loader(Noisy(), 1)
    closing.append(served)
    stream = served.epoch(PLAN, 0, 0, 0, 1)
    _, work = next(stream)
    first = list(work)
    maker = int(first[0].inputs["process"][0])
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(maker, number)
    rest = [list(work) for _, work in stream]
    assert len(rest) == 3
    assert {int(batch.inputs["process"][0]) for work in rest for batch in work} == {maker}


def test_loader_processes_are_there_before_training_begins(closing: list[Loader]) -> None:
    """One that was forked amid training, while a thread held a lock, waited for it for ever."""
    before = set(multiprocessing.active_children())
    closing.append(loader(Noisy(), 2))
    assert len(set(multiprocessing.active_children()) - before) == 2


def test_closing_ends_the_loader_processes() -> None:
    served = loader(Noisy(), 1)
    maker = int(epoch(served)[0][0].inputs["process"][0])
    served.close()
    with pytest.raises(ProcessLookupError):
        os.kill(maker, 0)
    served.close()


HELD = """from tests.data.test_loader import Noisy, loader
stream = loader(Noisy(), 1).eval_batches(4, 0, 1)
print(next(stream).sample_indices.tolist())"""
"""A user's script that ends amid a pass; its loader processes ignore the SIGTERM that multiprocessing sends them."""


def test_a_script_ends_that_holds_a_stream() -> None:
    ended = subprocess.run([sys.executable, "-c", HELD], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("[0, 1, 2, 3]\n", 0), ended.stderr


def test_so_does_a_process_of_multiprocessing() -> None:
    """It runs no atexit functions, and waits for its children all the same."""
    held: list[Any] = []

    def hold() -> None:
        held.append(loader(Noisy(), 1).eval_batches(4, 0, 1))
        next(held[0])

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    process.join(60)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_torch_can_end_a_process_that_ignores_sigterm() -> None:
    """One whose queue was collected before it hears nothing else."""
    context, (reader, writer) = LoaderContext(), multiprocessing.Pipe(duplex=False)

    def wait() -> None:
        ignore_group_signals(0)
        writer.send("ready")
        time.sleep(60)

    process = context.Process(target=wait, daemon=True)
    process.start()
    reader.recv()
    process.terminate()
    process.join(30)
    context.close()
    assert process.exitcode == -signal.SIGKILL


def test_the_splits_of_a_source_share_their_processes(closing: list[Loader]) -> None:
    before = set(multiprocessing.active_children())
    parts = [Noisy(37), Noisy(9), Noisy(11)]
    shared = source(parts[0], val=parts[1], test=parts[2])
    config = DataConfig(num_workers=2)
    closing += [Loader(part, shared, config, device=CPU, seed=42) for part in parts]
    begun = set(multiprocessing.active_children()) - before
    assert len(begun) == 2
    evaluated = [[batch.inputs["x"].tolist() for batch in each.eval_batches(4, 0, 1)] for each in closing[1:]]
    assert [sum(map(len, batches)) for batches in evaluated] == [9, 11]
    closing[1].close()
    closing[2].close()
    assert read_draws(epoch(closing[0])) == read_draws(epoch(loader(Noisy())))
    closing[0].close()
    assert not begun & set(multiprocessing.active_children())


def test_a_stream_goes_on_after_another_one_has_had_the_processes(closing: list[Loader]) -> None:
    """As where a hook evaluates in the middle of an epoch."""
    parts = [Noisy(37), Noisy(9)]
    shared = source(parts[0], val=parts[1])
    closing += [Loader(part, shared, DataConfig(num_workers=2), device=CPU, seed=42) for part in parts]
    steps, expected = [], epoch(loader(Noisy()))
    for _, work in closing[0].epoch(PLAN, 0, 0, 0, 1):
        steps.append(list(work))
        assert [batch.inputs["x"].tolist() for batch in closing[1].eval_batches(5, 0, 1)] == [
            [0, 1, 2, 3, 4],
            [5, 6, 7, 8],
        ]
    assert indices(steps) == indices(expected)
    assert read_draws(steps) == read_draws(expected)


class Slow(Noisy):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return super().__getitem__(index)


class Quick(Dataset[Any]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Any:
        return index, index


class Whole(Quick):
    """Hands out whole batches, each with a random number."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        drawn = torch.rand(())
        return [(torch.tensor([index, drawn]), index) for index in indices]


@pytest.mark.parametrize(
    ("cores", "workers", "expected"), [(4, 1, 3), (16, 1, 15), (100, 1, 16), (8, 3, 1), (4, 4, 0), (1, 1, 0), (2, 8, 0)]
)
def test_auto_leaves_a_core_for_each_trainer(
    cores: int, workers: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "count_cores", lambda: cores)
    split = Slow()
    served = Loader(split, source(split), DataConfig(), device=CPU, seed=1, workers_here=workers)
    assert served.data_location.startswith(
        f"fetched by {expected} loader process" if expected else "fetched in this process"
    )
    assert ("µs a sample, measured" in served.data_location) == (expected > 0)
    served.close()


def test_auto_fetches_what_comes_at_once_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "count_cores", lambda: 4)
    monkeypatch.setattr("multigpu_cli.data.fetcher._TRANSFER_COST", 1e-3)  # also on a starved machine
    assert Loader(Quick(), source(Quick()), DataConfig(), device=CPU, seed=1).data_location.startswith(
        "fetched in this process: "
    )


def test_a_first_sample_that_opens_files_does_not_decide(
    closing: list[Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opening(Quick):
        opened = False

        def __getitem__(self, index: int) -> Any:
            if not self.opened:
                time.sleep(1.2)
            self.opened = True
            return super().__getitem__(index)

    monkeypatch.setattr(fetcher, "count_cores", lambda: 4)
    monkeypatch.setattr("multigpu_cli.data.fetcher._TRANSFER_COST", 1e-3)  # also on a starved machine
    closing.append(loader(Opening(), "auto"))
    assert closing[0].data_location.startswith("fetched in this process: ")


@pytest.mark.parametrize("processes", [0, 1])
def test_a_dataset_may_hand_out_whole_batches(processes: int, closing: list[Loader]) -> None:
    """Its random numbers belong to the batch, whoever fetches it, and whenever."""
    served = loader(Whole(), processes)
    closing.append(served)
    batches = [batch for work in epoch(served) for batch in work]
    for batch in batches:
        assert batch.inputs[:, 0].tolist() == batch.targets.tolist() == batch.sample_indices.tolist()
        assert len(set(batch.inputs[:, 1].tolist())) == 1
    assert len({float(batch.inputs[0, 1]) for batch in batches}) == len(batches)
    again = [batch for _, work in loader(Whole()).epoch(PLAN, 0, 1, 0, 1) for batch in work]
    assert [batch.inputs.tolist() for batch in again] == [batch.inputs.tolist() for batch in batches][-len(again) :]


def test_too_few_samples_of_a_whole_batch_are_refused() -> None:
    class Short(Whole):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return super().__getitems__(indices)[1:]

    with pytest.raises(RequestError, match=r"Short.__getitems__ gave \d samples where \d were asked for"):
        epoch(loader(Short()))


def test_what_fails_while_it_is_measured_is_told_without_the_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Quick):
        def __getitem__(self, index: int) -> Any:
            return int("x")

    monkeypatch.setattr(fetcher, "count_cores", lambda: 4)
    before = set(multiprocessing.active_children())
    with pytest.raises(RequestError, match="sample 0 raised ValueError") as caught:
        loader(Failing(), "auto")
    assert len(str(caught.value).splitlines()) < 4
    assert "see what Failing[0] of the train split gives in Python" in str(caught.value)
    assert set(multiprocessing.active_children()) <= before


def test_several_tensors_in_memory_are_several_inputs() -> None:
    split = TensorDataset(torch.arange(37), -torch.arange(37), torch.arange(37) % 3)
    for work in epoch(loader(split, form=SampleForm(inputs=2))):
        for batch in work:
            assert [side.tolist() for side in batch.inputs] == [
                batch.sample_indices.tolist(),
                (-batch.sample_indices).tolist(),
            ]
            assert batch.targets.tolist() == (batch.sample_indices % 3).tolist()
    alone = TensorDataset(torch.arange(37))
    (first, *_), *_ = epoch(loader(alone, form=SampleForm(needs_target=False)))
    assert (first.inputs.tolist(), first.targets) == (first.sample_indices.tolist(), None)
