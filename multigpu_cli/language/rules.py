"""The rules of pretrained models, chats, adapters and prompts: what each needs, and what reads it."""

from collections.abc import Iterator
from pathlib import Path

from multigpu_cli.capabilities import FILES
from multigpu_cli.config.paths import suggest_path
from multigpu_cli.config.rules import Rule
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.errors import RequestError

_OWN = [key for key, entry in SETTINGS.items() if entry.section == "adapter" and key != "adapter"]


def _adapter(config: Config) -> Iterator[RequestError]:
    """An adapter without a pretrained model, and settings of an adapter without one."""
    kind, pretrained = config.adapter.kind, is_pretrained(config)
    if pretrained and config.model.args.get("quantize", "none") != "none":
        if kind == "none":
            yield RequestError("model.args.quantize: 4-bit weights can't be trained", remedy="add --adapter lora")
        if config.device.multi_gpu == "fsdp":
            yield RequestError("model.args.quantize can't be used with --multi-gpu fsdp yet", remedy="--multi-gpu ddp")
    if kind == "none":
        for key in [key for key in _OWN if config.get(key) != SETTINGS[key].default]:
            yield RequestError(
                f"{key}: it has no effect without --adapter", remedy=f"--adapter lora, or leave out {key}"
            )
    elif not pretrained:
        yield RequestError(
            f"--adapter {kind} without --model pretrained: an adapter needs pretrained weights",
            remedy="--model pretrained --model-dir DIR; or --freeze for parts of another network",
        )


def is_pretrained(config: Config) -> bool:
    """Whether the model is --model pretrained, which is also that of --data chat where none is named."""
    return config.model.name == "pretrained" or (config.model.name is None and config.data.name == "chat")


def _pretrained(config: Config) -> Iterator[RequestError]:
    chat, pretrained = config.data.name == "chat", config.model.name == "pretrained"
    if (chat or pretrained) and config.model.dir is None:
        what = "--data chat" if chat else "--model pretrained"
        found, place = chat and config.data.dir is not None, Path(config.data.dir or "")
        plain = {
            ".parquet": f"multigpu data convert {place} --to {place.stem} and --data arrow --data-dir {place.stem}",
            ".json": f"--data jsonl, of one record in each line (jq -c '.[]' {place} > {place.stem}.jsonl)",
        }
        yield RequestError(
            f"--data-dir {place}: --data chat, which {', '.join(FILES['chat'])} files mean, is conversations or texts "
            "for a language model, and needs --model-dir"
            if found
            else f"{what} without --model-dir",
            remedy="--model-dir with the folder of a Hugging Face model"
            + (f"; for plain records {plain.get(place.suffix.lower(), '--data jsonl')}" if found else ""),
        )
    if config.model.dir is not None and not (chat or pretrained):
        problem = f"--model-dir {config.model.dir}: only --model pretrained and --data chat use it"
        yield RequestError(problem, remedy="--model pretrained; or --init-from for weights alone")
    for key in ("max_length", "packing", "prompts", "sample_every"):
        if config.get(key) not in (SETTINGS[key].default, "on") and not chat:  # "on" was a default
            flag = "--" + key.replace("_", "-")
            yield RequestError(f"{flag}: only --data chat uses it", remedy=f"leave out {flag}")


def _mixture(config: Config) -> Iterator[RequestError]:
    if any(entry["data"] == "chat" for entry in config.data.mix):
        yield RequestError("data.mix: chat can't be mixed", remedy="one train.jsonl with the conversations of all")


def _prompts(config: Config) -> Iterator[RequestError]:
    if config.log.prompts is None:
        return
    path = Path(config.log.prompts)
    if path.suffix not in (".jsonl", ".txt"):
        yield RequestError(
            f"--prompts {path}: must end in .jsonl or .txt", remedy="a .txt file with a prompt in each line"
        )
    elif not path.is_file():
        near = suggest_path(path, folders=False)
        yield RequestError(
            f"--prompts {path}: there is no such file", remedy=near or "a .jsonl or .txt file of prompts"
        )


RULES = (
    Rule("data model model_dir max_length packing prompts sample_every", _pretrained),
    Rule(" ".join(["data", "model", "model.args", "adapter", "multi_gpu", *_OWN]), _adapter),
    Rule("data.mix", _mixture),
    Rule("prompts", _prompts),
)
