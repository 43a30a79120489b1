"""The selftest's verdicts: the measurements of one worker against those of several, with figures and a remedy."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multigpu_cli.commands.selftest import process as checksums
from multigpu_cli.commands.selftest.process import Measured, SelftestProcess, is_close, relative_distance
from multigpu_cli.config.schema import Config
from multigpu_cli.data.loader import map_batch
from multigpu_cli.data.order import EVAL_EPOCH
from multigpu_cli.runtime.module_state import eval_mode
from multigpu_cli.runtime.seeding import seed_micro_batch

_TELLING = 6  # so many samples do not come in the same order again by chance
TOLERANCE = {"off": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Largest difference of a gradient by number format, relative to the gradient's largest entry.

Rounding alone gives 1e-7 to 5e-6 in fp32 (BatchNorm in a deep network amplifies it); a wrong divisor gives 1e-1.
"""


_WORKERS_FAILED = "the workers failed before this check: see their error"


class CheckResult(NamedTuple):
    """One line of the table; what could not be tried is no fault (`holds` is None)."""

    check: str
    holds: bool | None
    figures: str
    remedy: str = ""


class Measurements(NamedTuple):
    """What one worker measured, and each of several (parts are missing where it failed); why --exact was not tried."""

    alone: Measured
    workers: list[Measured]
    config: Config  # whose --amp is resolved
    no_exact: str = ""

    def of_workers(self, part: str) -> list[Measured]:
        """One part of all workers' measurements."""
        return [worker[part] for worker in self.workers]


def run_checks(measurements: Measurements) -> list[CheckResult]:
    """Causes first, so that the line that names a fault stands above its consequences."""
    results = []
    for check, part, run in _CHECKS:
        measured = measurements.workers and all(part in worker for worker in measurements.workers)
        result = run(measurements) if measured else CheckResult("", False, _WORKERS_FAILED)
        results.append(result._replace(check=check))
    return results


def _check_samples(measurements: Measurements) -> CheckResult:
    ways = measurements.alone["samples"]
    first, *others = ways
    compared = {f"comes out different {way}": ways[way] for way in others}
    for rank, theirs in enumerate(measurements.of_workers("samples")):
        compared[f"is another one on rank {rank}"] = theirs[first]
    faults = [
        f"sample {number} {difference}"
        for difference, samples in compared.items()
        for number, checksums in ways[first].items()
        if not is_close(checksums, samples[number])
    ]
    if not faults:
        return CheckResult("", True, f"{len(ways[first])} samples, fetched in {len(ways)} ways and on every worker")
    cause = "the dataset (--data) has a random stream or state of its own"
    remedy = "in __getitem__, draw from torch's, NumPy's or Python's global generators: they are seeded for each sample"
    return CheckResult("", False, f"{faults[0]} ({len(faults)} such findings): {cause}", remedy)


def _check_model(measurements: Measurements) -> CheckResult:
    alone = measurements.alone["model"]
    if where := _find_difference(alone["outputs"], alone["again"]):
        problem = f"two passes with the same samples and seeds differ, {where}"
        return _blame_model(problem, "has a random stream of its own")
    for rank, theirs in enumerate(measurements.of_workers("model")):
        if theirs["weights"] != alone["weights"]:
            return _blame_model(f"rank {rank} starts with other weights than one process alone", "depends on its rank")
        if where := _find_difference(alone["outputs"], theirs["outputs"]):
            return _blame_model(f"rank {rank} differs from one process alone, {where}", "depends on its rank")
    return CheckResult("", True, f"{len(alone['outputs'])} module outputs, twice and on every worker")


def _blame_model(problem: str, cause: str) -> CheckResult:
    remedy = "draw from torch's global generator only, in the factory and in forward, and don't look at the rank"
    return CheckResult("", False, f"{problem}: the model (--model) {cause}", remedy)


def _find_difference(one: list[Any], other: list[Any]) -> str:
    """Where two passes through a model first differ, in words; empty where they don't."""
    for (name, kind, sums), (name_b, _, sums_b) in zip(one, other, strict=False):
        if name != name_b or not is_close(sums, sums_b):
            return f"first in {name} ({kind})"
    return "" if len(one) == len(other) else "in which modules run"


def _check_mixing(measurements: Measurements) -> CheckResult:
    found = measurements.alone["mixing"]
    if reason := found.get("refused"):
        return CheckResult("", None, f"not possible here: {reason}")
    if not (where := found["mixes"]):
        return CheckResult("", True, "in evaluation mode, of 4 samples in a batch, only the changed one's output moves")
    figures = f"it does, first in {where}: the model (--model) takes the batch for something else, such as time"
    return CheckResult("", False, figures, "batch_first=True: torch's attention and recurrent layers take time first")


