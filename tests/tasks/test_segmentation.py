"""A class for each pixel: the loss and mIoU as torch and scikit-learn have them."""

import pytest
import torch
from sklearn.metrics import jaccard_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.load import choose_form, infer_source
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.tasks.supervised import Classification, Segmentation

CLASSES, VOID = 4, 255


def masks(count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """(n, 6, 5): a fifth of the pixels does not count, and class 3 is never there."""
    drawn = torch.Generator().manual_seed(5)
    void = torch.rand(count, 6, 5, generator=drawn) < 0.2
    return torch.randint(CLASSES - 1, (count, 6, 5), generator=drawn).masked_fill(void, VOID).to(dtype)


def source(targets: Tensor, num_classes: int = CLASSES) -> DataSource:
    pixels = TensorDataset(torch.zeros(len(targets), 1, 6, 5), targets)
    return DataSource(train=pixels, val=None, test=None, input_shape=(1, 6, 5), num_classes=num_classes)


def draw_batch(count: int = 7, **more: torch.dtype) -> Batch:
    logits = torch.randn(count, CLASSES, 6, 5, generator=torch.Generator().manual_seed(2))
    return Batch(logits, masks(count, **more), torch.arange(count), 0)


same = nn.Identity()


def test_loss_and_figures_agree_with_torch_and_scikit_learn() -> None:
    batch = draw_batch()
    task, targets = Segmentation(source(batch.targets), TaskConfig()), batch.targets.long()
    units = int(task.units(batch))
    assert units == int((targets != VOID).sum()) < targets.numel()
    mean = cross_entropy(batch.inputs, targets, ignore_index=VOID)
    assert float(task.loss_sum(same, batch)) / units == pytest.approx(float(mean), rel=1e-6)
    measured = task.measure(same, batch)
    assert float(measured.loss_sum) / units == pytest.approx(float(mean), rel=1e-6)
    figures = task.metrics(measured.counts, units)
    counted, predicted = targets != VOID, batch.inputs.argmax(1)
    wanted = jaccard_score(targets[counted], predicted[counted], average="macro")  # of labels on either side
    assert figures["miou"] == pytest.approx(wanted, rel=1e-12)
    assert figures["accuracy"] == pytest.approx(float((predicted == targets)[counted].double().mean()))
    assert task.score(figures | {"loss": 1.0}) == (figures["miou"], -1.0)
    assert torch.equal(task.outputs(same, batch), predicted)
    assert task.predictions(same, batch) == {}, "a mask is no row of a table"


@pytest.mark.parametrize("form", ["(n, 1, h, w)", "out", "float16"])
def test_other_forms_are_the_same(form: str) -> None:
    batch = draw_batch()
    task = Segmentation(source(batch.targets), TaskConfig())
    wanted = float(task.measure(same, batch).loss_sum)
    if form == "out":
        found = task.measure(lambda inputs: {"out": inputs, "aux": None}, batch)  # type: ignore[arg-type]
    elif form == "float16":
        found = task.measure(lambda inputs: inputs.half(), batch)  # type: ignore[arg-type]
    else:
        found = task.measure(same, Batch(batch.inputs, batch.targets[:, None], batch.sample_indices, 0))
    assert float(found.loss_sum) == pytest.approx(wanted, rel=1e-3 if form == "float16" else 1e-9)


def test_class_156_of_eight_bits_counts_and_another_void_does_not() -> None:
    """In 8 bits -100, which torch's losses ignore, would be 156."""
    targets = torch.tensor([[[156, 0], [7, 7]]], dtype=torch.uint8)
    task = Segmentation(source(targets, num_classes=157), TaskConfig(), ignore_index=7)
    batch = Batch(torch.zeros(1, 157, 2, 2), targets, torch.arange(1), 0)
    assert int(task.units(batch)) == 2
    assert int(task.measure(same, batch).counts.view(-1, 157)[2].sum()) == 2


def test_a_pixel_of_no_class_is_named() -> None:
    batch = draw_batch()
    with pytest.raises(ValueError, match="a pixel of class 255, and there are 4 classes"):
        Segmentation(source(batch.targets), TaskConfig(), ignore_index=0).measure(same, batch)
    with pytest.raises(ValueError, match=r"outputs \(7, 4, 3, 3\) for targets uint8 \(7, 6, 5\), 4 classes"):
        Segmentation(source(batch.targets), TaskConfig()).measure(lambda x: x[..., :3, :3], batch)  # type: ignore[arg-type]


class Scenes(Dataset):
    def __init__(self, targets: Tensor) -> None:
        self.targets_of_each = targets

    def __len__(self) -> int:
        return len(self.targets_of_each)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(3, 6, 5), self.targets_of_each[index]


@pytest.mark.parametrize("kind", [Scenes, lambda each: TensorDataset(torch.zeros(len(each), 3, 6, 5), each)])
def test_classes_are_counted_without_the_void(kind) -> None:
    train = kind(masks(9))
    counted = infer_source(train, None, None, 0, choose_form(None, "segmentation")).num_classes
    assert counted == CLASSES - 1
    form = choose_form(None, "segmentation", {"ignore_index": -1})
    assert infer_source(train, None, None, 0, form).num_classes == VOID + 1
    assert infer_source(train, None, None, 0, choose_form(None, "classification")).num_classes == 0
    with pytest.raises(RequestError, match=r"task\.args\.ignore_index: 'void'\n  try: a whole number"):
        choose_form(None, "segmentation", {"ignore_index": "void"})


@pytest.mark.parametrize(
    ("target", "task"),
    [
        (torch.zeros(6, 5, dtype=torch.uint8), "--task segmentation"),
        (torch.tensor([0, 1, 1]), "--task multi-label"),
        (torch.tensor([0.0, 1.0, 1.0]), "--task multi-label"),
        (torch.tensor([True, False]), "--task multi-label"),
        (torch.tensor([0.5, 1.0, 1.0]), "--task regression"),
        (torch.tensor(0.5), "--task regression"),
        ({"kind": torch.tensor(1), "size": torch.tensor(0.5)}, "--task my_code:Task"),
        (torch.tensor([3, 1]), "the class number of each sample"),
    ],
)
def test_a_refusal_names_the_task_of_such_targets(target, task: str) -> None:
    class Samples(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int):
            return torch.zeros(3, 6, 5), target

    with pytest.raises(RequestError) as refused:
        Classification(infer_source(Samples(), None, None, 0, choose_form(None, None)), TaskConfig())
    assert refused.value.remedy.startswith(task), refused.value
