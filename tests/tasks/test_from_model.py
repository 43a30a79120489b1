"""Networks that compute their own loss: where it is found, and what it is the mean over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from multigpu_cli.config.schema import DataConfig, TaskConfig
from multigpu_cli.data.load import choose_form, infer_source
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World
from multigpu_cli.language.text import Windows, load
from multigpu_cli.models.build import adapt_model
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.tasks.own_loss import FromModel
from tests.support.run_training import run_training

CPU = torch.device("cpu")
FORM = choose_form(None, "from-model")
TWO, NONE = torch.tensor(2.0), torch.tensor(float("nan"))


class Rows(Dataset[Any]):
    """Eleven rows of six tokens, of which the labels of 0 to 5 count."""

    def __init__(self, part: str = "dict") -> None:
        self.tokens = torch.randint(7, (11, 6), generator=torch.Generator().manual_seed(0))
        self.labels = torch.where(torch.arange(6) < torch.arange(11)[:, None] % 6, self.tokens, -100)
        self.part = part

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        pair = self.tokens[index], self.labels[index]
        return {"input_ids": pair[0], "labels": pair[1]} if self.part == "dict" else pair


class CausalLMOutput(NamedTuple):
    loss: Tensor
    logits: Tensor


class Words(nn.Module):
    """Its loss is torch's mean over the labels that count; a causal one predicts the following label."""

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.causal = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double(), causal

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.net(input_ids)
        if not self.causal:
            return SimpleNamespace(loss=cross_entropy(logits.flatten(0, 1), labels.flatten()))
        return CausalLMOutput(cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


def source_of(dataset: Dataset[Any]) -> DataSource:
    return infer_source(dataset, None, None, 0, FORM)


def loss_and_gradient(part: str, *, causal: bool, size: int) -> tuple[float, Tensor]:
    """Of all rows as one step, in micro-batches of so many, and what it evaluates to."""
    source, model = source_of(Rows(part)), Words(causal=causal)
    adapt_model(model)
    task = FromModel(source, TaskConfig())
    loader = Loader(source.train, source, DataConfig(num_workers=0), device=CPU, seed=0)
    units = 0
    for batch in loader.eval_batches(size, 0, 1):
        task.loss_sum(model, batch).backward()
        units += int(task.units(batch))
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) / units
    evaluated = task.evaluate(model, loader, World(CPU), Precision("off", CPU), size)
    return evaluated.metrics["loss"], gradient


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("part", ["dict", "pair"])
def test_a_step_is_the_mean_over_labels_however_it_is_cut(part: str, causal: bool) -> None:
    """Also where a micro-batch has none of them, whose mean is NaN."""
    whole, gradient = loss_and_gradient(part, causal=causal, size=11)
    for size in (1, 3):
        loss, parts = loss_and_gradient(part, causal=causal, size=size)
        assert loss == pytest.approx(whole, rel=1e-6)
        torch.testing.assert_close(parts, gradient, rtol=1e-6, atol=1e-9)


def task_of(**args: Any) -> FromModel:
    return FromModel(source_of(Rows("pair")), TaskConfig(), **args)


def compute_loss(outputs: Any, **args: Any) -> float:
    """The loss that is found in what a network returns."""
    tokens = torch.zeros(3, dtype=torch.int64)
    batch = Batch(torch.zeros(3, 1), tokens, torch.arange(3), 0)
    return float(task_of(**args).loss_sum(lambda _: outputs, batch)) / 3


@pytest.mark.parametrize(
    ("outputs", "args"),
    [
        (TWO, {}),
        (SimpleNamespace(loss=TWO, logits=torch.zeros(3)), {}),
        ({"loss": TWO, "other": NONE}, {}),
        ({"boxes": TWO / 2, "classes": TWO / 2}, {}),
        ((torch.zeros(3, 4), TWO), {}),
        ({"boxes": NONE, "classes": TWO}, {"loss": "classes"}),
        ((NONE, TWO), {"loss": 1}),
        (SimpleNamespace(loss=NONE, mine=TWO), {"loss": "mine"}),
    ],
)
def test_the_loss_is_found(outputs: Any, args: dict[str, Any]) -> None:
    assert compute_loss(outputs, **args) == 2.0


