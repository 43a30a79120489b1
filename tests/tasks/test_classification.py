import numpy
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, log_loss, precision_recall_fscore_support
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.tasks.supervised import Classification

CLASSES = 5


def split(labels: list[int] | Tensor) -> TensorDataset:
    targets = torch.as_tensor(labels)
    return TensorDataset(torch.zeros(len(targets), 2), targets)


def source(train: TensorDataset, num_classes: int = CLASSES, names: tuple[str, ...] = ()) -> DataSource:
    return DataSource(train=train, val=None, test=None, input_shape=(2,), num_classes=num_classes, class_names=names)


def task(names: tuple[str, ...] = (), **config: float) -> Classification:
    return Classification(source(split([0, 1, 2, 3, 4]), names=names), TaskConfig(**config))  # type: ignore[arg-type]


def batch(logits: Tensor, targets: Tensor) -> Batch:
    return Batch(logits, targets, torch.arange(len(targets)), 0)


def draw_logits(count: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Logits that are right about half of the time; class 3 is never true and class 4 never predicted."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.tensor([0, 1, 2, 4])[torch.randint(4, (count,), generator=generator)]
    logits = torch.randn(count, CLASSES, generator=generator) + 1.5 * nn.functional.one_hot(targets, CLASSES)
    logits[:, 4] = -9
    return logits, targets


same = nn.Identity()


def test_every_figure_agrees_with_scikit_learn() -> None:
    logits, targets = draw_logits(500)
    components = task()
    measured = [
        components.measure(same, batch(logits[at : at + 64], targets[at : at + 64])) for at in range(0, 500, 64)
    ]
    counts = torch.stack([each.counts for each in measured]).sum(0)
    predicted = logits.argmax(1)
    details = components.details(counts)
    assert details["confusion"] == confusion_matrix(targets, predicted, labels=range(CLASSES)).tolist()
    assert components.metrics(counts, 500) == {"accuracy": accuracy_score(targets, predicted)}
    probabilities = logits.double().softmax(1).numpy()
    loss = sum(float(each.loss_sum) for each in measured) / 500
    assert loss == pytest.approx(log_loss(targets, probabilities, labels=range(CLASSES)), rel=1e-9)
    by_class = precision_recall_fscore_support(targets, predicted, labels=range(CLASSES), zero_division=0)
    for at, row in enumerate(details["per_class"]):
        assert row["class"] == str(at)
        found = [row["precision"], row["recall"], row["f1"], row["support"]]
        assert found == pytest.approx([column[at] for column in by_class], rel=1e-12)


def test_counts_are_whole_numbers_one_for_each_sample() -> None:
    logits, targets = draw_logits(77)
    measured = task().measure(same, batch(logits, targets))
    assert measured.counts.dtype == torch.int64
    assert measured.counts.view(-1, CLASSES)[1:].sum(1).tolist()[:2] == [77, 77], "predictions and samples"
    assert int(measured.counts.view(-1, CLASSES)[3:].sum()) == 77
    assert measured.loss_sum.dtype == torch.float64


def test_the_training_loss_is_summed_and_smoothed() -> None:
    logits, targets = draw_logits(20)
    plain, smoothed = (task(label_smoothing=value).loss_sum(same, batch(logits, targets)) for value in (0.0, 0.3))
    assert plain.shape == ()
    assert float(plain) == pytest.approx(20 * float(cross_entropy(logits, targets)), rel=1e-6)
    uniform = -logits.log_softmax(1).mean(1).sum()
    assert float(smoothed) == pytest.approx(0.7 * float(plain) + 0.3 * float(uniform), rel=1e-5)
    assert float(task(label_smoothing=0.3).measure(same, batch(logits, targets)).loss_sum) == pytest.approx(
        float(plain)
    )


def test_half_precision_logits_are_widened_before_the_loss() -> None:
    logits, targets = draw_logits(300)
    rough = task().loss_sum(same, batch(logits.bfloat16(), targets))
    assert rough.dtype == torch.float32
    assert float(rough) == float(task().loss_sum(same, batch(logits.bfloat16().float(), targets)))


def test_classes_have_their_names() -> None:
    names = ("ant", "bee", "cat", "dog", "emu")
    logits, targets = draw_logits(30)
    components = task(names)
    rows = components.details(components.measure(same, batch(logits, targets)).counts)["per_class"]
    assert tuple(row["class"] for row in rows) == names


def test_higher_accuracy_is_better_and_then_lower_loss() -> None:
    ranked = [(0.5, 0.9), (0.5, 0.8), (0.6, 2.0), (0.6, 1.0)]
    scores = [task().score({"accuracy": accuracy, "loss": loss}) for accuracy, loss in ranked]
    assert scores == sorted(scores)
    assert len(set(scores)) == 4


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (torch.tensor([0, 1, 5]), r"train labels range from 0 to 5 with 5 classes"),
        (torch.tensor([-1, 1, 4]), r"train labels range from -1 to 4"),
        (torch.tensor([0.0, 1.0]), r"train targets must be \(n,\) int64 class numbers, not \(2,\) torch.float32"),
        (torch.tensor([[0, 1], [1, 0]]), r"not \(2, 2\) torch.int64"),
        (torch.tensor([0, 1], dtype=torch.int32), r"torch.int32"),
    ],
)
def test_labels_that_are_no_classes_are_refused_before_training(labels: Tensor, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        Classification(source(split(labels)), TaskConfig())


def test_other_splits_are_checked_too() -> None:
    good, bad = split([0, 1]), split([0, 9])
    wrong = DataSource(train=good, val=None, test=bad, input_shape=(2,), num_classes=CLASSES)
    with pytest.raises(RequestError, match="test labels range from 0 to 9"):
        Classification(wrong, TaskConfig())


@pytest.mark.parametrize("count", [0, 1])
def test_a_dataset_without_classes_is_refused(count: int) -> None:
    with pytest.raises(RequestError, match=f"the dataset has {count} class"):
        Classification(source(split([0, 0]), num_classes=count), TaskConfig())


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (torch.tensor([1]), r"0 classes: the target of sample 0 is int64 \(1,\)\n  try: the class number"),
        (0.5, r"0 classes: the target of sample 0 is float32 \(\)\n  try: --task regression"),
        ("cat", r"0 classes: the target of sample 0 is str\n  try: the class number of each .* a whole number"),
        (None, r"0 classes: the target of sample 0 is NoneType\n  try: the class number"),
    ],
)
def test_targets_that_are_no_class_numbers_are_described(target: object, named: str) -> None:
    class Samples:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[Tensor, object]:
            return torch.zeros(2), target

    with pytest.raises(RequestError, match=named):
        Classification(source(Samples(), num_classes=0), TaskConfig())  # type: ignore[arg-type]


def test_numpy_labels_of_a_users_dataset_are_not_read_twice() -> None:
    class Once:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[numpy.ndarray, int]:
            raise AssertionError("nobody should look")

    Classification(source(Once()), TaskConfig())  # type: ignore[arg-type]
