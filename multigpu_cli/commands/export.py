"""export: trained weights, or the whole network, as a file that other programs read; what was written is checked."""

import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.pieces import deserialize, serialize
from multigpu_cli.checkpoint.weights import TrainedWeights, extra_state, load_trained_weights, round_weights
from multigpu_cli.commands.inference import LoadedRun, load_run
from multigpu_cli.commands.options import draft_of, writing_to
from multigpu_cli.commands.requests import ExportTarget, InferenceRequest
from multigpu_cli.data.load import FROM_MODEL, check_has_samples
from multigpu_cli.data.loader import Loader, first_batch
from multigpu_cli.data.notation import list_missing_words
from multigpu_cli.data.tables.features import TableFeatures
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.runtime.model_call import Arguments, bind_arguments

_TOLERANCE = 1e-4  # of the largest output; another runtime sums in another order


@dataclass(frozen=True)
class RawInputs:
    """Preprocessing that becomes part of an ONNX file, and the raw samples that the network's inputs come from."""

    add_before: Callable[[bytes], bytes]
    samples: dict[str, Any]


def export_weights(state: dict[str, Any], target: Path, half: str | None = None) -> list[str]:
    """Write a state dict as .pt, or its tensors as .safetensors, rounded to `half` (bf16, fp16); verify every bit.

    Returns the names of the entries that are left out, since .safetensors holds only tensors. TrainingError: reading
    the file back gives other content.
    """
    left_out = extra_state(state) if target.suffix == ".safetensors" else {}
    # copies, so that tied tensors become two: safetensors accepts no views
    own = {
        name: round_weights(name, value, half).clone().contiguous() if isinstance(value, Tensor) else value
        for name, value in state.items()
        if name not in left_out
    }
    with draft_of("--to", target) as draft:
        if target.suffix == ".safetensors":
            publish(draft, safetensors.save(own, metadata={"format": "pt"}))
            found = safetensors.load(draft.read_bytes())
        else:
            publish(draft, serialize(own))
            found = deserialize(draft.read_bytes(), str(draft))
        if found.keys() != own.keys() or any(_bits(found[name]) != _bits(own[name]) for name in own):
            raise TrainingError(f"{target}: the file differs from what was written", remedy="use another disk")
    return list(left_out)


