"""Run by torchrun: builds a GPT with --multi-gpu fsdp, takes a few steps, and writes what each process held.

    torchrun --nproc_per_node=4 memory_worker.py OUT_FOLDER WIDTH DEPTH

Each process writes RANK.json: bytes of tensors and of memory (RssAnon above that before the model was built), at rest
and at their peaks, and what they are to be compared with.
"""

import gc
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from multigpu_cli.config.sources import resolve
from multigpu_cli.data.loader import first_batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.process_group import process_group
from multigpu_cli.models.blocks import find_blocks_to_wrap
from multigpu_cli.run.assembly.assemble import build_components
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.run.step import forward_backward

VOCABULARY, LENGTH = 16384, 32
CPU = torch.device("cpu")


def tokens() -> DataSource:
    """A few random sequences of tokens."""
    drawn = torch.randint(VOCABULARY, (16, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(drawn[:, :-1], drawn[:, 1:])
    return DataSource(
        train=data, val=None, test=None, input_shape=(LENGTH,), num_classes=VOCABULARY, task="language-model"
    )


def read_anonymous_memory() -> int:
    """Bytes of this process that are no file's: its heap and its mapped tensors."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@contextmanager
def watch_memory(found: dict[str, Any], name: str) -> Iterator[None]:
    """Note the peak of this process's memory."""
    ended, peaks = threading.Event(), [read_anonymous_memory()]

    def watch() -> None:
        while not ended.wait(0.01):
            peaks.append(max(peaks.pop(), read_anonymous_memory()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    found[name] = peaks[0] - found["before"]


def take_step(components: TrainComponents) -> None:
    """One optimizer step of one sequence on each worker, with clipping."""
    strategy, state = components.strategy, components.state
    components.set_learning_rates(0)
    strategy.begin_step(components.world.size)
    forward_backward(components, first_batch(components.loaders.train, 1), 1.0, last=True)
    strategy.after_backward(components.world.rank)
    strategy.reduce_gradients(idle=False)
    state.precision.clip_and_step(state.optimizer, strategy.local_parameters, 1.0, strategy.total_norm)
    state.optimizer.zero_grad()


def count_bytes_at_rest(components: TrainComponents) -> int:
    """Bytes of this worker's rows, and of its part of the optimizer's state."""
    states = [value for state in components.state.optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in [*components.strategy.local_parameters, *states] if isinstance(value, Tensor))


def measure_peak(profiled: profile) -> int:
    """The most bytes of tensors at one time beside those that were there before."""
    added = most = 0
    events: Any = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in events:
        if event.name() == "[memory]":
            added += event.nbytes()
            most = max(most, added)
    return most


def measure_groups(components: TrainComponents) -> list[int]:
    """Bytes of the weights that are gathered as one, of each group."""
    model = components.state.model
    blocks = [model.get_submodule(name) for name in find_blocks_to_wrap(model)]
    sizes = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
    return [*sizes, sum(parameter.nbytes for parameter in model.parameters()) - sum(sizes)]


def main(out: Path, width: str, depth: str) -> None:
    launch_env = LaunchEnv.current()
    flags = {"data": "tests.distributed.memory_worker:tokens", "model": "gpt", "multi_gpu": "fsdp", "batch_size": "1"}
    sizes = {"width": width, "depth": depth, "heads": "12"}
    sets = [f"model.args.{name}={value}" for name, value in sizes.items()]
    torch.set_num_threads(1)
    with process_group(launch_env, CPU, timeout=600) as world:
        config = resolve(flags | {"save_dir": str(out / "run")}, sets, None)
        spec = prepare_spec(config, Placement("fsdp", (CPU,), 0, "a test"), world, FromConfig())
        found: dict[str, Any] = {"before": read_anonymous_memory()}
        with watch_memory(found, "building"):
            components = build_components(spec, world)
        with closing(components.loaders):
            with watch_memory(found, "training"):
                take_step(components)
                with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                    take_step(components)
            rest = count_bytes_at_rest(components)
            peak = rest + measure_peak(profiled)
            del profiled
            gc.collect()
            settled = read_anonymous_memory() - found["before"]
        found |= {"tensors at rest": rest, "tensors": peak, "at rest": settled, "groups": measure_groups(components)}
        found |= {"plan": [components.plan.notes[name] for name in ("sharding", "first_weights")]}
        (out / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
