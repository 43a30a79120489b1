"""The lesson's scripts print what docs/lesson shows, and its exercises can be solved."""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from inspect import signature
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

from examples.lesson.accumulation import Counter, micro_batches
from examples.lesson.gradients import SAMPLES, data, difference, gradient, network
from multigpu_cli.distributed.world import World
from tests.support.ranks import run_on_each_rank
from tests.support.walkthrough import ROOT, Block, blocks
from tests.test_readme import copy_project, run

LESSON = "\n".join(page.read_text() for page in sorted(ROOT.glob("docs/lesson/*.md")))
SCRIPT = re.compile(r"examples/lesson/(\w+)\.py$", re.MULTILINE)


def read_outputs() -> dict[str, list[str]]:
    """What the lesson shows, line by line, below the block that runs a script."""
    pages = list(blocks(LESSON))
    below = {block: after.text.splitlines() for block, after in pairwise(pages)}
    return {found[1]: lines for block, lines in below.items() if (found := SCRIPT.search(block.text))}


def capture_lines(main: Callable[..., None], *arguments: int) -> list[str]:
    with redirect_stdout(io.StringIO()) as out:
        main(*arguments)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("script", read_outputs())
def test_a_script_prints_what_the_lesson_shows(script: str) -> None:
    main = import_module(f"examples.lesson.{script}").main
    if signature(main).parameters:
        lines, *others = run_on_each_rank(2, lambda world: capture_lines(main, world.rank, world.size))
        assert others == [[]]
    else:
        lines = capture_lines(main)
    assert lines == read_outputs()[script]


def test_every_script_of_the_lesson_is_shown() -> None:
    scripts = {file.stem for file in (ROOT / "examples" / "lesson").glob("*.py")}
    assert scripts - {"slow_data"} == set(read_outputs())


def of_the_trainer() -> list[Block]:
    return [block for block in blocks(LESSON) if "main_multi_gpu.py" in block.text]


@pytest.mark.alone
@pytest.mark.parametrize("block", of_the_trainer(), ids=lambda block: block.text.split("--out ")[1].strip())
def test_the_measurements_of_the_lesson_run(block: Block, tmp_path: Path) -> None:
    code, output = run(block.text, copy_project(tmp_path))
    assert code == 0, output[-3000:]


# --- Solutions -------------------------------------------------------------------------------------------------------


def uneven(world: World) -> str:
    shares = [12, 4]
    inputs, targets = (part.split(shares)[world.rank] for part in data())
    weight = world.size * shares[world.rank] / SAMPLES  # DDP divides by the number of ranks: undo that, then weigh
    return difference(
        gradient(DistributedDataParallel(network()), inputs, targets, weight), gradient(network(), *data())
    )


def test_solution_1_weighs_each_rank_by_its_samples() -> None:
    assert run_on_each_rank(2, uneven) == ["rounding", "rounding"]


def gradients(model: nn.Module) -> Iterator[Tensor]:
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def accumulate_windows(world: World) -> tuple[int, list[str]]:
    """Reductions, and how far each window's gradient is from that of all its samples on one process."""
    torch.manual_seed(0)
    alone = nn.Linear(8, 1)
    model = DistributedDataParallel(nn.Linear(8, 1))
    model.module.load_state_dict(alone.state_dict())
    counter, found = Counter(model), []
    everyone = [micro_batches(rank, 10) for rank in range(world.size)]
    for start in range(0, 10, 4):
        window = everyone[world.rank][start : start + 4]
        model.zero_grad()
        for number, batch in enumerate(window, start=1):
            with nullcontext() if number == len(window) else model.no_sync():
                (model(batch).square().mean() / len(window)).backward()
        samples = torch.cat([batch for each in everyone for batch in each[start : start + 4]])
        alone.zero_grad()
        alone(samples).square().mean().backward()
        found.append(difference(*(nn.utils.parameters_to_vector(gradients(each)) for each in (model, alone))))
    return counter.reductions, found


def test_solution_2_steps_at_the_end_of_each_window_by_what_it_holds() -> None:
    assert run_on_each_rank(2, accumulate_windows) == [(3, ["rounding"] * 3)] * 2


def evaluate_share(world: World) -> tuple[float, int]:
    """The loss over all samples, and how many there were."""
    inputs, targets = (part[:7] for part in data())
    share = Subset(TensorDataset(inputs, targets), range(world.rank, 7, world.size))
    sums, model = torch.zeros(2, dtype=torch.float64), network()
    with torch.no_grad():
        for batch, answers in DataLoader(share, batch_size=2):
            sums += torch.tensor([mse_loss(model(batch), answers, reduction="sum").double(), len(batch)])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1]), int(sums[1])


def test_solution_3_counts_each_sample_once() -> None:
    inputs, targets = (part[:7] for part in data())
    with torch.no_grad():
        expected = float(mse_loss(network()(inputs), targets))
    assert run_on_each_rank(2, evaluate_share) == [(pytest.approx(expected), 7)] * 2
