"""FLOPs and kept activations of networks that can be counted by hand."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import Dataset

from multigpu_cli.config.sources import resolve
from multigpu_cli.data.loader import first_batch
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.language.chat.samples import pad_samples
from multigpu_cli.run.assembly.assemble import build_components
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.run.step import count_flops_per_sample, forward_backward, profile_micro_batch
from tests.support.world import CPU


def plain(input_shape: tuple[int, ...], num_classes: int, width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Linear(input_shape[0], width, bias=False), nn.Tanh(), nn.Linear(width, num_classes, bias=False)
    )


def in_a_block(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(input_shape[0], 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()),
        nn.Linear(16, num_classes),
    )


def components(tmp_path: Path, model: str, **flags: str | bool) -> TrainComponents:
    words = {"data": "tests.support.user_code:tensors", "model": model, "save_dir": str(tmp_path / "run")}
    choice = Placement("single", (CPU,), 0, "test")
    return build_components(
        prepare_spec(resolve(words | flags, [], None), choice, World(CPU), FromConfig()), World(CPU)
    )


def test_two_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forward 2·n·in·out each; backward the same for each weight, and once for the input of the second layer."""
    made = components(tmp_path, "tests.run.test_profile_micro_batch:plain")
    made.strategy.accumulate = accumulate = Mock(wraps=made.strategy.accumulate)  # type: ignore[method-assign]
    found = profile_micro_batch(made, 10)
    accumulate.assert_called_once_with(last=False)
    assert capsys.readouterr().out == "", "torch's counter would print a table"
    first, second = 2 * 10 * 6 * 16, 2 * 10 * 16 * 3
    assert found.samples == 10
    assert found.flops == 2 * first + 3 * second
    assert found.flops_per_sample == found.flops / 10


def test_activations_grow_with_the_batch_and_nothing_else_is_counted(tmp_path: Path) -> None:
    """Tanh keeps its output, cross-entropy its log-probabilities; float32 takes 4 bytes. A few bytes do not grow."""
    made = components(tmp_path, "tests.run.test_profile_micro_batch:plain")
    ten, forty = profile_micro_batch(made, 10).activations, profile_micro_batch(made, 40).activations
    assert (forty - ten) / 30 == 4 * (16 + 3)
    assert ten < 10 * 4 * (16 + 3) + 64


def test_checkpointed_blocks_keep_less_and_are_counted_once(tmp_path: Path) -> None:
    """What backward computes a second time is work, but not the model's: it must not raise its MFU."""
    whole, checkpointed = (
        profile_micro_batch(
            components(tmp_path / str(on), f"{__name__}:in_a_block", grad_checkpointing=on),
            10,
        )
        for on in (False, True)
    )
    assert checkpointed.flops == whole.flops
    assert whole.activations - checkpointed.activations == 10 * 4 * 16, "the output of the first Tanh"


def test_it_leaves_no_trace(tmp_path: Path) -> None:
    made = components(tmp_path, "tests.support.user_code:net")
    before = {name: tensor.clone() for name, tensor in made.state.model.state_dict().items()}
    profile_micro_batch(made, 10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state.model.state_dict().items())
    assert all(p.grad is None for p in made.state.model.parameters())


def test_mfu_needs_a_known_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigpu_cli.run import open as assemble_run

    made = components(tmp_path, "tests.run.test_profile_micro_batch:plain", batch_size="10")
    assert assemble_run._count_flops(made) is None
    monkeypatch.setattr(assemble_run, "peak_flops", lambda device, precision: 1e12)
    assert assemble_run._count_flops(made) == 2 * 2 * 6 * 16 + 3 * 2 * 16 * 3


def in_rows(split: str) -> Dataset[Any]:
    """Texts of 2 to 7 tokens, each batch filled up to its longest."""

    class Texts(Dataset[dict[str, torch.Tensor]]):
        num_classes = 9
        collate_fn = staticmethod(partial(pad_samples, padding=0))

        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.arange(2 + index % 6)
            return {"input_ids": ids, "position_ids": ids, "labels": ids}

    return Texts()


class Tokenwise(nn.Module):
    """(n, t) tokens → (n, t, 9), by a product for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 5), nn.Linear(5, 9, bias=False)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(inputs["input_ids"]))
        return logits


def test_flops_are_counted_on_two_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch may fit into memory compiled only; of texts, the tokens of its longest count for each."""
    sizes: list[int] = []
    hook = register_module_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    try:
        for model, flags, tokens, product in (
            (f"{__name__}:plain", {}, 1, 2 * 2 * 6 * 16 + 3 * 2 * 16 * 3),
            (f"{__name__}:Tokenwise", {"data": f"{__name__}:in_rows", "task": "language-model"}, 7, 3 * 2 * 5 * 9),
        ):
            made = components(tmp_path, model, batch_size="12", **flags)
            sizes.clear()
            assert count_flops_per_sample(made) == pytest.approx(tokens * product)
            assert max(sizes) <= 2
    finally:
        hook.remove()


def test_a_compiled_network_is_counted_uncompiled_and_stays_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch gives up a compiled function, for the rest of the process, where it meets it under a dispatch mode."""
    seen, real = [], torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return lambda *given: (seen.append("graph"), graph(*given))[1]

    monkeypatch.setattr(torch, "compile", lambda model, **how: real(model, **how | {"backend": backend}))
    made = components(tmp_path, "tests.run.test_profile_micro_batch:plain", compile="default", batch_size="10")
    batch = first_batch(made.loaders.train, 10)
    forward_backward(made, batch, 1.0, last=True)
    assert profile_micro_batch(made, 10).flops == 2 * 2 * 10 * 6 * 16 + 3 * 2 * 10 * 16 * 3
    assert len(seen) == 1
    forward_backward(made, batch, 1.0, last=True)
    assert len(seen) == 2
