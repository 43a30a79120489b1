"""predict: what a run's weights say of each sample, in order: a table, arrays of numbers, or images."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.commands.inference import InferencePass, run_distributed
from multigpu_cli.commands.options import draft_of, name_draft, writing_to
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.config.regular_files import open_new
from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.world import broadcast_object, run_on_all_ranks
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.module_state import preserve_buffers

_MOST_COLUMNS = 1000
Result = TypeVar("Result")


def predict_run(request: InferenceRequest, target: Path) -> str | None:
    """Write what is predicted for each sample of the split, in order; says what was written, None on ranks above 0.

    The target is a .csv, of which each row is a sample, a .npy or .npz with the task's outputs, or a new folder, in
    which each sample is a PNG. Samples may be inputs alone: then there are no targets beside.
    """
    return run_distributed(request, partial(_write, target), needs_targets=False)


def _write(target: Path, part: InferencePass) -> str:
    write = {".csv": _write_table, "": _write_images}.get(target.suffix, _write_arrays)
    with writing_to("--out", target):
        write(target, part)
    return f"{target}  {part.loader.size:,} samples of the {part.split} split, weights from {part.origin}"


def _gather(part: InferencePass, work: Callable[[InferencePass, Batch], Result]) -> Iterator[Result]:
    """What `work` makes of each batch, in the order of the samples; ranks have contiguous shares of them."""
    world = part.world

    @torch.inference_mode()
    def work_on_share() -> list[Result]:
        return [work(part, batch) for batch in part.loader.eval_batches(part.batch_size, world.rank, world.size)]

    share = run_on_all_ranks(world, work_on_share)
    for rank in range(world.size):
        for at in range(broadcast_object(world, len(share), source=rank)):
            yield broadcast_object(world, share[at] if rank == world.rank else None, source=rank)


def _call_task(part: InferencePass, batch: Batch) -> dict[str, Tensor]:
    """(n, …) each on the CPU: the targets where there are any, and the task's outputs by name."""
    with part.precision.autocast(), preserve_buffers(part.model):  # the previous batch may be another rank's
        outputs = _name_outputs(part.task.outputs(part.model, batch), len(batch))
    known = {"target": batch.targets} if isinstance(batch.targets, Tensor) and part.has_targets else {}
    half = (torch.float16, torch.bfloat16)
    return {name: (each.float() if each.dtype in half else each).cpu() for name, each in (known | outputs).items()}


def _name_outputs(outputs: Any, samples: int) -> dict[str, Tensor]:
    """Those tensors of outputs that have a row for each sample, by name; RequestError where there are none."""
    if isinstance(outputs, Mapping):
        named = dict(outputs)
    elif isinstance(outputs, Tensor):
        named = {"prediction": outputs}
    else:
        parts = outputs if isinstance(outputs, tuple | list) else ()
        named = {f"output_{number}": each for number, each in enumerate(parts)}
    found = {str(name): each for name, each in named.items() if isinstance(each, Tensor) and each.ndim}
    found = {name: each for name, each in found.items() if len(each) == samples}
    if not found:
        raise RequestError(
            f"predict: what the network returns, a {type(outputs).__name__}, has no tensor with a row for each sample",
            remedy="--task my_code:Task, a class of your own whose outputs(model, batch) returns one",
        )
    return found


def _write_table(target: Path, part: InferencePass) -> None:
    """A row for each sample. As text: lists of numbers take many times as much memory."""
    head, text = "", io.StringIO()
    for names, rows in _gather(part, _predict_rows):
        if part.world.is_main:
            head = head or names
            text.write(rows)
    if part.world.is_main:
        publish(target, f"{head}{text.getvalue()}".encode())


def _predict_rows(part: InferencePass, batch: Batch) -> tuple[str, str]:
    """The line of names, and a batch's rows."""
    with part.precision.autocast(), preserve_buffers(part.model):  # the previous batch may be another rank's
        columns = part.task.predictions(part.model, batch)
    columns = columns or _to_columns(_call_task(part, batch))
    numbers = batch.sample_indices.tolist()
    named = {} if part.names is None else {"name": [part.names[number] for number in numbers]}
    table = {"sample": numbers} | named | columns
    kept = [name for name in table if part.has_targets or not name.startswith("target")]
    return _format_csv([kept]), _format_csv(zip(*(table[name] for name in kept), strict=True))


