"""All that one process measures for the selftest; both sides run the same functions, and nothing is judged here."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import torch
from torch.utils.data import TensorDataset

from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.commands.selftest_marks import Watched, each_sample, marks, on_device
from multigpu_cli.commands.selftest_side import Found, Side, first_batch
from multigpu_cli.commands.selftest_steps import exact, gradients, reference, resume
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.sampler import epoch_order
from multigpu_cli.runtime.determinism import be_deterministic, seed_micro_batch

_SAMPLES = 16


def measured(side: Side, keep: Callable[[Found], None]) -> Found:
    """All parts in turn; `keep` gets what has been found so far, since the next part may end the process."""
    be_deterministic()
    torch.use_deterministic_algorithms(True, warn_only=True)  # only --exact insists
    found: Found = {}
    for name, part in _PARTS.items():
        with ExitStack() as stack:
            found[name] = part(side, stack)
        keep(found)
    return found


def samples(side: Side, stack: ExitStack) -> Found:
    """The marks of a few training samples, fetched in several ways."""
    config, size = side.config, len(side.source.train)  # type: ignore[arg-type]
    order = epoch_order(size, config.reproducibility.seed, 0)[:_SAMPLES]
    found = {}
    for way, (chunks, processes) in {
        "in one order": (order.split(4), 0),
        "in another order": (order.flip(0).split(3), 0),
        "once more": (order.split(4), 0),
        "by a loader process": (order.split(4), 1),
    }.items():
        if processes and (side.world.size > 1 or isinstance(side.source.train, TensorDataset)):
            continue
        data = replace(config.data, num_workers=processes)
        seed, device = config.reproducibility.seed, side.world.device
        with closing(Loader(side.source.train, side.source, data, device=device, seed=seed)) as loader:
            found[way] = {
                number: marks(sample)
                for batch in loader.samples(list(chunks), 0)
                for number, sample in zip(batch.indices.tolist(), each_sample(batch), strict=True)
            }
    return found


def model_alone(side: Side, stack: ExitStack) -> Found:
    """What the model says to the same samples with the same seeds, twice, without any other worker."""
    components = side.alone.components()
    kept, batch = components.state, side.batch or first_batch(side)
    device = side.world.device
    batch = replace(batch, inputs=on_device(batch.inputs, device), targets=on_device(batch.targets, device))
    start = kept.capture()
    twice = []
    for _ in range(2):
        kept.restore(start, "selftest")
        seed_micro_batch(side.config.reproducibility.seed, 0, batch.index, device)
        with Watched(kept.model) as heard, components.state.precision.autocast(), torch.no_grad():
            loss = components.task.loss_sum(kept.model, batch)
        twice.append([*heard, ["loss", type(components.task).__name__, marks(loss)]])
    return {"weights": fingerprint(start["model"]), "outputs": twice[0], "again": twice[1]}


class _Counted(Loader):
    """Notes which samples an evaluation meets."""

    seen: list[int]

    def held_out(self, batch_size: int, rank: int, workers: int) -> Iterator[Batch]:
        self.seen = []
        for batch in super().held_out(batch_size, rank, workers):
            self.seen += batch.indices.tolist()
            yield batch


def evaluation(side: Side, stack: ExitStack) -> Found:
    """Metrics of the first weights, and the samples that this worker met."""
    components = side.components()
    assert side.source.val is not None
    seed, here = side.config.reproducibility.seed, side.world.local_size
    counted = _Counted(
        side.source.val, side.source, side.config.data, device=side.world.device, seed=seed, workers_here=here
    )
    model = components.state.for_use()
    result = components.task.evaluate(model, counted, side.world, components.state.precision, components.eval_batch)
    return {"metrics": dict(result.metrics), "size": counted.size, "seen": counted.seen}


_PARTS: dict[str, Callable[[Side, ExitStack], Found]] = {
    "samples": samples,
    "model": model_alone,
    "reference": reference,
    "gradients": gradients,
    "evaluation": evaluation,
    "resume": resume,
    "exact": exact,
}
