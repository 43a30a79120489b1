"""A fine-tuned language model as a folder that transformers and peft load as it is."""

import json
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multigpu_cli.checkpoint.weights import TrainedWeights, load_trained_weights, round_weights
from multigpu_cli.commands.inference import LoadedRun, load_run_without_data, load_text_model_of_run
from multigpu_cli.commands.options import draft_of, writing_to
from multigpu_cli.commands.requests import ExportTarget, InferenceRequest
from multigpu_cli.config.regular_files import refuse_special_file
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.language import hugging_face
from multigpu_cli.language.adapter import adapter_weights, find_adapted, merge_adapter
from multigpu_cli.language.model_folder import find_model_folder, import_transformers
from multigpu_cli.runtime.precision import DTYPES

_SHARD = "5GB"  # at most, unless one tensor alone is larger
_TOLERANCE = 1e-5  # of the largest logit
_TOKENS = (2, 16)  # samples, and tokens of each, that are compared
_COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("chat_template*", "generation_config.json", "LICENSE*", "NOTICE*"),
)


class _Live(NamedTuple):
    """What the folder has to do as the network of the run did."""

    origin: str
    base: Path
    settings: dict[str, str]  # `model.args` of a network with the same logits
    tokens: Tensor
    logits: Tensor  # (n, t, vocabulary) float32, for the tokens (n, t), of the weights as they were written
    rounding: float = 0.0


def write_model_folder(request: InferenceRequest, to: ExportTarget) -> tuple[str, float, float]:
    """Write a folder and check it: it is loaded again, once the network that was written is out of memory.

    The format is hf (all weights), adapter (for peft), or merged (all weights, with the adapter added to them in
    float32); with a dtype, all weights are rounded to it. Returns the origin of the weights and two shares of the
    largest logit: the largest difference from the network's logits, and the largest change by rounding. Raises
    RequestError if the run is of another kind, or a weight is beyond the range of the dtype: nothing was written.
    Raises TrainingError if the written folder computes different logits: it was removed.
    """
    with draft_of("--to", to.path) as draft:
        with writing_to("--to", to.path):
            draft.mkdir()
        live = _write(request, to, draft)
        found = _compute_logits(_load_again(draft, str(to.format), live), live.tokens)
        difference = float((found - live.logits).abs().max() / live.logits.abs().max())
        if not difference <= _TOLERANCE:  # NaN must fail, too
            gap = f"{difference:.2g} of the largest one"
            problem = f"{to.path}: the logits of the exported model differ by {gap}, so it was removed"
            remedy = "another version of transformers; or --to ….safetensors, for the weights as they are"
            raise TrainingError(problem, remedy=remedy)
    return live.origin, difference, live.rounding


