"""Whether a model's output for a sample depends on the others of its batch: a layer may take the batch for time."""

import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from operator import itemgetter
from typing import Any

from torch import Tensor

from multigpu_cli.commands.selftest import checksums
from multigpu_cli.commands.selftest.process import Measured, SelftestProcess
from multigpu_cli.data.epoch_order import EVAL_EPOCH
from multigpu_cli.runtime.preserve_module_state import eval_mode
from multigpu_cli.runtime.seeding import seed_micro_batch

_WHOLE = "the model"
# Which of two samples is in each row. Both are in every batch, so that the longest of a batch, say, stays the longest.
_BATCHES = {"same": [0, 1, 0, 1], "again": [0, 1, 0, 1], 0: [1, 1, 0, 1], 3: [0, 1, 0, 0], "more": [0, 1, 0, 1, 0]}
_SHARES_CAPACITY = re.compile("moe|expert|router", re.IGNORECASE)

Rows = dict[tuple[str, str, int], list[list[float]]]
"""By module, tensor of its output, and dimension of that: the checksums of the rows along it."""


def measure_mixing(process: SelftestProcess, stack: ExitStack) -> Measured:
    """Which module moves other rows than that of the sample that became another one; "" for none."""
    if process.world.size > 1:
        return {}
    components = process.alone.components(compile="off")
    stack.callback(components.loaders.close)
    model, pair = components.state.model, next(components.loaders.train.eval_batches(2, 0, 1))
    parts = checksums.iterate_leaves([pair.inputs, pair.targets], "")
    if not all(part is None or (isinstance(part, Tensor) and part.shape[:1] == (2,)) for _, part in parts):
        return {"refused": "not everything in a batch has a row for each sample"}
    kinds: dict[str, str] = {}
    passes: dict[Any, Rows] = {}
    for name, order in _BATCHES.items():
        batch = checksums.map_batch(pair, itemgetter(order))
        batch = replace(batch, sample_indices=pair.sample_indices[order], tokens=None)
        seed_micro_batch(process.config.reproducibility.seed, EVAL_EPOCH, 0, process.world.device)
        recorder = checksums.ActivationRecorder(model, _list_rows)
        with eval_mode(model), recorder as outputs, components.state.precision.autocast():
            components.task.measure(model, batch)
        kinds |= {module: kind for module, kind, _ in outputs}
        passes[name] = {(module, *place): found for module, _, rows in outputs for place, found in rows.items()}
    return _find_culprit(passes, kinds)


def _list_rows(output: Any) -> dict[tuple[str, int], list[list[float]]]:
    """Along each dimension that may be the batch's."""
    return {
        (name, dim): [checksums.compute_checksums(row) for row in leaf.unbind(dim)]
        for name, leaf in checksums.iterate_leaves(output, "")
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
        for dim, size in enumerate(leaf.shape)
        if size in (4, 5)
    }


def _find_culprit(passes: dict[Any, Rows], kinds: dict[str, str]) -> Measured:
    """By what the whole model returns; the modules inside only tell where it begins."""
    same, more = passes["same"], passes["more"]
    growing = [place for place, rows in same.items() if len(more.get(place, ())) == len(rows) + 1]
    times = Counter(place[:2] for place in growing)
    places = [place for place in growing if times[place[:2]] == 1]  # not what compares samples with samples
    judged = [place for place in places if place[0] == _WHOLE]

    def find_moved(trial: str | int, place: tuple[str, str, int]) -> set[int]:
        pairs = zip(same[place], passes[trial].get(place, same[place]), strict=False)
        return {row for row, pair in enumerate(pairs) if not checksums.is_close(*pair)}

    if not judged:
        return {"refused": "no output of the model has a row for each sample"}
    if any(find_moved("again", place) for place in judged):
        return {"refused": "the outputs of two passes with the same samples differ, or are no numbers"}
    if not any(find_moved(0, place) | find_moved(3, place) for place in judged):
        return {"refused": "two samples have the same outputs"}
    mixed = [place for place in places if find_moved(0, place) - {0} or find_moved(3, place) - {3}]
    if not set(judged) & set(mixed):
        return {"mixes": ""}
    first = f"{mixed[0][0]} ({kinds[mixed[0][0]]})"
    shared = (kind for kind in kinds.values() if _SHARES_CAPACITY.search(kind))
    if on_purpose := first if "BatchNorm" in first else next(shared, ""):
        return {"refused": f"{on_purpose} goes by the other samples of a batch on purpose"}
    return {"mixes": first}
