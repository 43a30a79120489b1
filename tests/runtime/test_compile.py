from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from multigpu_cli.config.sources import resolve
from multigpu_cli.models import token_losses
from multigpu_cli.models.build import checkpoint_activations
from multigpu_cli.models.networks.gpt import GPT as build_gpt
from multigpu_cli.models.token_losses import TokenTargets
from multigpu_cli.runtime.compile import CompiledModel, compile_model


class Broken(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        doubled = inputs * 2
        torch._dynamo.graph_break()
        return doubled + 1


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_full_micro_batches_are_compiled_once_and_short_ones_never() -> None:
    network = nn.Linear(3, 2)
    compiled = CompiledModel(network, None, backend="eager")
    compiled.full_batch_size = lambda: 4
    for length in (4, 4, 3, 4, 1, 4):
        inputs = torch.randn(length, 3)
        torch.testing.assert_close(compiled(inputs), network(inputs))
    assert graphs() == 1
    assert compiled.seconds is not None


def test_another_full_size_is_compiled_for_itself() -> None:
    """As after running out of memory: micro-batches of half the size."""
    compiled = CompiledModel(nn.Linear(3, 2), None, backend="eager")
    size = 4
    compiled.full_batch_size = lambda: size
    compiled(torch.randn(4, 3))
    size = 2
    compiled(torch.randn(2, 3))
    compiled(torch.randn(2, 3))
    assert graphs() == 2


@pytest.mark.parametrize(
    ("network", "shapes", "most"),
    [
        (lambda: nn.Linear(3, 2), [(4, length, 3) for length in (*range(5, 17), 5, 6)], 2),
        (lambda: nn.Conv2d(3, 2, 3), [(4, 3, 16 + k % 5, 16 + k % 7) for k in range(14)], 3),
    ],
    ids=["texts", "images"],
)
def test_batches_of_many_shapes_take_few_graphs(
    network: Callable[[], nn.Module], shapes: list[tuple[int, ...]], most: int
) -> None:
    plain = network()
    compiled = CompiledModel(plain, None, backend="aot_eager")
    compiled.full_batch_size = lambda: 4
    for shape in shapes:
        inputs = torch.randn(shape)
        torch.testing.assert_close(compiled(inputs), plain(inputs))
    assert 1 < graphs() <= most, "more than eight would run uncompiled from then on"


def test_compile_warns_once_at_the_second_recompilation() -> None:
    compiled, warnings = CompiledModel(nn.Tanh(), None, backend="eager"), []
    compiled.full_batch_size = lambda: 4
    for axes in range(1, 6):  # another number of dimensions takes another graph
        compiled(torch.ones(4, *[2] * axes))
        warnings.append(compiled.take_warning())
    assert [bool(warning) for warning in warnings] == [False, False, True, False, False]
    assert warnings[2].startswith("--compile: ")
    assert "collate_fn" in warnings[2]


def test_compile_counts_recompilations_of_each_full_size_for_itself() -> None:
    compiled = CompiledModel(nn.Tanh(), None, backend="eager")
    for size in range(2, 8):
        compiled.full_batch_size = partial(int, size)
        for _ in range(2):
            compiled(torch.ones(size, 2))
    assert (graphs(), compiled.take_warning()) == (6, "")


def test_samples_may_come_by_name_or_in_a_mapping() -> None:
    class Mapped(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["a"] + batch["b"]

    by_name, mapped = (
        CompiledModel(nn.Linear(3, 2), None, backend="eager"),
        CompiledModel(Mapped(), None, backend="eager"),
    )
    by_name.full_batch_size = mapped.full_batch_size = lambda: 4
    by_name(input=torch.randn(4, 3))
    mapped({"a": torch.ones(4), "b": torch.ones(4)})
    assert graphs() == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, unless it is an error
def test_blocks_of_one_kind_share_a_graph_that_only_full_micro_batches_in_training_run() -> None:
    """Also where their activations are checkpointed, and where there are more kinds than torch compiles by itself."""
    widths = [3, *range(3, 12)]
    kinds = [nn.Sequential(nn.Linear(one, other), nn.Tanh()) for one, other in pairwise(widths)]
    network = nn.Sequential(*kinds, *(nn.Sequential(nn.Linear(11, 11), nn.Tanh()) for _ in range(3)))
    plain = deepcopy(network)
    checkpoint_activations(network)
    compiled = CompiledModel(network, None, blocks=list(network), backend="eager")
    compiled.full_batch_size = lambda: 4
    for length in (4, 3, 4):
        inputs = torch.randn(length, 3)
        for model in (compiled, plain):
            model(inputs).sum().backward()
        with torch.no_grad():
            network(torch.randn(4, 3))
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert graphs() == len(kinds) + 1
    assert list(network.state_dict()) == list(plain.state_dict())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, unless it is an error
def test_blocks_with_buffers_are_compiled_inside_a_strategys_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with FSDP, where strategy.wrap may name modules around the checkpointed ones."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: real(model, **how | {"backend": "aot_eager"}))
    monkeypatch.setattr("shutil.which", lambda name: name)
    inner = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()) for _ in range(2)]
    network = nn.ModuleDict({"outer": nn.Sequential(*inner), "last": nn.Linear(3, 3)})
    network.forward = lambda inputs: network["last"](network["outer"](inputs))
    plain, inputs = deepcopy(network["outer"]), torch.randn(4, 3, requires_grad=True)
    checkpoint_activations(network["outer"])
    settings = resolve({"compile": "default"}, [], None)
    compiled = compile_model(network, settings, torch.device("cpu"), list(network.values()))
    compiled.full_batch_size = lambda: 4  # type: ignore[assignment]
    for result in (compiled(inputs), network["last"](plain(inputs))):
        result.sum().backward()
    for parameter, expected in zip(network["outer"].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    torch.testing.assert_close(list(network["outer"].buffers()), list(plain.buffers()))
    assert graphs() == 2, "one graph for both blocks, and one for the last layer"


def test_its_parameters_are_the_networks() -> None:
    network = nn.Linear(3, 2)
    assert [name for name, _ in CompiledModel(network, None, backend="eager").named_parameters()] == [
        "model.weight",
        "model.bias",
    ]


def test_the_report_names_graph_breaks_in_one_line_each() -> None:
    compiled = CompiledModel(Broken(), None, backend="eager")
    compiled.full_batch_size = lambda: 4
    assert compiled(torch.ones(4)).tolist() == [3.0] * 4
    report = compiled.report()
    assert report["seconds"] > 0
    assert len(report["graph_breaks"]) == 1
    assert "\n" not in report["graph_breaks"][0]
    assert "graph_break" in report["graph_breaks"][0]


def in_graphs(model: nn.Module, **_: Any) -> nn.Module:
    """In place of torch.compile: as with CUDA graphs, each backward pass writes its gradients where the last did."""
    for parameter in model.parameters():
        parameter.register_hook(partial(_write_to, torch.empty_like(parameter)))
    return model


def _write_to(place: Tensor, gradient: Tensor) -> Tensor:
    return place.copy_(gradient).detach()


def test_gradients_of_replayed_graphs_are_those_of_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them, in two steps; the second step begins without gradients, as each does."""
    monkeypatch.setattr(torch, "compile", in_graphs)
    network, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(network.state_dict())
    compiled = CompiledModel(network, "reduce-overhead")
    compiled.full_batch_size = lambda: 4
    for _ in range(2):
        batches = [torch.randn(4, 3) for _ in range(3)]
        for batch in batches:
            compiled(batch).square().sum().backward()
        plain(torch.cat(batches)).square().sum().backward()
        for one, other in zip(network.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        network.zero_grad()
        plain.zero_grad()


def test_gradients_are_copied_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", in_graphs)
    network = nn.Linear(3, 2)
    compiled = CompiledModel(network, "reduce-overhead")
    compiled.full_batch_size = lambda: 4
    places = []
    for _ in range(3):
        compiled(torch.randn(4, 3)).sum().backward()
        assert network.weight.grad is not None
        places.append(network.weight.grad.data_ptr())
    assert places[0] != places[1] == places[2]


@pytest.mark.parametrize("inputs", [(torch.ones(4), torch.ones(2)), [torch.ones(7)] * 4, ([torch.ones(7)] * 4, [1])])
def test_samples_may_come_in_a_tuple_or_a_list(inputs: Any) -> None:
    class First(nn.Module):
        def forward(self, batch: Any) -> Any:
            return batch[0]

    compiled = CompiledModel(First(), None, backend="eager")
    for size, full in ((7, False), (4, True)):
        compiled.full_batch_size = partial(int, size)
        compiled(inputs)
        assert (compiled.seconds is not None) is full


def test_the_losses_of_the_gpt_are_part_of_its_graph() -> None:
    """All tokens at once, however few a chunk has: the compiler needs no logits in 32 bits."""
    torch.manual_seed(0)
    model, tokens = build_gpt((6,), 9, depth=1, heads=1, width=8), torch.arange(12).view(2, 6) % 9
    expected = model(TokenTargets(tokens, tokens)).losses
    made: list[str] = []

    def note(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        made.extend(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = CompiledModel(model, None, backend=note)  # type: ignore[arg-type]
    compiled.full_batch_size = lambda: 2
    with pytest.MonkeyPatch.context() as few:
        few.setattr(token_losses, "_LOGITS", 9)
        torch.testing.assert_close(compiled(TokenTargets(tokens, tokens)).losses, expected)
    assert (graphs(), made.count("cross_entropy"), made.count("linear")) == (1, 1, 5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_compiled_head_with_rows_beyond_the_vocabulary_gives_the_same(
    smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, tokens = build_gpt((6,), 9, depth=1, heads=1, width=8), torch.arange(12).view(2, 6) % 9
    wanted, weight = TokenTargets(tokens, tokens.roll(1), smoothing=smoothing, summed=True), model.tokens.weight
    compiled = CompiledModel(model, None, backend="eager")
    compiled.full_batch_size = lambda: 2

    def train(network: nn.Module) -> tuple[Tensor, Tensor]:
        loss = network(wanted).losses
        return loss, torch.autograd.grad(loss, weight)[0]

    expected = train(model)
    monkeypatch.setattr(model, "_pad_head", lambda hidden: pad(weight, (0, 0, 0, 7)))
    torch.testing.assert_close(train(compiled), expected)
    assert compiled.seconds is not None
