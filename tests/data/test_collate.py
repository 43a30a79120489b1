import errno
import re
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, Subset

from multigpu_cli.data.collate import (
    PAIR,
    Collate,
    Fetched,
    SampleForm,
    describe_shapes,
    fetch_together,
    get_sample,
    get_samples,
    to_pair,
)
from multigpu_cli.errors import RequestError, TrainingError


def test_a_pair_of_arrays_becomes_a_pair_of_tensors() -> None:
    inputs, target = to_pair((numpy.arange(6.0).reshape(2, 3), numpy.int64(4)), "sample 0")
    assert (inputs.dtype, inputs.shape, target.dtype, int(target)) == (torch.float32, (2, 3), torch.int64, 4)
    bytes_stay, number = to_pair([numpy.zeros(3, dtype=numpy.uint8), 0.5], "sample 0")
    assert (bytes_stay.dtype, number.dtype) == (torch.uint8, torch.float32)
    double = torch.zeros(2, dtype=torch.float64)
    assert to_pair((double, 1), "sample 0")[0] is double, "tensors are as their owner made them"


@pytest.mark.parametrize("name", ["target", "targets", "label", "labels", "y"])
def test_the_target_of_a_mapping_goes_by_its_name(name: str) -> None:
    inputs, target = to_pair({"x": [1.0, 2.0], name: 3}, "sample 0")
    assert (inputs.tolist(), int(target)) == ([1.0, 2.0], 3)
    inputs, _ = to_pair({"image": torch.ones(2), "age": 7, name: 3}, "sample 0")
    assert {key: value.tolist() for key, value in inputs.items()} == {"image": [1.0, 1.0], "age": 7}


@pytest.mark.parametrize(
    "labels", [{"labels": [5, 6, 7, 8]}, {}, {"labels": torch.tensor([[5, 6, 7, 8]]), "input_ids": [[5, 6, 7, 8]]}]
)
def test_labels_at_their_tokens_are_moved_to_where_they_are_predicted(labels: dict[str, Any]) -> None:
    item = {"input_ids": numpy.array([5, 6, 7, 8])} | {key: torch.as_tensor(value) for key, value in labels.items()}
    inputs, targets = to_pair(item, "sample 0")
    assert inputs.flatten().tolist() == [5, 6, 7, 8]
    assert targets.flatten().tolist() == [6, 7, 8, -100]