def _check_order(measurements: Measurements) -> CheckResult:
    alone, parts = measurements.alone["resume"], measurements.of_workers("resume")
    for number, one in enumerate(alone["samples"]):
        if sorted(one) != sorted(chain(*(part["samples"][number] for part in parts))):
            return CheckResult("", False, f"step {number + 1} takes other samples on several workers than on one")
    if not alone["shuffled"]:
        return CheckResult("", None, "not possible here: samples are drawn, or come from a stream of the task's own")
    steps = alone["epoch"]
    first, second = (list(chain(*alone["samples"][start : start + steps])) for start in (0, steps))
    if again := [index for index, times in Counter(first).items() if times > 1]:
        return CheckResult("", False, f"sample {again[0]} comes more than once in the first epoch")
    if len(second) >= _TELLING and first[: len(second)] == second:
        return CheckResult("", False, "the second epoch has the order of the first")
    return CheckResult("", True, f"{len(first)} samples of the first epoch, {len(second)} of the second")


def _check_unused(measurements: Measurements) -> CheckResult:
    reference = measurements.alone["reference"]
    names = sorted({*reference["first"]["missing"], *reference["last"]["missing"]})
    total = len(reference["first"]["gradient"])
    if not names:
        return CheckResult("", True, f"{total} parameters")
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    if measurements.config.communication.find_unused_parameters:
        return CheckResult("", True, f"{len(names)} of {total} get none, as --find-unused-parameters allows: {listed}")
    remedy = "--find-unused-parameters, or take the branch out of the model"
    return CheckResult("", False, f"{len(names)} of {total} get none: {listed}", remedy)


def _gradient_distances(measurements: Measurements, which: str) -> list[float]:
    """Largest relative difference from the definition, of several workers and of one."""
    reference, sides = measurements.alone["reference"][which]["gradient"], (measurements.workers[0], measurements.alone)
    return [relative_distance(side["gradients"][which]["gradient"], reference) for side in sides]


def _judge_distances(measurements: Measurements, gaps: Sequence[float], note: str = "", amp: str = "") -> CheckResult:
    """Judge relative differences by the tolerance of --amp, or of another value of --amp if that rounds more."""
    tolerance = max(TOLERANCE[measurements.config.precision.amp], TOLERANCE[amp or "off"])
    shown = f"max relative difference {max(gaps):.1e} (tolerance {tolerance:.0e}){note}"
    return CheckResult("", all(gap <= tolerance for gap in gaps), shown)


def _check_first_step(measurements: Measurements) -> CheckResult:
    return _judge_distances(measurements, _gradient_distances(measurements, "first"))


def _check_last_window(measurements: Measurements) -> CheckResult:
    if measurements.config.batch.drop_last:
        return CheckResult("", None, "left out of training by --drop-last")
    measured = measurements.workers[0]["gradients"]
    shares = " + ".join(map(str, measured["shares"]))
    distances = _gradient_distances(measurements, "last")
    return _judge_distances(measurements, distances, f"; {shares} samples on the workers")


def _check_clipping(measurements: Measurements) -> CheckResult:
    reference = measurements.alone["reference"]["first"]["gradient"]
    sides = (measurements.workers[0]["gradients"], measurements.alone["gradients"])
    differences = [difference for side in sides for difference in _compare_clipped(reference, side)]
    found, norm = (side["clipped"]["norm"] for side in sides)
    return _judge_distances(measurements, differences, f"; norm {found:.4g} of {norm:.4g}")


def _compare_clipped(reference: dict[str, Tensor], measured: Measured) -> tuple[float, float]:
    """Relative differences of the clipped gradient and of the norm from those of the whole gradient."""
    clipped, doubles = measured["clipped"], [value.double() for value in reference.values()]
    norm = float(torch.nn.utils.get_total_norm(doubles))
    expected = {name: value * (measured["limit"] / (norm + 1e-6)) for name, value in reference.items()}
    return relative_distance(clipped["gradient"], expected), abs(clipped["norm"] - norm) / (norm or 1.0)


def _check_buffers(measurements: Measurements, part: str = "gradients") -> CheckResult:
    """Compare how buffers moved; those in half precision have the tolerance of --amp bf16."""
    sides, results = (measurements.alone["gradients"]["buffers"], measurements.workers[0][part]["buffers"]), []
    for amp, sizes in {"bf16": (1, 2), "": (4, 8, 16)}.items():
        one, other = ({key: move for key, move in side.items() if move.itemsize in sizes} for side in sides)
        moved = any(bool(move.any()) for move in (*one.values(), *other.values()))
        results.append(_judge_distances(measurements, [relative_distance(other, one) if moved else 0.0], amp=amp))
    return min(reversed(results), key=lambda result: bool(result.holds))


def _check_evaluation(measurements: Measurements) -> CheckResult:
    alone, parts = measurements.alone["evaluation"], measurements.of_workers("evaluation")
    times = Counter(number for part in parts for number in part["seen"])
    once = times == Counter(range(alone["size"]))
    gaps = [
        abs(value - part["metrics"][name]) / (abs(value) or 1.0)
        for part in parts
        for name, value in alone["metrics"].items()
    ]
    verdict = _judge_distances(measurements, gaps)
    counted = f"{len(times)} of {alone['size']} samples counted, at most {max(times.values(), default=0)}×; "
    return verdict._replace(holds=verdict.holds and once, figures=counted + verdict.figures)