@pytest.mark.parametrize(
    ("outputs", "args"),
    [
        (torch.zeros(3), {}),
        ((TWO, TWO), {}),
        ({"boxes": TWO, "logits": torch.zeros(3)}, {}),
        ({"boxes": TWO}, {"loss": "classes"}),
        ((TWO,), {"loss": 5}),
        ([{"boxes": torch.zeros(2)}], {}),
    ],
)
def test_what_is_no_loss_is_not_taken_for_one(outputs: Any, args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no loss"):
        compute_loss(outputs, **args)


class Detector(nn.Module):
    """No loss in evaluation mode; one that dropout and BatchNorm would change in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.seen = nn.BatchNorm1d(6), nn.Dropout(0.5), torch.zeros(())
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        said = self.drop(self.norm(x.float()))
        if not self.training:
            return [{"boxes": row} for row in said]
        self.count = self.count + 1
        return {"loss_boxes": (said - x).abs().mean()}


def test_a_network_without_a_loss_in_evaluation_mode_is_measured_all_the_same() -> None:
    source, model = source_of(Rows("pair")), Detector()
    adapt_model(model)
    loader = Loader(source.train, source, DataConfig(num_workers=0), device=CPU, seed=0)
    task = FromModel(source, TaskConfig())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = [task.evaluate(model, loader, World(CPU), Precision("off", CPU), size).metrics["loss"] for size in (4, 4)]
    assert found[0] == found[1]
    assert 0 < found[0] < 1e-3, "neither dropout nor the statistics of a batch are in it"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules()), "as they were"


def no_loss() -> nn.Module:
    class Silent(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x.float())

    return Silent(6, 2)


def test_a_model_without_a_loss_is_told_before_anything_is_written(tmp_path: Any) -> None:
    flags: dict[str, Any] = {
        "model": "tests.tasks.test_from_model:no_loss",
        "task": "from-model",
        "save_dir": str(tmp_path / "x"),
    }
    ended = run_training(1, **flags)
    assert ended.kind == "RequestError"
    for text in (
        "no loss in what it returns",
        "it returned         float32 (2, 2)",
        "task.loss=NAME",
        "model(x=…, y=…)",
    ):
        assert text in ended.error
    assert not (tmp_path / "x").exists()


def without_gradient() -> nn.Module:
    class Detached(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x.float()).detach().square().mean()

    return Detached(6, 2)


def test_a_loss_that_no_parameter_is_part_of_is_refused(tmp_path: Any) -> None:
    ended = run_training(
        1, model=f"{__name__}:without_gradient", task="from-model", save_dir=str(tmp_path / "x"), max_steps=1
    )
    assert ended.kind == "RequestError"
    assert "no trainable parameter is part of the loss" in ended.error
    assert ended.error.endswith("another --model, or --task; --debug shows the traceback")
    assert not (tmp_path / "x").exists()


class Nano(nn.Module):
    """What nanoGPT's network returns: logits and a loss that ignores -1; logits of the last token without targets."""

    def __init__(self, vocabulary: int, ignored: tuple[int, ...] = (-1,)) -> None:
        super().__init__()
        self.embed, self.head, self.ignored = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary), ignored

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embed(idx)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        losses = [cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=each) for each in self.ignored]
        return logits, torch.stack(losses).mean()


def nano(num_classes: int) -> nn.Module:
    return Nano(num_classes)


def picky(num_classes: int) -> nn.Module:
    """It ignores two labels, so that neither is the one for what does not count, and takes no other below zero."""
    return Nano(num_classes, (-1, -2))


