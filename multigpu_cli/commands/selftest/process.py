"""One process of the selftest, the only worker or one of several; and the checksums that it compares."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.placement import Placement, count_cores
from multigpu_cli.distributed.world import World
from multigpu_cli.faults.stop import StopRequest
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.assembly.assemble import build_components
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.batch_size import warm_up
from multigpu_cli.run.open import assemble_run
from multigpu_cli.run.part import load_parts
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.run.run import Run
from multigpu_cli.runtime.seeding import set_threads_per_rank

Measured = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SelftestProcess:
    """What one process of the test works with."""

    config: Config  # the user's settings, with the global batch fixed and a temporary run folder
    placement: Placement
    world: World
    source: DataSource
    workers: int  # of the run with several; the single worker takes as many threads as each of them
    steps: int
    exact: bool = True
    batch: Batch | None = None  # the samples on which the model is tried; None takes the first ones

    @property
    def alone(self) -> "SelftestProcess":
        """The same process without the other workers."""
        config, device = replace_settings(self.config, {"num_workers": 0}), self.world.device
        single = Placement("single", (device,), 0, "selftest")
        return replace(self, config=config, placement=single, world=World(device))

    def components(self, **overrides: Any) -> TrainComponents:
        """Newly built components of a training."""
        config = replace_settings(self.config, overrides)
        spec = prepare_spec(config, self.placement, self.world, FromConfig(source=self.source))
        set_threads_per_rank(self.workers, count_cores(), exact=config.reproducibility.exact)
        components = build_components(spec, self.world, load_parts(spec, self.world))
        warm_up(components)
        return components

    def run(self, stack: ExitStack, **overrides: Any) -> Run:
        """A run that is ready for its first step."""
        components = self.components(**overrides)
        stack.callback(components.loaders.close)
        watch = Watchdog(self.world, components.config.fault.hang_timeout, lambda error: None)
        return assemble_run(components, Console("silent"), StopRequest(), watch, stack)


def first_batch(process: SelftestProcess) -> Batch:
    """The first micro-batch of the first step."""
    components = process.alone.components()
    with closing(components.loaders.train):
        _, work = next(components.loaders.train.epoch(components.plan.batches, 0, 0, 0, 1))
        return next(work)


def compute_checksums(value: Any) -> list[float]:
    """Two numbers for each tensor in a nested value: its mean size, and a sum that tells its elements apart."""
    numbers = []
    for _, leaf in iterate_leaves(value, ""):
        if isinstance(leaf, Tensor) and leaf.numel():
            flat = leaf.detach().flatten().to("cpu", torch.float64)
            numbers += [float(flat.abs().mean()), float((flat * torch.arange(len(flat)).cos()).mean())]
    return numbers


@contextmanager
def record_outputs(model: nn.Module, describe: Callable[[Any], Any] = compute_checksums) -> Iterator[list[Any]]:
    """[name, kind, description] of each module's output inside, in the order in which the modules finish."""
    outputs: list[Any] = []

    def record(name: str, module: nn.Module, _: Any, output: Any) -> None:
        outputs.append([name, type(module).__name__, describe(output)])

    named = model.named_modules()
    hooks = [module.register_forward_hook(partial(record, name or "the model")) for name, module in named]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def is_close(one: list[float], other: list[float], tolerance: float = 1e-5) -> bool:
    """Whether two lists of (size, sum) pairs are equal to rounding; NaN equals nothing."""
    pairs = zip(one[::2], one[1::2], other[::2], other[1::2], strict=False)
    return len(one) == len(other) and all(
        abs(size - size_b) <= tolerance * size and abs(total - total_b) <= tolerance * max(size, size_b)
        for size, total, size_b, total_b in pairs
    )


def hash_state(value: Any) -> str:
    """SHA-256 over a nested value: tensors by their bytes, all else as text; measured seconds are left out."""
    digest = sha256()
    for name, part in iterate_leaves(value, ""):
        if "seconds" not in name:
            if isinstance(part, Tensor):
                content = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            else:
                content = repr(part).encode()
            digest.update(name.encode() + content)
    return digest.hexdigest()


def relative_distance(state: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest difference of any entry, relative to the largest entry of the reference; an absent tensor is zero."""
    tensors = {name: value for name, value in reference.items() if isinstance(value, Tensor) and value.numel()}
    largest = max(float((value * 1).abs().max()) for value in tensors.values())  # flags have no size
    gaps = (
        float((state.get(name, torch.zeros_like(value)).double() - value.double()).abs().max())
        for name, value in tensors.items()
    )
    return max(gaps) / largest if largest else float("nan")


def iterate_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The parts of a nested value that are no dict, list or tuple, each with a name."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else None
    if pairs is None:
        yield name, value
        return
    for key, entry in pairs:
        yield from iterate_leaves(entry, f"{name}.{key}")


def split_batch(batch: Batch) -> Iterator[Any]:
    """The samples of a collated batch, one by one."""
    for at in range(len(batch)):
        sides = [side for side in (batch.inputs, batch.targets) if side is not None]
        yield [_select_sample(side, at, len(batch)) for side in sides]


def _select_sample(value: Any, at: int, count: int) -> Any:
    """One sample of a batch of so many; a list of as many has one in each place."""
    if isinstance(value, dict):
        return {name: _select_sample(entry, at, count) for name, entry in value.items()}
    if isinstance(value, tuple) or (isinstance(value, list) and len(value) != count):
        return [_select_sample(entry, at, count) for entry in value]
    return value[at]