def _check_replicas(measurements: Measurements) -> CheckResult:
    prints = [part["replica"] for part in measurements.of_workers("resume")]
    other = next((rank for rank, each in enumerate(prints) if each != prints[0]), None)
    if other is None:
        return CheckResult("", True, f"all {prints[0][:12]}")
    return CheckResult("", False, f"{prints[0][:12]} on rank 0, {prints[other][:12]} on rank {other}")


def _check_resume(measurements: Measurements) -> CheckResult:
    sides = [measurements.alone["resume"], *measurements.of_workers("resume")]
    if not all(side["in order"] for side in sides):
        return CheckResult("", False, "in the middle of an epoch, a resumed run gets other samples")
    wrong = [side for side in sides if side["whole"] != side["resumed"]]
    if not wrong:
        return CheckResult("", True, "equal bits, on one worker and on several")
    where = "one worker" if sides[0] in wrong else "several workers"
    figures = f"weights differ by {max(side['apart'] for side in wrong):.1e} of the largest, on {where}"
    remedy = "whatever changes from step to step must be a parameter or buffer of the model"
    return CheckResult("", False, figures, remedy)


def _check_exact(measurements: Measurements) -> CheckResult:
    return _compare_exact(measurements, measurements.of_workers("exact"))


def _check_sharded_exact(measurements: Measurements) -> CheckResult:
    """Compare rank 0 alone, which has the whole state."""
    return _compare_exact(measurements, [measurements.workers[0]["sharded exact"]])


def _compare_exact(measurements: Measurements, parts: Sequence[Measured]) -> CheckResult:
    alone = measurements.alone["exact"]
    refused = (process["refused"] for process in (alone, *parts) if "refused" in process)
    if reason := measurements.no_exact or next(refused, ""):
        return CheckResult("", None, f"not possible here: {reason}")
    wrong = [part for part in parts if part != alone]
    if not wrong:
        counted = f"{len(alone['losses'])} losses and the evaluation"
        return CheckResult("", True, f"equal bits: {alone['end'][:12]}, {counted}")
    pairs = enumerate(zip(alone["losses"], wrong[0]["losses"], strict=True), start=1)
    step = next((number for number, (one, other) in pairs if one != other), None)
    where = "the losses agree" if step is None else f"the losses first differ at step {step}"
    return CheckResult("", False, f"{alone['end'][:12]} on one worker, {wrong[0]['end'][:12]} on several; {where}")


def _check_sharded(measurements: Measurements) -> CheckResult:
    reference, sharded = measurements.alone["reference"]["by rows"], measurements.workers[0]["sharded"]
    if reason := sharded.get("refused"):
        return CheckResult("", None, f"not possible here: {reason}")
    if not (buffers := _check_buffers(measurements, "sharded")).holds:
        return buffers
    differences = [*_compare_clipped(reference["first"]["gradient"], sharded)]
    for which in ("first", "last"):
        expected, found = reference[which], sharded[which]
        differences.append(relative_distance(found["gradient"], expected["gradient"]))
        differences.append(abs(found["loss"] - expected["loss"]) / (abs(expected["loss"]) or 1.0))
    return _judge_distances(measurements, differences, ", in two steps, with clipping and buffers")


_CHECKS: list[tuple[str, str, Callable[[Measurements], CheckResult]]] = [
    ("a sample is the same in any order and process", "samples", _check_samples),
    ("the model says the same on every worker", "model", _check_model),
    ("a sample's output does not depend on the others", "mixing", _check_mixing),
    ("each epoch has each sample once, in its own order", "resume", _check_order),
    ("every parameter gets a gradient", "reference", _check_unused),
    ("the gradient of the first step is that of one worker", "gradients", _check_first_step),
    ("and that of an epoch's last short batch", "gradients", _check_last_window),
    ("clipping acts on the whole gradient, unscaled", "gradients", _check_clipping),
    ("BatchNorm's and other buffers move as on one worker", "gradients", _check_buffers),
    ("an evaluation counts each sample once", "evaluation", _check_evaluation),
    ("replicas are identical after the last step", "resume", _check_replicas),
    ("a resumed run equals the uninterrupted one", "resume", _check_resume),
    ("--exact gives the same bits on one worker and on several", "exact", _check_exact),
    ("--multi-gpu fsdp has the loss and gradients of one worker", "sharded", _check_sharded),
    ("and together with --exact its bits", "sharded exact", _check_sharded_exact),
]

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
        batch = map_batch(pair, itemgetter(order))
        batch = replace(batch, sample_indices=pair.sample_indices[order], tokens=None)
        seed_micro_batch(process.config.reproducibility.seed, EVAL_EPOCH, 0, process.world.device)
        recording = checksums.record_outputs(model, _list_rows)
        with eval_mode(model), recording as outputs, components.state.precision.autocast():
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
