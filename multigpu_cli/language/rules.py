"""The settings that an adapter needs, and those that it does not go together with."""

from collections.abc import Iterator

from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.errors import RequestError

_OWN = [key for key, entry in SETTINGS.items() if entry.section == "adapter" and key != "adapter"]
KEYS = " ".join(["data", "model", "model.args", "adapter", "multi_gpu", *_OWN])
"""The keys that the rule reads."""


def find_adapter_errors(config: Config) -> Iterator[RequestError]:
    """An adapter without a pretrained model, and settings of an adapter without one."""
    kind, pretrained = config.adapter.kind, is_pretrained(config)
    if pretrained and config.model.args.get("quantize", "none") != "none":
        yield from _find_quantization_errors(config)
    if kind == "none":
        for key in [key for key in _OWN if config.get(key) != SETTINGS[key].default]:
            yield RequestError(
                f"{key}: there is no adapter that reads it", remedy=f"--adapter lora, or leave out {key}"
            )
    elif not pretrained:
        yield RequestError(
            f"--adapter {kind} without --model pretrained: an adapter learns beside weights that have been trained",
            remedy="--model pretrained --model-dir DIR; or --freeze for parts of another network",
        )


def is_pretrained(config: Config) -> bool:
    """Whether the model is --model pretrained, which is also that of --data chat where none is named."""
    return config.model.name == "pretrained" or (config.model.name is None and config.data.name == "chat")


def _find_quantization_errors(config: Config) -> Iterator[RequestError]:
    if config.adapter.kind == "none":
        yield RequestError("model.args.quantize: weights in 4 bits can't learn", remedy="--adapter lora beside them")
    if config.device.multi_gpu == "fsdp":
        yield RequestError("model.args.quantize: not with --multi-gpu fsdp yet", remedy="--multi-gpu ddp")
