"""What each process of the selftest measures; one worker and several run the same functions; checks.py compares."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import torch
from torch.utils.data import TensorDataset

from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.commands.selftest.checksums import ActivationRecorder, compute_checksums, map_batch, split_batch
from multigpu_cli.commands.selftest.mixing import measure_mixing
from multigpu_cli.commands.selftest.process import Measured, SelftestProcess, first_batch
from multigpu_cli.commands.selftest.steps import (
    measure_exact,
    measure_gradients,
    measure_reference,
    measure_resume,
    measure_sharded,
    measure_sharded_exact,
)
from multigpu_cli.data.collate import unwrap_dataset
from multigpu_cli.data.epoch_order import epoch_order
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.runtime.seeding import seed_micro_batch
from multigpu_cli.runtime.torch_settings import enable_determinism

_SAMPLES = 16


def measure_all(process: SelftestProcess, save: Callable[[Measured], None]) -> Measured:
    """All parts in turn; `save` gets the results so far after each part, since the next one may end the process."""
    enable_determinism()
    torch.use_deterministic_algorithms(True, warn_only=True)  # only --exact insists
    measured: Measured = {}
    for name, part in _PARTS.items():
        with ExitStack() as stack:
            measured[name] = part(process, stack)
        save(measured)
    return measured


def measure_samples(process: SelftestProcess, stack: ExitStack) -> Measured:
    """Checksums of a few training samples, fetched in several ways."""
    config, size = process.config, len(process.source.train)  # type: ignore[arg-type]
    order = epoch_order(size, config.reproducibility.seed, 0)[:_SAMPLES]
    fills_up = hasattr(unwrap_dataset(process.source.train), "collate_fn")  # to the longest of a batch, perhaps
    some, fewer = (1, 1) if fills_up else (4, 3)
    checksums = {}
    for way, (chunks, processes) in {
        "in one order": (order.split(some), 0),
        "in another order": (order.flip(0).split(fewer), 0),
        "once more": (order.split(some), 0),
        "by a loader process": (order.split(some), 1),
    }.items():
        if processes and (process.world.size > 1 or isinstance(process.source.train, TensorDataset)):
            continue
        data, device = replace(config.data, num_workers=processes), process.world.device
        seed = config.reproducibility.seed
        with closing(Loader(process.source.train, process.source, data, device=device, seed=seed)) as loader:
            checksums[way] = {
                number: compute_checksums(sample)
                for batch in loader.iter_training_batches(list(chunks), 0)
                for number, sample in zip(batch.sample_indices.tolist(), split_batch(batch), strict=True)
            }
    return checksums


def measure_model(process: SelftestProcess, stack: ExitStack) -> Measured:
    """The model's outputs for the same samples with the same seeds, twice, without any other worker."""
    components = process.alone.components()
    state, batch = components.state, process.batch or first_batch(process)
    device = process.world.device
    batch = map_batch(batch, lambda tensor: tensor.to(device))
    start = state.capture()
    twice = []
    for _ in range(2):
        state.restore(start, "selftest")
        seed_micro_batch(process.config.reproducibility.seed, 0, batch.micro_batch_index, device)
        with ActivationRecorder(state.model) as outputs, state.precision.autocast(), torch.no_grad():
            loss = components.task.loss_sum(state.model, batch)
        twice.append([*outputs, ["loss", type(components.task).__name__, compute_checksums(loss)]])
    return {"weights": fingerprint(start["model"]), "outputs": twice[0], "again": twice[1]}


class _CountingLoader(Loader):
    """Records which samples an evaluation fetches."""

    seen: list[int]

    def eval_batches(self, batch_size: int, rank: int, workers: int) -> Iterator[Batch]:
        self.seen = []
        for batch in super().eval_batches(batch_size, rank, workers):
            self.seen += batch.sample_indices.tolist()
            yield batch


def measure_evaluation(process: SelftestProcess, stack: ExitStack) -> Measured:
    """Metrics of the initial weights, and the samples that this worker evaluated."""
    components = process.components()
    world, source, config = process.world, process.source, process.config
    assert source.val is not None, "prepare_run has given it some samples"
    seed = config.reproducibility.seed
    counted = _CountingLoader(
        source.val, source, config.data, device=world.device, seed=seed, workers_here=world.local_size
    )
    model = components.state.eval_model()
    result = components.task.evaluate(model, counted, world, components.state.precision, components.eval_batch_size)
    return {"metrics": dict(result.metrics), "size": counted.size, "seen": counted.seen}


_PARTS: dict[str, Callable[[SelftestProcess, ExitStack], Measured]] = {
    "samples": measure_samples,
    "model": measure_model,
    "mixing": measure_mixing,
    "reference": measure_reference,
    "gradients": measure_gradients,
    "evaluation": measure_evaluation,
    "resume": measure_resume,
    "exact": measure_exact,
    "sharded": measure_sharded,
    "sharded exact": measure_sharded_exact,
}
