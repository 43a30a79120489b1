"""Whether selftest sees that a network takes the samples of a batch for something else, and what it does not blame."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from multigpu_cli.commands.selftest.checks import measure_mixing
from multigpu_cli.commands.selftest.process import SelftestProcess
from multigpu_cli.commands.selftest.selftest import prepare_run
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError

HERE = f"{__name__}"
TIME, FEATURES, CLASSES = 4, 8, 3  # as long as the batches that are tried
Mixer = Callable[[Tensor], Any]


class Apply(nn.Module):
    def __init__(self, work: Mixer) -> None:
        super().__init__()
        self.work = work

    def forward(self, x: Tensor) -> Any:
        return self.work(x)


class LeadingLSTM(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        result: Tensor = super().forward(x)[0]
        return result


class ExpertsOfTwo(nn.Module):
    """An expert takes the two largest samples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        taken = x.sum((1, 2)).topk(2).indices
        return x.index_add(0, taken, x[taken])


def trim(x: Tensor) -> Tensor:
    """To the longest of a batch; how long a sample is says its first number."""
    return x[:, : int(torch.where(x[:, 0, 0] > 0, TIME, 2).max())]


def own_noise() -> nn.Module:
    stream = torch.Generator().manual_seed(1)
    return Apply(lambda x: x + torch.randn(x.shape, generator=stream))


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "attention over the batch": lambda: nn.TransformerEncoderLayer(FEATURES, 2, 16),
    "attention": lambda: nn.TransformerEncoderLayer(FEATURES, 2, 16, batch_first=True),
    "lstm over the batch": lambda: LeadingLSTM(FEATURES, FEATURES),
    "lstm": lambda: LeadingLSTM(FEATURES, FEATURES, batch_first=True),
    "wrong view": lambda: Apply(lambda x: x.reshape(TIME, -1, FEATURES).transpose(0, 1)),
    "mean of the batch": lambda: Apply(lambda x: x - 0.01 * x.mean(0)),
    "longest of a batch": lambda: Apply(trim),
    "noise": lambda: Apply(lambda x: x + torch.randn(x.shape)),
    "noise of its own": own_noise,
    "running statistics": lambda: nn.BatchNorm1d(TIME),
    "batch statistics": lambda: nn.BatchNorm1d(TIME, track_running_stats=False),
    "experts": ExpertsOfTwo,
    "nothing": lambda: Apply(lambda x: x * 0),
    "not a number": lambda: Apply(lambda x: x / 0 * 0),
}


class Net(nn.Module):
    """Sequences (n, 4, 8) to logits (n, 3)."""

    def __init__(self, mixer: str) -> None:
        super().__init__()
        self.mixer, self.head = MIXERS[mixer](), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.mixer(x).mean(1))


class WithLoss(Net):
    """Returns its loss, and logits with time first."""

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(self.mixer(x))
        return {"loss": cross_entropy(logits.mean(1), target), "logits": logits.transpose(0, 1)}


class Compared(Net):
    """Returns what each sample has in common with each other, for a contrastive loss."""

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": cross_entropy(logits, target), "similarity": logits @ logits.T}


def build(input_shape: tuple[int, ...], num_classes: int, mixer: str = "nothing") -> nn.Module:
    return Net(mixer)


def build_with_loss(input_shape: tuple[int, ...], num_classes: int, mixer: str = "nothing") -> nn.Module:
    return WithLoss(mixer)


def build_compared(input_shape: tuple[int, ...], num_classes: int, mixer: str = "nothing") -> nn.Module:
    return Compared(mixer)


def sequences(split: str, seed: int) -> TensorDataset:
    """The first two of a split are of unlike lengths, see `trim`."""
    inputs = torch.randn(40, TIME, FEATURES, generator=torch.Generator().manual_seed(seed + len(split)))
    inputs[:, 0, 0] = torch.tensor([1.0, -1.0]).repeat(20)
    return TensorDataset(inputs, torch.arange(40) % CLASSES)


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, str]]:
    def measure(mixer: str, builder: str = "build", **settings: Any) -> dict[str, str]:
        monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
        own = {"data": f"{HERE}:sequences", "model": f"{HERE}:{builder}", "model.args": {"mixer": mixer}}
        config = resolve(own | {"batch_size": 4, "save_dir": str(tmp_path)} | settings, [], None)
        source, config = prepare_run(config, 2, 4)
        cpu = torch.device("cpu")
        place = Placement("single", (cpu,), 0, "a test")
        process = SelftestProcess(config=config, placement=place, world=World(cpu), source=source, workers=2, steps=4)
        threads = torch.get_num_threads()
        try:
            with ExitStack() as stack:
                return measure_mixing(process, stack)
        finally:
            torch.set_num_threads(threads)

    return measure


Look = Callable[..., dict[str, str]]


@pytest.mark.parametrize(
    ("mixer", "culprit"),
    [
        ("attention over the batch", "mixer.self_attn (MultiheadAttention)"),
        ("lstm over the batch", "mixer (LeadingLSTM)"),
        ("wrong view", "mixer (Apply)"),
        ("mean of the batch", "mixer (Apply)"),
    ],
)
def test_a_network_that_mixes_samples_is_named(look: Look, mixer: str, culprit: str) -> None:
    assert look(mixer) == {"mixes": culprit}


def test_so_it_is_where_it_returns_a_loss_and_time_comes_first(look: Look) -> None:
    found = look("attention over the batch", "build_with_loss", task="from-model")
    assert found == {"mixes": "mixer.self_attn (MultiheadAttention)"}
    assert look("attention", "build_with_loss", task="from-model") == {"mixes": ""}


def computes_lstm_in_bf16() -> bool:
    """Whether this CPU can; oneDNN has no such primitive where there is no AVX512."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(4, 4).eval()(torch.ones(2, 3, 4))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize("mixer", ["attention", "lstm", "longest of a batch", "noise", "running statistics"])
def test_a_network_that_keeps_them_apart_holds(look: Look, mixer: str, amp: str) -> None:
    if (mixer, amp) == ("lstm", "bf16") and not computes_lstm_in_bf16():
        with pytest.raises(RequestError, match="primitive"):
            look(mixer, amp=amp)
        return
    assert look(mixer, amp=amp) == {"mixes": ""}


@pytest.mark.parametrize(
    ("mixer", "builder", "reason"),
    [
        ("batch statistics", "build", "mixer (BatchNorm1d) goes by the other samples of a batch on purpose"),
        ("experts", "build", "ExpertsOfTwo goes by the other samples of a batch on purpose"),
        ("noise of its own", "build", "the outputs of two passes with the same samples differ, or are no numbers"),
        ("not a number", "build", "the outputs of two passes with the same samples differ, or are no numbers"),
        ("nothing", "build", "two samples have the same outputs"),
        ("attention over the batch", "build_compared", "no output of the model has a row for each sample"),
    ],
)
def test_what_cannot_be_judged_says_why(look: Look, mixer: str, builder: str, reason: str) -> None:
    settings = {} if builder == "build" else {"task": "from-model"}
    assert look(mixer, builder, **settings) == {"refused": reason}