def _write(request: InferenceRequest, to: ExportTarget, draft: Path) -> _Live:
    """Write everything; the network is gone when this returns."""
    target, kind, half = to
    run, template = _load_run(request, str(kind))
    network: Any = run.model.network  # of transformers or peft, which logits alone come out of in training
    base = find_model_folder(run.config.model.dir)
    _list_copied(base)  # its refusal comes before anything is computed
    settings = {"dtype": "float32"} | run.config.model.args
    if (half or kind != "hf") and settings["dtype"] in ("float16", "bfloat16"):  # what learned is float32 beside it
        network.float()
        settings["dtype"] = "float32"
    samples, length = _TOKENS
    shape = (samples, min(length, run.source.input_shape[-1]))
    tokens = torch.randint(run.source.num_classes, shape, generator=torch.Generator().manual_seed(0))
    live = _Live(run.origin, base, settings, tokens, _compute_logits(network, tokens))
    whole: Any = merge_adapter(network) if kind == "merged" else network
    if half:
        live = _round(whole, half, live)
    with writing_to("--to", target):
        if kind == "adapter":
            _write_adapter(network, draft, base)
        else:  # weights in shards, tied ones once, by transformers' own names
            whole.generation_config = import_transformers().GenerationConfig()  # the model's own may fail its checks
            if half:
                for weights in whole.parameters():
                    weights.data = weights.data.to(DTYPES[half])
            whole.save_pretrained(draft, max_shard_size=_SHARD)
            (draft / "generation_config.json").unlink(missing_ok=True)
            config = json.loads((base / "config.json").read_bytes())  # the model's own, which other programs know
            dtype = str(DTYPES[half]).removeprefix("torch.") if half else settings["dtype"]
            config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
            (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _copy_text_files(base, draft, template)
    return live


def _round(network: nn.Module, half: str, live: _Live) -> _Live:
    """Round the weights, and compute with them as precisely as before."""
    for name, weights in network.named_parameters():
        weights.data = round_weights(name, weights.data, half).to(weights.dtype)
    logits = _compute_logits(network, live.tokens)
    moved = float((logits - live.logits).abs().max() / live.logits.abs().max())
    return live._replace(logits=logits, rounding=moved)


def _load_run(request: InferenceRequest, kind: str) -> tuple[LoadedRun, str | None]:
    """The run with its weights, and the chat template of the training."""
    weights = load_trained_weights(request.run)
    _check_kind(weights, kind)
    if kind == "merged":  # merge into the base weights of the folder, even if the adapter was trained on a 4-bit copy
        args = {**request.changes.get("model.args", {}), "quantize": "none"}
        request = replace(request, changes={**request.changes, "model.args": args})
    run = load_run_without_data(weights, request)
    load_text_model_of_run(weights, run)  # else another model's tokenizer might be copied
    return run, weights.settings.get("base", {}).get("template")


def _check_kind(weights: TrainedWeights, kind: str) -> None:
    """Refuse a format that the run has no weights for; names the format that it has."""
    name = weights.model or weights.settings.get("model") or weights.settings.get("built_for", {}).get("model")
    if name != "pretrained":
        problem = f"--format {kind}: {weights.origin} is of --model {name}, not pretrained"
        raise RequestError(problem, remedy="--to FILE.safetensors or FILE.onnx without --format")
    adapter = weights.settings.get("adapter", "none")
    if adapter == "none" and kind != "hf":
        raise RequestError(f"--format {kind}: {weights.origin} is of a run without --adapter", remedy="--format hf")
    if adapter != "none" and kind == "hf":
        problem = f"--format hf: {weights.origin} is of --adapter {adapter}"
        remedy = "--format merged for a whole model, or --format adapter for the adapter alone"
        raise RequestError(problem, remedy=remedy)


@torch.no_grad()
def _compute_logits(network: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = network.eval()(input_ids=tokens).logits
    return logits.float()


def _load_again(draft: Path, kind: str, live: _Live) -> nn.Module:
    """The written folder as its users load it."""
    if kind != "adapter":
        return hugging_face.build_pretrained(str(draft), **live.settings)
    import peft

    base = hugging_face.build_pretrained(str(live.base), **live.settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other versions of transformers
        adapted: nn.Module = peft.PeftModel.from_pretrained(base, str(draft))
    return adapted


def _write_adapter(network: nn.Module, draft: Path, base: Path) -> None:
    """The two files of peft's own `save_pretrained`, which also asks Hugging Face's servers about the base."""
    from safetensors.torch import save_file

    adapted = find_adapted(network)
    config = adapted.peft_config[adapted.active_adapter]
    config.base_model_name_or_path, config.inference_mode = str(base.resolve()), True
    config.save_pretrained(str(draft))
    weights = {name: weight.detach().contiguous() for name, weight in adapter_weights(network).items()}
    save_file(weights, draft / "adapter_model.safetensors", metadata={"format": "pt"})


def _list_copied(base: Path) -> list[Path]:
    """Return the files and folders of a model that an export copies.

    A link may lead to a file of the model, or of its blobs in Hugging Face's cache, which has snapshots of links.
    RequestError: names a link to anything else, whose content an export would give away, or a FIFO.
    """
    copied = sorted({file for pattern in _COPIED for file in base.glob(pattern)})
    root = Path(os.path.realpath(base))
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in (each for source in copied for each in (source, *source.rglob("*"))):
        refuse_special_file(path, "--model-dir")
        target = Path(os.path.realpath(path))
        if path.is_symlink() and (path.is_dir() or not any(map(target.is_relative_to, roots))):
            problem = f"--model-dir: {path} is a link to {target}, which is no file of the model"
            raise RequestError(problem, remedy="replace the link with the file that belongs there, or delete it")
    return copied


def _copy_text_files(base: Path, draft: Path, template: str | None) -> None:
    """Tokenizer, how text is generated, and chat template as they came with the model; or the training's template."""
    for source in _list_copied(base):
        if source.is_dir():
            shutil.copytree(source, draft / source.name)
        else:
            shutil.copyfile(source, draft / source.name)
    if template:
        (draft / "chat_template.jinja").write_text(template)
