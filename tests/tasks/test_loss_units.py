from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World
from multigpu_cli.language.task import LanguageModel
from multigpu_cli.monitor import journal
from multigpu_cli.runtime.precision import multiply_gradients
from multigpu_cli.tasks.base import LossNormalizer
from tests.support.op_counter import Operations
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import run_training
from tests.support.user_code import sentences

pytestmark = pytest.mark.usefixtures("in_tmp_path")
TEXT: dict[str, Any] = {"data": "tests.support.user_code:sentences", "model": "gpt", "task": "language-model"}
SMALL = ["model.args.depth=1", "model.args.heads=2", "model.args.width=16", "model.args.dropout=0.2"]
RUN = TEXT | {"global_batch_size": 20, "batch_size": 5, "epochs": 2, "log_interval": 1, "lr": 0.01, "sets": SMALL}


def lines(folder: str) -> list[dict[str, Any]]:
    return [event for event in journal.read_events(f"{folder}/journal.jsonl") if event["event"] == "train"]


def test_a_step_is_the_mean_over_its_tokens_whoever_has_how_many() -> None:
    """The rule itself, against one batch of everything: torch's own mean over the targets that count."""
    inputs, targets = sentences("train", 42).tensors
    source = DataSource(train=sentences("train", 42), val=None, test=None, input_shape=(9,), num_classes=5)

    def gradient(world: World) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).double()
        task = LanguageModel(source, TaskConfig())
        units = LossNormalizer(task, world)
        own = slice(0, 13) if world.rank == 0 else slice(13 * world.size - 13, 60)
        logits = model(inputs[own]).flatten(0, 1)
        loss = cross_entropy(logits, targets[own].flatten(), reduction="sum", ignore_index=-100)
        (loss / units.divisor(60)).backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        factor = units.count_units([(targets[own] != -100).sum()], 60)
        assert factor is not None
        multiply_gradients(model.parameters(), factor)
        assert int(units.last) == int((targets != -100).sum())
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).double()
    cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist()
    for found in run_on_each_rank(2, gradient):
        assert found == pytest.approx(whole, rel=1e-12, abs=1e-15)


def test_the_curve_over_tokens_does_not_depend_on_the_workers() -> None:
    one, many = run_training(**RUN, save_dir="one"), run_training(3, **RUN, save_dir="many")
    assert not one.error + many.error
    for alone, shared in zip(lines("one"), lines("many"), strict=True):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-3)
    assert many.summary["final"] == pytest.approx(one.summary["final"], rel=1e-3)


def test_exact_gives_the_same_bits_on_any_number_of_workers() -> None:
    ended = [run_training(workers, **RUN, save_dir=f"run{workers}", exact=True) for workers in (1, 3)]
    assert not any(end.error for end in ended)
    assert len({end.summary["fingerprint"] for end in ended}) == 1
    assert len({str([line["loss"] for line in lines(f"run{workers}")]) for workers in (1, 3)}) == 1


def test_a_resumed_run_ends_with_the_same_bits() -> None:
    flags = RUN | {"schedule": "constant", "warmup_epochs": 0}  # or a longer run has other rates
    whole = run_training(**flags, save_dir="whole").summary
    run_training(**flags, save_dir="half", max_steps=2)
    again = run_training(2, **flags | {"max_steps": 6}, save_dir="half").summary
    run_training(**flags, save_dir="lone", max_steps=2)
    lone = run_training(**flags | {"max_steps": 6}, save_dir="lone").summary
    assert again["resumed_from"]
    assert lone["resumed_from"]
    assert lone["fingerprint"] == whole["fingerprint"]
    assert again["final"] == pytest.approx(whole["final"], rel=1e-3)


def test_tokens_a_second_are_journalled() -> None:
    run_training(**RUN, save_dir="run")
    _, targets = sentences("train", 42).tensors
    for line in lines("run")[:1]:
        assert line["tokens_per_second"] > 0
    both = [line["tokens_per_second"] / line["samples_per_second"] for line in lines("run")]
    tokens = sum(20 * ratio for ratio in both[:3])
    assert tokens == pytest.approx(int((targets != -100).sum()), rel=1e-9), "an epoch has each token once"


def language_model() -> LanguageModel:
    source = DataSource(train=sentences("train", 42), val=None, test=None, input_shape=(9,), num_classes=5)
    return LanguageModel(source, TaskConfig())


def test_gradients_of_one_number_format_are_set_right_by_one_kernel() -> None:
    """CUDA has one for all of them where the factor has their format; with another one it takes them one by one."""
    units = LossNormalizer(language_model(), World(torch.device("cpu")))
    weights = [nn.Parameter(torch.ones(3, dtype=number)) for number in (torch.float32, torch.float32, torch.float64)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    factor = units.count_units([torch.tensor(7)], 20)
    assert factor is not None
    with Operations() as seen:
        multiply_gradients(weights, factor)
    taken = [[tensor.dtype for tensor in inputs] for name, inputs in seen.inputs if name == "_foreach_mul_.Tensor"]
    assert sorted(taken, key=len) == [[torch.float64] * 2, [torch.float32] * 3]
    ratio = units.divisor(20) / 7
    assert torch.cat([weight.grad for weight in weights if weight.grad is not None]).tolist() == pytest.approx(
        [ratio] * 9, rel=1e-6
    )


@pytest.mark.parametrize("number", [torch.bfloat16, torch.float16])
def test_the_factor_of_16_bit_gradients_is_not_rounded_to_16_bits(number: torch.dtype) -> None:
    units, weight = (
        LossNormalizer(language_model(), World(torch.device("cpu"))),
        nn.Parameter(torch.ones(1, dtype=number)),
    )
    weight.grad = torch.full_like(weight, 3.0)
    factor = units.count_units([torch.tensor(7)], 20)
    assert factor is not None
    multiply_gradients([weight], factor)
    assert torch.equal(weight.grad, torch.tensor([3 * units.divisor(20) / 7], dtype=number))


def make_unanswered(split: str, seed: int) -> TensorDataset | None:
    """The sentences without a single target that counts."""
    whole = sentences(split, seed)
    return whole and TensorDataset(whole.tensors[0], torch.full_like(whole.tensors[1], -100))


def test_a_step_without_any_token_is_skipped_and_is_no_fault() -> None:
    """The optimizer does not move the weights by decay or momentum either."""
    flags = RUN | {"data": "tests.tasks.test_loss_units:make_unanswered", "weight_decay": 0.1, "nonfinite": "stop"}
    flags |= {"schedule": "constant", "warmup_epochs": 0}
    ended = [run_training(2, **flags, save_dir=f"to{steps}", max_steps=steps) for steps in (1, 3)]
    assert [end.error for end in ended] == ["", ""]
    assert [end.summary["steps"] for end in ended] == [1, 3]
    assert ended[0].summary["fingerprint"] == ended[1].summary["fingerprint"]
    assert {line["grad_norm"] for line in lines("to3")} == {0.0}
