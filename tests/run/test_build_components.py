"""What learns is built so that it is fast, where its model allows that."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import OutOfMemory, RequestError
from multigpu_cli.run.assembly import assemble
from multigpu_cli.run.assembly.assemble import build_components
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.runtime.compile import compile_model
from multigpu_cli.strategies import ddp
from tests.support.ranks import run_on_each_rank
from tests.support.world import CPU

NAMED: dict[str, Any] = {
    "model": f"{__name__}:Late",
    "data": f"{__name__}:Pictures",
}


class Viewing(nn.Module):
    """Reads its features as they lie in memory, as many a user's network does."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.convolve, self.classify = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.convolve(images)
        logits: Tensor = self.classify(features.view(len(images), -1))
        return logits


class Late(nn.Module):
    """Its layers learn the sizes of their inputs from the first batch."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.LazyConv2d(6, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


class Pictures(Dataset[tuple[Tensor, int]]):
    """Fetched one by one, and each fetch draws."""

    num_classes = 3

    def __init__(self, split: str) -> None:
        self.split = split

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(1, 8, 8), index % 3


def components(folder: Path, *sets: str, **flags: Any) -> TrainComponents:
    config = resolve({"save_dir": str(folder), "max_steps": "2"} | flags, sets, None)
    choice, world = Placement("single", (CPU,), 0, "a test"), World(CPU)
    return build_components(prepare_spec(config, choice, world, FromConfig()), world)


@pytest.mark.parametrize(
    ("model", "last"),
    [
        ("convnet", True),
        (f"{__name__}:Viewing", False),
        (f"{__name__}:Late", True),
    ],
)
def test_kernels_lie_with_channels_last_where_the_model_can_take_it(
    model: str, last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "_try_model", None)  # a second trial is of what none was tried with
    kernels = [p for p in components(tmp_path, model=model).state.model.parameters() if p.ndim == 4]
    assert [p.is_contiguous(memory_format=torch.channels_last) for p in kernels if p.shape[1] > 1] == [True] * (
        len(kernels) - 1 if last else 0
    )
    assert all(p.is_contiguous() for p in kernels) is not last


def test_layers_that_get_their_weights_from_the_first_batch_get_the_same_ones_whoever_fetches_it(
    tmp_path: Path,
) -> None:
    fingerprints = []
    for processes in (0, 1):
        made = components(tmp_path, **NAMED, num_workers=processes)
        fingerprints.append(fingerprint(made.state.model.state_dict()))
        made.loaders.train.close()
    assert fingerprints[0] == fingerprints[1]


def test_a_network_that_does_not_take_two_samples_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="rank 0 ran out of memory"):
        components(
            tmp_path,
            "model.args.evaluation=1",
            model="tests.support.awkward_models:greedy",
            data="tests.support.user_code:tensors",
        )


def test_what_does_not_go_with_a_batch_or_a_checkpoint_is_told_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as raised:
        components(tmp_path, "model.args.num_classes=2", **NAMED)
    assert raised.value.remedy == "--set model.num_classes=3, or another --task; --debug shows the traceback"
    assert "called with  float32 (2, 1, 8, 8)" in raised.value.problem
    own = {"model": "tests.support.awkward_models:telling", "data": "tests.support.user_code:tensors"}
    with pytest.raises(RequestError, match="get_extra_state of layers returns what could not be read back"):
        components(tmp_path, "model.args.plain=false", **own)


@pytest.mark.parametrize(("kind", "language"), [("cpu", "C++"), ("cuda", "C")])
def test_compile_needs_a_compiler_at_the_door(monkeypatch: pytest.MonkeyPatch, kind: str, language: str) -> None:
    """Triton, on a GPU, would say so only in the first pass, and a container's runtime image has none."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RequestError) as raised:
        compile_model(nn.Linear(1, 1), resolve({"compile": "default"}, [], None), torch.device(kind))
    assert f"--compile default on {kind.upper()} needs a {language} compiler" in raised.value.problem


def test_buckets_are_measured_where_the_flag_says_so_and_else_as_large_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddp, "measure_cap", lambda model, world: 3)

    def work(world: World) -> list[Any]:
        found = []
        for cap in ("auto", "7"):
            flags = {"save_dir": str(tmp_path), "model": "mlp", "data": "tests.support.user_code:tensors"}
            config = resolve(flags | {"bucket_cap_mb": cap, "multi_gpu": "ddp", "num_workers": "0"}, (), None)
            spec = prepare_spec(config, Placement("ddp", (CPU, CPU), 0, "a test"), world, FromConfig())
            found.append(build_components(spec, world).config.communication.bucket_cap_mb)
        return found

    assert run_on_each_rank(2, work) == [[3, 7]] * 2


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ScheduleFreeSGD", "; schedule-free: evaluated and saved for use in its eval mode"),
        ("Manifold", ""),
    ],
)
def test_the_plan_names_an_optimizer_of_ones_own(name: str, more: str, tmp_path: Path) -> None:
    own = f"tests.support.optimizers:{name}"
    flags = {"data": "tests.support.user_code:tensors", "model": "tests.support.user_code:net", "lr": "0.1"}
    built = components(tmp_path, optimizer=own, schedule="constant", warmup_epochs="0", **flags)
    decay = "" if name == "Manifold" else "weight decay 0.0001, "  # its class knows none by that name
    assert built.plan.optimizer == f"{own}, {decay}gradient clipped to norm 1{more}"


@pytest.mark.parametrize(
    ("sets", "flags", "said"),
    [
        ((), {}, "adamw, weight decay 0.0001, gradient clipped to norm 1"),
        (
            (),
            {"optimizer": "sgd", "weight_decay": "0", "max_grad_norm": "off"},
            "sgd, no weight decay, gradient not clipped",
        ),
        (
            ("optimizer.groups=[{match: 3.bias, weight_decay: 0.1}]",),
            {},
            "adamw, weight decay 0.0001 and 0.1, gradient clipped to norm 1",
        ),
    ],
)
def test_the_plan_names_weight_decay_and_clipping(
    sets: tuple[str, ...], flags: dict[str, str], said: str, tmp_path: Path
) -> None:
    net = {"data": "tests.support.user_code:tensors", "model": "tests.support.user_code:net"}
    assert components(tmp_path, *sets, **net | flags).plan.optimizer == said
