"""Adapters (LoRA and its kin, through peft) beside the weights of a pretrained network, and the base's fingerprint.

The state of a network with an adapter is what learns: the rest is read again from the folder of the pretrained model.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from multigpu_cli.config.code_names import match_names
from multigpu_cli.config.schema import AdapterConfig, Config, ModelConfig
from multigpu_cli.distributed.world import World, run_on_main_rank
from multigpu_cli.errors import RequestError, raise_all
from multigpu_cli.language.model_folder import find_model_folder, hash_weights
from multigpu_cli.models.build import adapt_model
from multigpu_cli.planning.batch import make_key
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.runtime.factories import import_extra

_KINDS: dict[str, dict[str, Any]] = {  # by peft's names; all have the same files, and can be merged
    "lora": {},  # Hu et al. 2021
    "rslora": {"use_rslora": True},  # alpha / √r in place of alpha / r (Kalajdzievski 2023)
    "dora": {"use_dora": True},  # and a length for each row of a weight (Liu et al. 2024)
}
_ADAPTER = 0xADA  # separates the random stream of an adapter's first weights from the others
_LISTED = 8
REFERENCE = "dpo_reference"
"""The name in peft of a second adapter, which stays as the first one was: what DPO compares it with."""
_HALF = (torch.float16, torch.bfloat16)


def choose_adapter(config: Config, *, reference: bool = False) -> Callable[..., nn.Module]:
    """What `build_model` makes of a network with --adapter; see `add_adapter` and `adapt_model`."""

    def adapt_pretrained(network: nn.Module, settings: ModelConfig, seed: int, *, whole_output: bool) -> nn.Module:
        adapted = add_adapter(network, config.adapter, seed, reference=reference)
        model = adapt_model(adapted, whole_output=whole_output)
        check_freeze(model, settings.freeze)
        return model

    return adapt_pretrained


def add_adapter(network: nn.Module, config: AdapterConfig, seed: int, *, reference: bool = False) -> nn.Module:
    """Wrap a network of transformers by peft: the adapter learns, the network stays as it is.

    The first weights follow from the seed alone: a layer with a fresh adapter computes what it did without. The state
    dict has what learns, and the reference, and nothing of the network itself. The network may be on the meta device. A
    second adapter, the `reference`, gets the weights that `load_initial_weights` gives the first.
    """
    with torch.device("cpu"):  # its modules create tensors of their own, which would be on the meta device else
        lacks, remedy = f"--adapter {config.kind}: peft is not installed", "pip install 'multigpu-cli[hugging-face]'"
        peft = import_extra("peft", lacks, remedy)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        fan_in_fan_out=any(map(_is_conv1d, network.modules())),
        **_choose_modules(network, config),
        **_KINDS[config.kind],
    )
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other versions of transformers, and of layers that need no setting
        torch.default_generator.manual_seed(make_key(seed, _ADAPTER))
        adapted = cast(nn.Module, peft.get_peft_model(network, settings))
        if reference:
            cast(Any, adapted).add_adapter(REFERENCE, deepcopy(settings))
            cast(Any, adapted).initial_copies = {f".{REFERENCE}": ".default"}
    own = {name: p for name, p in adapted.named_parameters() if p.requires_grad or REFERENCE in name}
    if any(parameter.dtype == torch.float64 for parameter in network.parameters()):
        for weight in own.values():
            weight.data = weight.data.double()  # as peft does, except on the meta device
    _save_modules_in_float32(adapted)
    for name, weight in own.items():
        weight.requires_grad_(REFERENCE not in name)
    frozen = tuple(adapted.state_dict().keys() - own.keys())
    adapted.register_state_dict_post_hook(partial(_leave_out, frozen))
    adapted.register_load_state_dict_post_hook(partial(_do_without, frozen))
    return adapted


def _save_modules_in_float32(adapted: nn.Module) -> None:
    """Let modules that learn as a whole do so in float32: in half precision most weights are too far apart to move.

    The network around them goes on in its own format.
    """
    from peft.utils import ModulesToSaveWrapper

    for wrapper in [each for each in adapted.modules() if isinstance(each, ModulesToSaveWrapper)]:
        if any(parameter.dtype in _HALF for parameter in wrapper.modules_to_save.parameters()):
            wrapper.modules_to_save.float()
            wrapper.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
            wrapper.register_forward_hook(_cast_output)


def _cast_inputs(wrapper: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast((args, kwargs), torch.float32) if not wrapper.disable_adapters else (args, kwargs)


def _cast_output(wrapper: Any, args: Any, output: Any) -> Any:
    """To the format of the module that it stands for."""
    return _cast(output, next(wrapper.original_module.parameters()).dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, tree)


def find_adapted(model: nn.Module) -> Any:
    """The `peft.PeftModel` that a network is, or holds; None where there is no adapter."""
    return next((each for each in model.modules() if isinstance(getattr(each, "peft_config", None), dict)), None)


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """While the context lasts the network computes what it did before it learned: with the reference, or no adapter.

    Unlike peft's own, it leaves alone which parameters learn.
    """
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "_disable_adapters")]
    has_reference = REFERENCE in find_adapted(model).peft_config
    name, value = ("_active_adapter", [REFERENCE]) if has_reference else ("_disable_adapters", True)
    before = [getattr(layer, name) for layer in layers]
    try:
        for layer in layers:
            setattr(layer, name, value)
        yield
    finally:
        for layer, earlier in zip(layers, before, strict=True):
            setattr(layer, name, earlier)


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """What has learned, under the names of the files that peft's `save_pretrained` writes."""
    import peft

    return dict(peft.get_peft_model_state_dict(find_adapted(model), save_embedding_layers=False))


