"""Networks of transformers: by the name of their architecture with fresh weights, or a model folder as it is."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from multigpu_cli.config.types import choice
from multigpu_cli.errors import RequestError, did_you_mean, pluralize
from multigpu_cli.language import model_folder
from multigpu_cli.models.token_losses import ComputesTokenLosses, TokenLosses, TokenTargets, compute_token_losses
from multigpu_cli.runtime.factories import import_extra
from multigpu_cli.runtime.model_call import Labelled, ModelCall

_LENGTHS = ("n_positions", "max_position_embeddings")  # how configurations call the longest sequence


class NamedInputs(nn.Module):
    """Stands between a transformers network and a task: named or unnamed inputs in, its output object out.

    `uncompiled` names methods that torch.compile leaves alone: how many values they handle differs between batches.
    """

    uncompiled: tuple[str, ...] = ("find_bounds",)

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._input: str = network.main_input_name  # type: ignore[assignment]
        inner: Any = getattr(network, "get_base_model", lambda: network)()  # that of peft
        names = ModelCall.of(network).names + ModelCall.of(inner).names
        self._call = replace(ModelCall.of(network), names=names, takes_any=False)
        self._takes_bounds = ModelCall.of(inner).takes_any  # and hands them on to its attention; see check_packing

    @property
    def callees(self) -> tuple[nn.Module, ...]:
        """What a call may go to, the outer one first."""
        return (self.network,)

    def forward(self, inputs: Tensor | Mapping[str, Tensor] | Labelled) -> Any:
        if isinstance(inputs, Labelled):
            return self._call_by_name(self.network, inputs.inputs, labels=inputs.targets)
        return self._call_by_name(self.network, inputs)

    def _call_by_name(self, callee: nn.Module, inputs: Tensor | Mapping[str, Tensor], **more: Tensor) -> Any:
        named = (dict(inputs) if isinstance(inputs, Mapping) else {self._input: inputs}) | more
        if "position_ids" not in self._call.names:  # a state-space model: place follows place; see check_packing
            named.pop("position_ids", None)
        self._call.check_names(named)  # its **kwargs would pass over them in silence
        flash = str(getattr(self.network.config, "_attn_implementation", "")).startswith("flash")
        places = named.get("position_ids") if named.keys() <= {self._input, "position_ids", "labels"} else None
        if flash and self._takes_bounds and places is not None and places.shape == named[self._input].shape:
            named |= self.find_bounds(places)
        return callee(**named)

    def find_bounds(self, positions: Tensor) -> dict[str, Any]:
        """Return where texts begin in rows of position ids (n, t), as the arguments of flash attention's kernels.

        These take no mask. Without the arguments transformers looks for texts in a lone row only, again in each layer,
        and lets those of several rows see each other. A text begins with a row, or at a jump of the positions.
        """
        begins = positions.diff(dim=1, prepend=positions[:, :1]) != 1
        bounds = pad(begins.flatten().nonzero().flatten().int(), (0, 1), value=positions.numel())  # (texts + 1,) int32
        longest = positions.shape[1]  # a bound will do for the kernels, and the exact value would cost a second wait
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}

    def make_cache(self) -> dict[str, Any]:
        """An empty cache of keys and values, as the input that a pass fills, by its name; {} where there is no use."""
        name = next((each for each in ("past_key_values", "cache") if each in self._call.names), "")
        if not name:  # transformers calls it `cache` since 5.24
            return {}
        from transformers import DynamicCache  # late: to generate text only

        config: Any = self.network.config
        return {name: DynamicCache(config=config)}


class Logits(NamedInputs, ComputesTokenLosses):
    """The same with `.logits` out; or, called with `TokenTargets`, the losses of tokens.

    The network's own `.loss` is a mean over its micro-batch, so it is of no use if several share a step.
    """

    uncompiled = (*NamedInputs.uncompiled, "compute_losses")

    def forward(self, inputs: Tensor | Mapping[str, Tensor] | Labelled | TokenTargets) -> Any:
        if isinstance(inputs, TokenTargets):
            return self.compute_losses(self._call_by_name(self._backbone, inputs.inputs), inputs)
        return super().forward(inputs).logits

    def compute_losses(self, output: Any, wanted: TokenTargets) -> TokenLosses:
        """The losses of tokens, given what the backbone returns."""
        hooked = any(each._backward_hooks for each in (*self._head.modules(), *self._head.parameters()))
        if hooked or getattr(self, "_is_replica", False):  # of nn.DataParallel: its weights are no leaves
            wanted = wanted._replace(summed=False)
        head, vocabulary = partial(self._compute_logits, type(output)), self._head.weight.shape[0]
        return compute_token_losses(head, vocabulary, output.last_hidden_state, wanted)

    @property
    def limits(self) -> tuple[int, int | None]:  # type: ignore[override]  # the adapter may change it
        """See `ComputesTokenLosses`."""
        return self._causal.get_input_embeddings().num_embeddings, model_folder.find_places(self._causal.config)

    @property
    def has_router_loss(self) -> bool:
        """Whether its configuration adds a loss of its own, which balances the experts of a mixture."""
        return bool(getattr(self._causal.config.get_text_config(), "output_router_logits", False))

    @property
    def callees(self) -> tuple[nn.Module, ...]:
        return self.network, self._backbone

    @property
    def _causal(self) -> Any:
        """The network within that of peft."""
        return getattr(self.network, "get_base_model", lambda: self.network)()

    @property
    def _backbone(self) -> nn.Module:
        """What computes hidden states: the network without its head."""
        found: nn.Module = self._causal.base_model
        return found

    @property
    def _head(self) -> Any:
        return self._causal.get_output_embeddings()

    def _compute_logits(self, output: Callable[..., Any], hidden: Tensor) -> Tensor:
        """(k, width) → logits (k, vocabulary), by what the network's own `forward` does after its backbone.

        That is its head, and in many architectures a scale or a soft cap. `output` is the class of what the backbone
        returns.
        """
        for module in (self._head, self._backbone):
            if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
                raise ValueError(
                    "strategy.wrap gathers its head or backbone, which every worker would call its own number of times"
                )
        with _answer(self._backbone, output(last_hidden_state=hidden[None])):
            logits: Tensor = type(self._causal).forward(self._causal).logits
        return logits.squeeze(0)


@contextmanager
def _answer(backbone: nn.Module, output: Any) -> Iterator[None]:
    """Let a backbone answer every call with this output; a `forward` of its own, as checkpointing sets, comes back."""
    before = backbone.__dict__.get("forward")
    backbone.forward = lambda *_, **__: output
    try:
        yield
    finally:
        if before is None:
            del backbone.forward
        else:
            backbone.forward = before


def build(
    input_shape: tuple[int, ...], num_classes: int, task: str, architecture: str = "gpt2", **settings: Any
) -> nn.Module:
    """A network with fresh weights: for causal language modelling, or for classes of images or sequences.

    Vocabulary, sequence length, image size, channels and number of classes follow from the dataset where the
    architecture has them and `settings`, of its configuration by transformers' own names, does not say otherwise.

    Args:
        task: language-model, or anything else for classes.
        architecture: as in transformers' model_type: gpt2, llama, bert, vit, resnet, …
    """
    transformers = import_extra("transformers", "--model transformers: it is not installed", "pip install transformers")
    known = transformers.CONFIG_MAPPING
    if architecture not in known:
        raise RequestError(f"model.args.architecture: {architecture!r}", remedy=did_you_mean(architecture, known))
    fields = set(known[architecture]().to_dict()) | set(known[architecture].attribute_map)
    if unknown := sorted(settings.keys() - fields):
        raise RequestError(
            f"model.args.{unknown[0]}: {architecture} has no such setting", remedy=did_you_mean(unknown[0], fields)
        )
    language, image = task == "language-model", len(input_shape) == 3
    derived: dict[str, Any] = {"num_labels": num_classes} if not language else {"vocab_size": num_classes}
    if image:
        derived |= {"num_channels": input_shape[0], "image_size": input_shape[-1]}
    elif len(input_shape) == 1:
        derived |= dict.fromkeys(_LENGTHS, input_shape[0])
    derived = {name: value for name, value in derived.items() if name in fields or name == "num_labels"}
    config = known[architecture](**derived | settings)
    config.use_cache = False  # keys and values of earlier places help generation only
    kind = "CausalLM" if language else "ImageClassification" if image else "SequenceClassification"
    factory = getattr(transformers, f"AutoModelFor{kind}")
    try:
        model: nn.Module = factory.from_config(config)
    except ValueError as error:
        said = str(error).splitlines()[0]
        raise RequestError(f"--model transformers: {architecture} is not made for this: {said}") from error
    return model


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2"}
_LISTED = 4


def build_pretrained(
    model_dir: str | None = None,
    dtype: Annotated[str, choice(*_DTYPES)] = "float32",
    attention: Annotated[str, choice(*_ATTENTION)] = "sdpa",
    quantize: Annotated[str, choice("none", "4bit")] = "none",
) -> nn.Module:
    """The model of the folder --model-dir, whole: nothing in it is as initialised.

    Args:
        dtype: of the weights. In half precision AdamW does not move most of them: --amp bf16 computes in it instead.
        attention: sdpa, eager, or flash (of the flash-attn package).
        quantize: none, or 4bit (of the bitsandbytes package): an adapter learns beside linear layers in 4 bits.
    """
    folder = model_folder.find_model_folder(model_dir)
    settings: dict[str, Any] = {"config": model_folder.load_config(folder)}
    settings |= {"dtype": _DTYPES[dtype], "attn_implementation": _ATTENTION[attention]}
    sent = torch.get_default_device().type == "meta"  # a rank that is sent the weights
    more: dict[str, Any] = {} if sent or quantize == "none" else {"quantization_config": _configure_4_bits()}
    if not sent:
        model_folder.check_weight_files(folder)
    try:
        factory = model_folder.import_transformers().AutoModelForCausalLM
        with torch.device("meta"):
            planned: nn.Module = factory.from_config(**settings)
        if sent:
            return planned
        model_folder.check_size(folder, sum(parameter.numel() for parameter in planned.parameters()))
        network, told = factory.from_pretrained(
            str(folder),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are told below
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **settings,
            **more,
        )
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise _explain_load_error(folder, attention, error) from error
    absent = [*told["missing_keys"], *(each[0] for each in told["mismatched_keys"])]
    if absent:
        raise RequestError(
            f"--model-dir {folder}: its weights are not those of its config.json; {pluralize(len(absent), 'tensor')} "
            f"would stay at their initial values: {', '.join(sorted(absent)[:_LISTED])}",
            remedy="the config.json and the weights of one model, with its language-model head",
        )
    return network  # type: ignore[no-any-return]


def _explain_load_error(folder: Path, attention: str, error: Exception) -> RequestError:
    """Return the request's error for one that transformers raised while it built or loaded a model."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    remedy = "a causal language model of transformers"
    if attention == "flash" and isinstance(error, ImportError):
        remedy = "pip install flash-attn, where there is a GPU for it; or --set model.args.attention=sdpa"
    elif attention != "eager" and "attention" in first_line:  # transformers has no type of its own for this
        remedy = "--set model.args.attention=eager"
    return RequestError(f"--model-dir {folder}: {first_line}", remedy=remedy)


def _configure_4_bits() -> Any:
    """NF4 with doubly quantized scales, computing in bfloat16 (Dettmers et al. 2023, QLoRA); not run by any test."""
    if find_spec("bitsandbytes") is None:
        raise RequestError("model.args.quantize 4bit: bitsandbytes is not installed", remedy="pip install bitsandbytes")
    return model_folder.import_transformers().BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