def _to_columns(values: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Columns of a table: one for each number that a sample has of the values, (n, …) each."""
    rows = {name: value.flatten(1) if value.ndim > 1 else value[:, None] for name, value in values.items()}
    if (width := sum(value.shape[1] for value in rows.values())) > _MOST_COLUMNS:
        problem = f"--out: a table with {width:,} numbers for each sample"
        raise RequestError(problem, remedy="--out predictions.npz for arrays, or --out FOLDER for images")
    return {
        name if value.shape[1] == 1 else f"{name} {number}": column.tolist()
        for name, value in rows.items()
        for number, column in enumerate((value.double() if value.is_floating_point() else value).T)
    }


def _format_csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _write_arrays(target: Path, part: InferencePass) -> None:
    """The task's outputs, and in a .npz the targets, (n, …) each; rank 0 holds them all."""
    pieces = [piece for piece in _gather(part, _call_task) if part.world.is_main]
    if not part.world.is_main:
        return
    try:
        tensors = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    except (KeyError, RuntimeError) as error:
        problem = f"--out {target}: the outputs of samples differ in name or shape ({error})"
        remedy = "--out ….csv; or a task of your own, whose outputs(model, batch) gives equal ones"
        raise RequestError(problem, remedy=remedy) from error
    arrays: dict[str, Any] = {name: each.numpy() for name, each in tensors.items()}
    with draft_of("--out", target) as draft, open_new(draft) as file:
        if target.suffix == ".npz":
            np.savez(file, **arrays)
            return
        arrays.pop("target", None)
        if len(arrays) > 1:
            raise RequestError(f"--out {target}: there are {', '.join(arrays)}", remedy="--out ….npz for several")
        np.save(file, next(iter(arrays.values())))


def _write_images(target: Path, part: InferencePass) -> None:
    """A folder with a PNG for each sample and output that is an image; each rank writes its own."""
    world = part.world
    with draft_of("--out", target) if world.is_main else nullcontext(name_draft(target)) as draft:
        run_on_all_ranks(world, lambda: draft.mkdir() if world.is_main else None)
        for _ in _gather(part, partial(_save_images, draft)):
            pass


def _save_images(folder: Path, part: InferencePass, batch: Batch) -> None:
    from PIL import Image  # an optional dependency

    arrays = {name: each.numpy() for name, each in _call_task(part, batch).items() if name != "target"}
    images = {name: found for name, each in arrays.items() if (found := _to_pixels(each)) is not None}
    if not images:
        shapes = ", ".join(f"{name} {each.dtype} {each.shape}" for name, each in arrays.items())
        raise RequestError(
            f"--out is a folder, for images, and the outputs are none: {shapes}",
            remedy="outputs (n, h, w), (n, 1, h, w) or (n, 3, h, w): floats from 0 to 1, or whole numbers from 0 to "
            "255; or --out predictions.npy for numbers",
        )
    for at, number in enumerate(batch.sample_indices.tolist()):
        for name, pixels in images.items():
            ending = f"_{quote(name, safe='')}" if len(images) > 1 else ""
            Image.fromarray(pixels[at]).save(folder / f"{number:06d}{ending}.png")


def _to_pixels(array: np.ndarray) -> np.ndarray | None:
    """(n, h, w) or (n, h, w, 3) bytes; None where an output is no image."""
    if array.ndim == 4 and array.shape[1] in (1, 3):
        array = array.transpose(0, 2, 3, 1).squeeze(3) if array.shape[1] == 1 else array.transpose(0, 2, 3, 1)
    elif array.ndim != 3:
        return None
    if array.dtype.kind == "f":
        array = np.rint(array.clip(0, 1) * 255)
    elif array.min() < 0 or array.max() > 255:
        return None
    return np.ascontiguousarray(array, dtype=np.uint8)