def merge_adapter(model: nn.Module) -> nn.Module:
    """The network of transformers, used up, with its adapter added to its weights in float32 or better."""
    adapted = find_adapted(model)
    if any(parameter.dtype in _HALF for parameter in adapted.parameters()):
        adapted.float()
    merged: nn.Module = adapted.merge_and_unload()
    return merged


def check_freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Refuse a --freeze pattern that matches nothing that learns, or a module that is to learn as a whole."""
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for pattern in patterns:
        names = match_names(learning, pattern, f"--freeze {pattern!r}", "parameter that --adapter lets learn")
        if saved := next((name for name in names if ".modules_to_save." in name), None):
            problem = f"--freeze {pattern!r} freezes {saved}, but adapter.modules_to_save trains it"
            raise RequestError(problem, remedy="leave out one of them")


def _choose_modules(network: nn.Module, config: AdapterConfig) -> dict[str, Any]:
    """The names of the modules with an adapter, and of those that learn as a whole, as peft's settings."""
    modules = {name: module for name, module in network.named_modules() if name}
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()  # type: ignore[operator]
    linear = [name for name, each in modules.items() if isinstance(each, nn.Linear) or _is_conv1d(each)]
    able = linear + [name for name, each in modules.items() if isinstance(each, nn.Embedding)]
    targets = _find_modules(able, config.targets, "adapter.targets", "layer that can have an adapter")
    targets = targets or [name for name in linear if modules[name] is not head]
    whole = [name for name, each in modules.items() if any(True for _ in each.parameters())]
    saved = _find_modules(whole, config.modules_to_save, "adapter.modules_to_save", "module with weights")
    if both := next((name for name in targets for other in saved if f"{name}.".startswith(f"{other}.")), None):
        problem = f"adapter.modules_to_save: {both} is trained in full, and has an adapter as well"
        raise RequestError(problem, remedy="name it in one of adapter.targets and adapter.modules_to_save")
    tied = head is not None and embedding.weight is head.weight
    for key, names in (("adapter.targets", targets), ("adapter.modules_to_save", saved)):
        parts = [each for name in names for each in modules[name].modules()]
        if tied and any(part is embedding or part is head for part in parts):
            raise RequestError(
                f"{key}: the embedding and the head of this model share their weights (tie_word_embeddings), "
                "so they can't be trained separately",
                remedy="other layers, or full fine-tuning without --adapter",
            )
    return {"target_modules": targets, "modules_to_save": saved or None}


def _find_modules(names: list[str], patterns: Sequence[str], key: str, kind: str) -> list[str]:
    """The names that match a pattern as a whole, or by their last parts; RequestError where one matches none."""
    found: dict[str, None] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatch(name, pattern) or fnmatch(name, f"*.{pattern}")]
        if not matched:
            short = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
            more = ", …" if len(short) > _LISTED else ""
            raise RequestError(
                f"{key} {pattern!r} matches no {kind}", remedy=f"names end in {', '.join(short[:_LISTED])}{more}"
            )
        found |= dict.fromkeys(matched)
    return [name for name in names if name in found]


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's kind of linear layer, with its weight transposed."""
    return type(module).__name__ == "Conv1D"


def _leave_out(names: Sequence[str], module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name in names:
        state.pop(prefix + name, None)


def _do_without(names: tuple[str, ...], module: nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if not key.endswith(names)]


_OTHER = {"weights": "other weights", "tokenizer": "another tokenizer", "template": "another chat template"}


class Adapter(Part):
    """What the plan and the checkpoints say of --adapter."""

    _note = ""

    def __init__(self, spec: RunSpec, world: World) -> None:
        self._config, self._world, self._has_reference = spec.config, world, spec.has_reference

    def model_built(self, model: nn.Module) -> None:
        """Count how much learns, and how much of the network stays as it is."""
        counts = dict.fromkeys((True, False), 0)
        for parameter in model.parameters():
            counts[parameter.requires_grad] += parameter.numel()
        config, compared = self._config.adapter, "; the reference is that of --init-from" * self._has_reference
        words = f"{config.kind}, r {config.r}, alpha {config.alpha}"
        self._note = f"{words}: {counts[True]:,} trainable parameters, {counts[False]:,} frozen{compared}"

    def plan_notes(self) -> dict[str, str | list[str]]:
        return {"adapter": self._note}

    def fitted(self, components: TrainComponents) -> None:
        """Note which weights the adapter learns beside, once: their files may go."""
        spec = components.spec
        base = run_on_main_rank(self._world, lambda: fingerprint_base_model(spec.config, spec.source.codec.record))
        components.spec = replace(spec, base=base)


def fingerprint_base_model(config: Config, tokenizer: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 of the weights beside which an adapter learns, and of the tokenizer; and the chat template's text."""
    if config.adapter.kind == "none":
        return dict(tokenizer)
    return {"weights": hash_weights(find_model_folder(config.model.dir))} | dict(tokenizer)


def check_base(before: Mapping[str, str], config: Config, tokenizer: Mapping[str, str], origin: str) -> None:
    """Compare with what a checkpoint has recorded, as far as it has; an older version recorded nothing.

    `tokenizer` made the tokens (see `Codec.record`); `origin` is the run folder or file that has the record.
    """
    now = fingerprint_base_model(config, tokenizer) if before else {}
    raise_all(
        RequestError(
            f"--model-dir {config.model.dir} has {_OTHER.get(name, name)} than {origin} was started with",
            remedy="--model-dir with the folder of that very model; or a new run with another --save-dir",
        )
        for name in now
        if before.get(name, now[name]) != now[name]
    )
