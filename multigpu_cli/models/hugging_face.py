"""Networks of the transformers library by the name of their architecture, built from a configuration: no download."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.runtime.model_call import Labelled, ModelCall

_LENGTHS = ("n_positions", "max_position_embeddings")  # how configurations call the longest sequence


class NamedInputs(nn.Module):
    """Stands between a transformers network and a task: named or unnamed inputs in, its output object out.

    Args:
        network: a `transformers.PreTrainedModel`, or whatever names its input.
    """

    adapts_call = True

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._input: str = network.main_input_name  # type: ignore[assignment]
        inner: Any = getattr(network, "get_base_model", lambda: network)()  # that of peft
        names = ModelCall.of(network).names + ModelCall.of(inner).names
        self._call = replace(ModelCall.of(network), names=names, takes_any=False)

    def forward(self, inputs: Tensor | Mapping[str, Tensor] | Labelled) -> Any:
        inputs, targets = inputs if isinstance(inputs, Labelled) else (inputs, None)
        named = dict(inputs) if isinstance(inputs, Mapping) else {self._input: inputs}
        if targets is not None:
            named["labels"] = targets
        self._call.check_names(named)  # its **kwargs would pass over them in silence
        return self.network(**named)

    def make_cache(self) -> Any:
        """An empty cache of keys and values, which passes with `past_key_values` fill; None where there is no use."""
        if "past_key_values" not in self._call.names:
            return None
        from transformers import DynamicCache  # late: to generate text only

        return DynamicCache(config=self.network.config)


class Logits(NamedInputs):
    """The same with `.logits` out.

    The network's own `.loss` is a mean over its micro-batch, so it is of no use where several share a step.
    """

    def forward(self, inputs: Tensor | Mapping[str, Tensor] | Labelled) -> Tensor:
        logits: Tensor = super().forward(inputs).logits
        return logits


def build(
    input_shape: tuple[int, ...], num_classes: int, task: str, architecture: str = "gpt2", **settings: Any
) -> nn.Module:
    """A network with fresh weights: for causal language modelling, or for classes of images or sequences.

    Vocabulary, sequence length, image size, channels and number of classes follow from the dataset where the
    architecture has them and `settings` does not say otherwise.

    Args:
        task: language-model, or anything else for classes.
        architecture: as in transformers' model_type: gpt2, llama, bert, vit, resnet, …
        settings: of its configuration, by transformers' own names.

    Raises:
        RequestError: transformers is not installed, or knows no such architecture or setting.
    """
    try:
        import transformers
    except ImportError as missing:
        raise RequestError("--model transformers: it is not installed", remedy="pip install transformers") from missing
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