def _bits(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        return (serialize(value),)
    return value.dtype, value.shape, value.flatten().view(torch.uint8).numpy().tobytes()


def export_network(model: nn.Module, inputs: Any, target: Path, raw: RawInputs | None = None) -> float:
    """Write a model that runs without this package, as .pt2 or .onnx; returns the largest difference of an output.

    The model is in evaluation mode, on the CPU. The inputs are (n, …) samples, n > 2, or a tuple or dict of such
    tensors; the exported model accepts any batch size. `raw` is the preprocessing that becomes part of an .onnx file.
    RequestError: the model can't be exported. TrainingError: the exported model's outputs differ.
    """
    pack, load = (_onnx, partial(_run_onnx, raw=raw)) if target.suffix == ".onnx" else (_pt2, _run_pt2)
    with draft_of("--to", target) as draft, torch.no_grad(), _silence():
        try:
            content = pack(model, bind_arguments(model, _take(inputs, -1)))
            publish(draft, raw.add_before(content) if raw else content)
            run = load(draft.read_bytes())
            calls = [bind_arguments(model, some) for some in (inputs, _take(inputs, 1))]
            outputs = [(model(*args, **named), run(*args, **named)) for args, named in calls]
            pairs = [pair for both in outputs for pair in _pair_outputs(*both)]
        except (OSError, RequestError):
            raise
        except Exception as error:  # torch raises many types of error for code that it can't trace
            message = (str(error).strip().splitlines() or [""])[0]
            problem = f"{target}: this model can't be exported ({type(error).__name__}: {message})"
            remedy = "use .safetensors for the weights of any model; torch.export's documentation says what it needs"
            raise RequestError(problem, remedy=remedy) from error
        worst = max(float((one - other).abs().max()) for one, other in pairs)
        if not worst <= _TOLERANCE * max(1.0, *(float(one.abs().max()) for one, _ in pairs)):
            raise TrainingError(f"{target}: the exported model's outputs differ from the original's by {worst:.3g}")
    return worst


@contextmanager
def _silence() -> Iterator[None]:
    """Silence warnings of torch's exporters, which are for their developers; outputs are compared instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _take(inputs: Any, stop: int) -> Any:
    """The first samples, or all but the last."""
    return tree_map_only(Tensor, lambda tensor: tensor[:stop], inputs)


def _pair_outputs(one: Any, other: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors of both, in double precision."""
    sides = ([each.double() for each in tree_leaves(side) if isinstance(each, Tensor)] for side in (one, other))
    return list(zip(*sides, strict=True))


def _trace_network(model: nn.Module, call: Arguments) -> torch.export.ExportedProgram:
    """For any number of samples, which are the first dimension of every tensor."""
    batch = {0: torch.export.Dim("batch")}
    bound = inspect.signature(model.forward).bind(*call[0], **call[1]).arguments
    shapes = {name: tree_map_only(Tensor, lambda _: batch, value) for name, value in bound.items()}
    return torch.export.export(model, call[0], call[1], dynamic_shapes=shapes)


def _pt2(model: nn.Module, call: Arguments) -> bytes:
    content = io.BytesIO()
    torch.export.save(_trace_network(model, call), content)
    return content.getvalue()


def _run_pt2(content: bytes) -> Callable[..., Any]:
    network: Callable[..., Any] = torch.export.load(io.BytesIO(content)).module()
    return network


def _onnx(model: nn.Module, call: Arguments) -> bytes:
    """A lone input is called "input", several as the parameters of the network are."""
    alone = len(call[0]) == 1 and isinstance(call[0][0], Tensor) and not call[1]
    names = {"input_names": ["input"], "output_names": ["output"]} if alone else {}
    program = torch.onnx.export(_trace_network(model, call), dynamo=True, verbose=False, **names)  # type: ignore[arg-type]
    return bytes(program.model_proto.SerializeToString())  # type: ignore[union-attr]  # None is the old exporter's


def _run_onnx(content: bytes, raw: RawInputs | None) -> Callable[..., Any]:
    import onnxruntime  # an optional dependency

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(*args: Any, **named: Any) -> list[Tensor]:
        leaves = tree_leaves((args, named))
        if raw:
            given = {name: value[: len(leaves[0])] for name, value in raw.samples.items()}
            return [torch.from_numpy(session.run(["output"], given)[0])]
        names = [each.name for each in session.get_inputs()]
        given = {name: leaf.numpy() for name, leaf in zip(names, leaves, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, given)]

    return run


_SAMPLES = 9
_RAW = "takes raw columns, an array (n,) each; scaling, missing values and one-hot columns are computed inside"


@dataclass(frozen=True)
class Export:
    """The file, or folder, that was written."""

    file: str
    bytes: int
    origin: str
    difference: float  # greatest difference of an output from the original's, 0 where bits were compared
    checked: str
    takes: str = ""  # description of the file's inputs; "" if they are the network's own


def export_run(request: InferenceRequest, to: ExportTarget) -> Export:
    """Write the file, or folder, and check it; a network is built for the dataset's shapes, and run on its samples.

    RequestError: nothing was written. TrainingError: the file failed its check, and was removed.
    """
    if to.format:
        return _export_folder(request, to)
    weights, takes, (target, _, dtype) = load_trained_weights(request.run), "", to
    if target.suffix in (".safetensors", ".pt"):
        with writing_to("--to", target):
            left_out = export_weights(weights.state, target, dtype)
        difference, checked = 0.0, f"{f'rounded to {dtype}, ' if dtype else ''}read back: every bit is the same"
        if left_out:
            checked += f"; left out, since only .pt takes more than tensors: {', '.join(left_out)}"
    else:
        run, inputs = _rebuild_run(weights, request)
        with writing_to("--to", target):
            difference, takes = _export_run(run, inputs, target)
        checked = f"run on {len(tree_leaves(inputs)[0])} samples and on one: greatest difference {difference:.2g}"
    return Export(str(target), target.stat().st_size, str(weights.origin), difference, checked, takes)


def format_export(export: Export) -> Iterator[str]:
    """The file, its origin, how it was checked, and which inputs it takes."""
    yield f"{export.file}  {export.bytes / 1e6:.1f} MB, weights from {export.origin}"
    yield export.checked
    if export.takes:
        yield export.takes


def _export_folder(request: InferenceRequest, to: ExportTarget) -> Export:
    from multigpu_cli.commands.language.export_folder import write_model_folder  # late: transformers' models only

    origin, difference, rounding = write_model_folder(request, to)
    size = sum(file.stat().st_size for file in to.path.rglob("*") if file.is_file())
    checked = f"loaded again: greatest difference of a logit {difference:.2g} of the largest one"
    if to.dtype:
        checked += f"; {to.dtype} moved one by {rounding:.2g}"
    return Export(str(to.path), size, origin, difference, checked)


def _export_run(run: LoadedRun, inputs: Any, target: Path) -> tuple[float, str]:
    """Write the network; a table's preprocessing becomes part of an .onnx, and a file beside a .pt2."""
    table = run.source.codec
    if not isinstance(table, TableFeatures):
        return export_network(run.model, inputs, target), ""
    if target.suffix == ".onnx":
        from multigpu_cli.commands.table_onnx import add_preprocessing, list_raw_inputs  # needs an extra

        task = run.config.task.name or run.source.task
        raw = RawInputs(lambda network: add_preprocessing(network, run.source, task), list_raw_inputs(table))
        return export_network(run.model, inputs, target, raw), _RAW
    beside = target.with_name(f"{target.name}.json")
    if beside.exists():
        raise RequestError(f"--to {target}: {beside} exists already", remedy="another name, or remove it")
    difference = export_network(run.model, inputs, target)
    mean, scale = run.source.target_scale or (0.0, 1.0)
    notations = {name: table.examples.notations[name]._asdict() for name in table.numbers}
    facts = {"missing": list_missing_words(), "notations": notations, "classes": run.source.class_names}
    publish(beside, dump_json({**table.learned, **facts, "target": {"mean": mean, "scale": scale}}).encode())
    return difference, f"takes features, not rows: {beside} describes how features are computed from rows"


def _rebuild_run(weights: TrainedWeights, request: InferenceRequest) -> tuple[LoadedRun, Any]:
    """The run with these weights, and samples of its dataset as the network takes them."""
    run = load_run(weights, request)
    check_has_samples(run.config, "export to this format (.safetensors and .pt do not)")
    weights_alone = "--to ….safetensors, for the weights alone"
    if run.config.task.name == FROM_MODEL:
        raise RequestError("--task from-model: its network takes targets, and returns a loss", remedy=weights_alone)
    seed, device = run.config.reproducibility.seed, torch.device("cpu")
    loader = Loader(run.source.train, run.source, run.config.data, device=device, seed=seed, workers_here=1)
    with closing(loader):
        inputs = first_batch(loader, min(_SAMPLES, loader.size)).inputs
    leaves = tree_leaves(inputs)
    if not all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(leaves[0]) for leaf in leaves):
        raise RequestError("the model's input is not a batch of tensors", remedy=weights_alone)
    return run, inputs