@pytest.mark.parametrize("part", ["dict", "pair"])
def test_the_label_that_a_network_ignores_is_found(part: str) -> None:
    """Also in a first batch that has such labels, and where the data has them itself; then neither counts."""
    torch.manual_seed(0)
    rows, model = Rows(part), Nano(7)
    adapt_model(model)
    given = model if part == "pair" else (lambda row: model(row["input_ids"], row["labels"]))
    losses = []
    for label in (-100, -1):
        rows.labels = torch.where(rows.labels < 0, label, rows.labels)
        source = source_of(rows)
        batch = next(Loader(rows, source, DataConfig(num_workers=0), device=CPU, seed=0).eval_batches(11, 0, 1))
        task = FromModel(source, TaskConfig())
        losses.append(task.loss_sum(given, batch).item() / int(task.units(batch)))
        assert int(task.units(batch)) == int((rows.labels >= 0).sum())
    expected = cross_entropy(model.head(model.embed(rows.tokens)).flatten(0, 1), rows.labels.flatten(), ignore_index=-1)
    assert losses == [pytest.approx(expected.item(), rel=1e-6)] * 2


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # nn.Linear gives a view of what it computed
def test_a_text_with_a_padded_window_is_learned_and_evaluated(tmp_path: Path) -> None:
    """On one worker, on two, and sharded: the loss over the text's own tokens."""
    text = tmp_path / "words.txt"
    text.write_text("to be or not to be, that is the question: " * 12)
    flags: dict[str, Any] = {"data": "text", "data_dir": str(text), "task": "from-model", "batch_size": 4}
    flags |= {"model": f"{__name__}:nano", "epochs": 1, "global_batch_size": 8, "num_workers": 0}
    found = []
    for name, workers, how in (("one", 1, "auto"), ("two", 2, "ddp"), ("shards", 2, "fsdp")):
        ended = run_training(workers, sets=["data.block=16"], multi_gpu=how, save_dir=str(tmp_path / name), **flags)
        found.append(ended.summary["final"]["val_loss"])
    source = load(str(text), block=16)
    model, val = Nano(source.num_classes), source.val
    assert isinstance(val, Windows)
    model.load_state_dict(torch.load(tmp_path / "one/last.pt", weights_only=True)["model"])
    inputs, targets = (torch.stack(part) for part in zip(*(val[index] for index in range(len(val))), strict=True))
    assert (targets == -100).any()
    logits = model.head(model.embed(inputs)).flatten(0, 1)
    assert found == [pytest.approx(cross_entropy(logits, targets.flatten()).item(), rel=1e-5)] * 3


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # nn.Linear gives a view of what it computed
@pytest.mark.parametrize(("workers", "how"), [(1, "auto"), (2, "fsdp")])
def test_a_padded_window_that_the_network_does_not_take_is_told_before_training(
    workers: int, how: str, tmp_path: Path
) -> None:
    text = tmp_path / "words.txt"
    text.write_text("to be or not to be, that is the question: " * 12)
    flags: dict[str, Any] = {"data": "text", "data_dir": str(text), "task": "from-model", "multi_gpu": how}
    flags |= {"model": f"{__name__}:picky", "num_workers": 0, "save_dir": str(tmp_path / "run")}
    for dry in (True, False) if workers == 1 else (False,):
        ended = run_training(workers, sets=["data.block=16"], dry_run=dry, **flags)
        assert ended.kind == "RequestError"
        for words in ("does not take the last validation batch", "out of bounds", "task.ignore_index=N"):
            assert words in ended.error
    assert not (tmp_path / "run").exists()
    ended = run_training(
        1, sets=["data.block=16", "task.ignore_index=-1"], dry_run=True, **flags | {"multi_gpu": "auto"}
    )
    assert "Target -1 is out of bounds" in ended.error, "as asked for"


def test_a_network_that_returns_a_tuple_is_told_of_its_task(tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text("to be or not to be " * 30)
    flags: dict[str, Any] = {"data": "text", "data_dir": str(text), "model": f"{__name__}:nano"}
    flags["save_dir"] = str(tmp_path / "run")
    ended = run_training(1, sets=["data.block=8"], **flags)
    assert ended.kind == "RequestError"
    assert "try: --task from-model" in ended.error