def test_padding_is_nothing_to_predict() -> None:
    inputs, targets = to_pair({"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]}, "sample 0")
    assert targets.tolist() == [6, -100, -100, -100]
    assert set(inputs) == {"input_ids", "attention_mask"}


def test_the_class_of_a_sequence_is_not_moved() -> None:
    _, target = to_pair({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "labels": 1}, "sample 0")
    assert int(target) == 1


def test_images_become_bytes_channels_first() -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow (extra images)")
    colour, grey = image.new("RGB", (5, 4), (1, 2, 3)), image.new("L", (5, 4), 9)
    inputs, _ = to_pair((colour, 0), "sample 0")
    assert (inputs.dtype, inputs.shape, inputs[:, 0, 0].tolist()) == (torch.uint8, (3, 4, 5), [1, 2, 3])
    assert to_pair((grey, 0), "sample 0")[0].shape == (1, 4, 5)


@pytest.mark.parametrize(
    ("item", "named"),
    [
        (torch.ones(2), "sample 7 must be (input, target), not Tensor"),
        ((1, 2, 3), "not tuple of 3"),
        ({"a": 1, "b": 2}, "has no target among a, b"),
        ({"y": 1, "label": 2}, "has label and y among y, label"),
    ],
)
def test_what_is_no_sample_is_named(item: Any, named: str) -> None:
    with pytest.raises(RequestError, match=re.escape(named)):
        to_pair(item, "sample 7")


class Ragged:
    """Samples of 1, 2 or 3 numbers; the fourth is broken."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(index % 4) / (index % 4 != 3 or {"whole": 1}["broken"]), index

    def __len__(self) -> int:
        return 12


def test_samples_that_make_no_batch_are_shown() -> None:
    numbered = [(index, get_sample(Ragged(), index)) for index in (1, 2)]  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"sample 1: \(float32 \(1,\), int64 \(\)\)\n *sample 2: ") as refused:
        Collate(Ragged())(numbered)  # type: ignore[arg-type]
    assert "collate_fn" in refused.value.remedy


def test_a_sample_that_raises_is_named_with_its_place() -> None:
    with pytest.raises(RequestError, match=r"sample 7 raised KeyError in test_collate\.py:\d+: 'broken'"):
        get_sample(Ragged(), 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 1), (errno.ESTALE, 1), (errno.EACCES, 2), (errno.ENOENT, 2)])
def test_failing_disk_of_a_dataset_is_no_wrong_request(number: int, code: int) -> None:
    class OnDisk:
        def __getitem__(self, index: int) -> Any:
            raise OSError(number, "no answer", "/nfs/7.png")

        __getitems__ = __getitem__

    for fetch, index in ((get_sample, 7), (get_samples, [7])):
        with pytest.raises(TrainingError, match=r"7 raised \w+ in test_collate\.py:\d+: .*/nfs/7\.png") as raised:
            fetch(OnDisk(), index, split="val")  # type: ignore[arg-type]
        assert raised.value.exit_code == code
        assert ("disk" if code == 1 else "of the val split gives in Python") in raised.value.remedy


def test_a_collate_fn_gets_samples_as_they_are_and_may_return_a_mapping() -> None:
    class Own(Ragged):
        def collate_fn(self, samples: list[Any]) -> dict[str, Tensor]:
            assert all(isinstance(target, int) for _, target in samples)
            padded = torch.nn.utils.rnn.pad_sequence([inputs for inputs, _ in samples], batch_first=True)
            return {"x": padded, "y": torch.tensor([target for _, target in samples])}

    divided = Subset(Own(), [0, 1, 2])  # type: ignore[arg-type, var-annotated]
    for dataset in (Own(), divided, Subset(divided, [1])):
        inputs, targets = Collate(dataset)([(at, Own()[at]) for at in (1, 2)])  # type: ignore[arg-type]
        assert (inputs.tolist(), targets.tolist()) == ([[1.0, 0.0], [1.0, 1.0]], [1, 2])


def test_shapes_in_words() -> None:
    value = {"x": torch.zeros(2, 3), "names": ("a", [torch.ones((), dtype=torch.int64)] * 6)}
    row = "int64 (), int64 (), int64 (), int64 (), …"
    assert describe_shapes(value) == f"{{x: float32 (2, 3), names: (str, ({row}))}}"


TWO = SampleForm(inputs=2)
FREE = SampleForm(needs_target=False)
WHOLE = SampleForm(needs_target=False, keeps_mappings=True)


@pytest.mark.parametrize(
    ("item", "form", "inputs", "targets"),
    [
        (([1.0], 2), PAIR, [1.0], 2),
        (((1, 2), 3), PAIR, (1, 2), 3),
        (([numpy.ones(1), (1, 2)], 3), PAIR, [[1.0], (1, 2)], 3),
        ((1, 2, 3), TWO, (1, 2), 3),
        ((1, 2, 3, 4), TWO, (1, 2), (3, 4)),
        ((1, 2, 3), SampleForm(inputs=1), 1, (2, 3)),
        ((1, 2), SampleForm(inputs=2, needs_target=False), (1, 2), None),
        ((1,), FREE, 1, None),
        (torch.tensor(1), FREE, 1, None),
        ({"a": 1, "b": 2}, FREE, {"a": 1, "b": 2}, None),
        ({"a": 1, "label": 2}, FREE, 1, 2),
        ({"a": 1, "label": 2}, WHOLE, {"a": 1, "label": 2}, None),
        ({"input_ids": [1, 2], "labels": [1, 2]}, WHOLE, {"input_ids": [1, 2], "labels": [1, 2]}, None),
    ],
)
def test_a_form_divides_a_sample(item: Any, form: SampleForm, inputs: Any, targets: Any) -> None:
    found = to_pair(item, "sample 0", form)
    assert tree_map_only(Tensor, Tensor.tolist, found) == (inputs, targets)
    assert all(isinstance(leaf, Tensor) for leaf in tree_leaves(found) if leaf is not None)


@pytest.mark.parametrize(
    ("item", "form", "named", "remedy"),
    [
        ((1, 2, 3), PAIR, "not tuple of 3", "--set data.inputs=2"),
        ((1, 2), TWO, "must be data.inputs=2 and a target, not tuple of 2", "a pair"),
        (torch.ones(1), TWO, "not Tensor", "a pair"),
        ({"a": 1, "y": 2}, TWO, "data.inputs=2: sample 0 is a dict", "leave it out"),
        ((1,), PAIR, "(input, target), not tuple of 1", "a pair"),
        ((1,), SampleForm(inputs=2, needs_target=False), "not tuple of 1", "a pair"),
    ],
)
def test_a_sample_of_another_form_is_named(item: Any, form: SampleForm, named: str, remedy: str) -> None:
    with pytest.raises(RequestError, match=re.escape(named)) as refused:
        to_pair(item, "sample 0", form)
    assert refused.value.remedy.startswith(remedy)


def test_tuples_of_inputs_are_batches_in_a_tuple() -> None:
    numbered = [(at, ((torch.ones(2) * at, [at, at]), (at, 1.5))) for at in range(3)]
    inputs, targets = Collate(Own(None))(numbered)
    assert [type(side) for side in (inputs, targets)] == [tuple, tuple]
    assert [tuple(each.shape) for each in (*inputs, *targets)] == [(3, 2), (3, 2), (3,), (3,)]
    alone = Collate(Own(None), FREE)([(0, (torch.ones(2),)), (1, (torch.ones(2),))])
    assert (alone.inputs.shape, alone.targets) == ((2, 2), None)


class Own(Dataset[Any]):
    """A dataset with a collate_fn, or none."""

    def __init__(self, collate_fn: Any) -> None:
        if collate_fn:
            self.collate_fn = collate_fn


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_collate_fn_that_only_turns_samples_gives_lists_of_them(count: int) -> None:
    """Images have three channels, so a batch of three could be taken for three inputs."""
    samples = [(at, (torch.ones(3, 4, 4 + at), {"boxes": torch.ones(at, 4)})) for at in range(count)]
    inputs, targets = Collate(Own(lambda some: tuple(zip(*some, strict=True))))(samples)
    assert [type(side) for side in (inputs, targets)] == [list, list]
    assert [len(side) for side in (inputs, targets)] == [count, count]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_collate_fn_may_give_several_inputs_and_targets(count: int) -> None:
    batch = ((torch.ones(count), torch.ones(count, 2)), (torch.ones(count), torch.ones(count)))
    inputs, targets = Collate(Own(lambda _: batch))([(at, None) for at in range(count)])
    assert (type(inputs), type(targets)) == (tuple, tuple)


def test_batches_that_are_fetched_together_are_the_same_and_change_alone() -> None:
    """Also where a network adds a weight to its inputs in place, which would lead from one batch's graph to another."""
    rows, classes, fetched = torch.randn(40, 3), torch.arange(40), []

    def fetch(indices: Tensor) -> Fetched:
        fetched.append(len(indices))
        return Fetched((rows[indices], rows[indices] + 1), classes[indices], indices)

    weight, chunks = torch.nn.Parameter(torch.ones(3)), torch.randperm(40).split(7)
    for chunk, batch in zip(chunks, fetch_together(chunks, fetch), strict=True):
        first, second = batch.inputs
        assert torch.equal(first, rows[chunk])
        assert torch.equal(second, rows[chunk] + 1)
        assert torch.equal(batch.targets, chunk)
        assert batch.indices is chunk
        assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
        first.add_(weight).sum().backward()
    assert fetched == [7, 33]
