"""A model as transformers keeps it: a folder with its configuration, weights and tokenizer. No download, no code."""

import json
import re
from functools import cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, NamedTuple

from multigpu_cli.config.regular_files import read_small, refuse_special_file
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.factories import import_extra

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_KINDS_OF_TEXT = (
    "  The cat's 12,345 naïve \ufb01sh\u00a0— ÅÇ e\u0301\r\n\n\tf(x) = x**2 # 中文 日本語 Привет 🙂 <s></s> "
)
_COUNTS = re.compile("(layers?|blocks|depth|stages|experts)$")  # how configurations call what is built in a loop
_MOST = 4096  # layers; the deepest models have hundreds
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def find_model_folder(name: str | None) -> Path:
    """The folder that --model-dir names: a folder, or a model of that name in Hugging Face's cache on this machine."""
    if name is None:
        raise RequestError("--model-dir is missing", remedy="the folder of a Hugging Face model")
    folder = Path(name)
    if not folder.is_dir():
        folder = _find_cached(name)
    if not (folder / "config.json").is_file():
        raise RequestError(f"--model-dir {name}: there is no config.json in it", remedy=_suggest_model(folder))
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):  # all that transformers may read
        refuse_special_file(file, "--model-dir")
    return folder


def _suggest_model(folder: Path) -> str:
    """What may have been meant by a folder without a model."""
    if (folder / "adapter_config.json").is_file():
        return f"an adapter's folder is for --init-from {folder}; --model-dir is its base model"
    if (folder / "journal.jsonl").is_file():
        return f"a run becomes a model by: multigpu export {folder} --to DIR --format hf (or merged, of an adapter)"
    if len(found := sorted(folder.glob("*/config.json"))) == 1:
        return f"--model-dir {found[0].parent}"
    return "a folder as transformers' save_pretrained writes"


class TextModel(NamedTuple):
    """A model of text without its weights: transformers' config and tokenizer, and the tokens that end generation."""

    config: Any
    tokenizer: Any
    ends: tuple[int, ...]


def find_places(config: Any) -> int | None:
    """Tokens of the longest text that a model knows places for; None: its configuration names no such number."""
    places = getattr(config.get_text_config(), "max_position_embeddings", None)
    return places if isinstance(places, int) and places > 0 else None


def load_text_model(folder: Path) -> TextModel:
    """What text is turned into tokens with, and what the model makes of them."""
    config, tokenizer = load_config(folder), _load_tokenizer(folder)
    listed = _read_json(folder / "generation_config.json").get("eos_token_id")
    ends = (tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed]))
    return TextModel(config, tokenizer, tuple(sorted({token for token in ends if isinstance(token, int)})))


def load_config(folder: Path) -> Any:
    """The configuration; a cache of keys and values is off: it helps generation only. Code in the folder is not run."""
    transformers = import_transformers()
    from huggingface_hub import errors  # late: transformers needs it

    invalid = getattr(errors, "StrictDataclassError", ValueError)  # since 0.30
    _check_counts(folder / "config.json", _read_json(folder / "config.json"))
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, invalid) as error:
        own = "auto_map" in _read_json(folder / "config.json")
        raise RequestError(
            f"--model-dir {folder}: {_first_line(error)}",
            remedy="an architecture that is part of transformers: code that comes with a model is not run"
            if own
            else f"the config.json of the model as it was; transformers here is {transformers.__version__}; a newer "
            "one may know it",
        ) from error
    config.use_cache = False
    return config


def _check_counts(path: Path, config: dict[str, Any]) -> None:
    """Refuse a configuration, or one inside it, with more layers than any model has: they would be built for days."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_counts(path, value)
        elif isinstance(value, int | float) and value > _MOST and _COUNTS.search(name):
            raise RequestError(f"{path}: {name} is {value}, at most {_MOST}", remedy="download the model again")


def check_size(folder: Path, count: int) -> None:
    """Refuse a configuration of `count` parameters if its weight files are too small, before memory is taken for it."""
    size = sum((folder / name).stat().st_size for name in _list_weight_files(folder))
    if count > 2 * size:  # no format has more than two weights in a byte
        problem = f"--model-dir {folder}: config.json describes {count:,} parameters, the weights have {size:,} bytes"
        raise RequestError(problem, remedy="the config.json and the weights of one model")


def _load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer; RequestError if it can't be read, or can't return the offsets of its tokens in the text."""
    try:
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, KeyError) as error:
        raise RequestError(
            f"--model-dir {folder}: its tokenizer can't be read ({_first_line(error)})",
            remedy="copy tokenizer.json and tokenizer_config.json of the model into it",
        ) from error
    if not tokenizer.is_fast:
        problem = f"--model-dir {folder}: the tokenizer has no tokenizer.json"
        raise RequestError(problem, remedy="AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one")
    return tokenizer


def describe_tokenizer(tokenizer: Any, template: str | None) -> dict[str, str]:
    """What turns text into tokens, as checkpoints record it: a SHA-256, and the text of the chat template.

    The sum is over vocabulary, scores, merges, special tokens and what becomes of a text with all kinds of characters.
    That is the same in each version of the libraries, while their files and their own text of a tokenizer are not.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", ())]
    scores = model["vocab"] if isinstance(model.get("vocab"), list) else ()
    special = sorted((name, str(value)) for name, value in tokenizer.special_tokens_map.items())
    parts = (sorted(tokenizer.get_vocab().items()), scores, merges, special, tokenizer(_KINDS_OF_TEXT)["input_ids"])
    return {
        "tokenizer": sha256(repr(parts).encode()).hexdigest(),
        "template": template or tokenizer.chat_template or "",
    }


def hash_weights(folder: Path) -> str:
    """SHA-256 of the file with the weights; of several files, of their names and sums."""
    check_weight_files(folder)
    sums = {name: _hash_file(folder / name, (folder / name).stat().st_mtime_ns) for name in _list_weight_files(folder)}
    lines = "".join(f"{each}  {name}\n" for name, each in sums.items())
    return sums[_WEIGHTS] if list(sums) == [_WEIGHTS] else sha256(lines.encode()).hexdigest()


@cache
def _hash_file(path: Path, changed: int) -> str:
    """Read once in a process, for as long as the file has not been changed."""
    with open(path, "rb") as content:
        return file_digest(content, "sha256").hexdigest()


def _list_weight_files(folder: Path) -> list[str]:
    if not (folder / _INDEX).is_file():
        return [_WEIGHTS]
    places = _read_json(folder / _INDEX).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else [places]
    if strange := [name for name in names if not re.fullmatch(r"[^/\\]+\.safetensors", str(name))]:
        raise RequestError(
            f"--model-dir {folder}: {_INDEX} names {strange[0]!r}, which is no .safetensors file in the same folder",
            remedy="download the model again",
        )
    return sorted({str(name) for name in names})


def has_weights(folder: Path) -> bool:
    """Whether there are weights, whole or not, in whatever form."""
    return (folder / _INDEX).is_file() or any(any(folder.glob(pattern)) for pattern in ("*.safetensors", *_PICKLED))


def check_weight_files(folder: Path) -> None:
    """Refuse a folder without all of its weights as safetensors."""
    if (folder / _INDEX).is_file():
        shards = _list_weight_files(folder)
        if missing := [shard for shard in shards if not (folder / shard).is_file()]:
            problem = f"--model-dir {folder}: {missing[0]} is missing, {len(missing)} of {len(shards)} shards in all"
            raise RequestError(problem, remedy="download the model again, whole")
    elif not (folder / _WEIGHTS).is_file():
        pickled = next((file.name for pattern in _PICKLED for file in folder.glob(pattern)), None)
        raise RequestError(
            f"--model-dir {folder}: "
            + (f"{pickled} is a pickle, which may run code" if pickled else f"there is no {_WEIGHTS} in it"),
            remedy="the same model as safetensors: save_pretrained(…) writes it",
        )
    for name in _list_weight_files(folder):
        _check_whole(folder, name)


def _check_whole(folder: Path, name: str) -> None:
    """Compare a file's size with what its header says; the weights are not read."""
    from safetensors import SafetensorError, safe_open  # late: without it there is no pretrained model

    try:
        with safe_open(folder / name, framework="pt"):
            pass
    except SafetensorError as error:
        remedy = "download that file again; where git-lfs left a pointer, git lfs pull"
        raise RequestError(f"--model-dir {folder}: {name} is incomplete ({error})", remedy=remedy) from error


def import_transformers() -> Any:
    """Return the library transformers; raise RequestError if it is not installed."""
    remedy = "pip install 'multigpu-cli[hugging-face]' (in a checkout: pip install -e '.[hugging-face]')"
    transformers = import_extra("transformers", "transformers is not installed", remedy)
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _find_cached(name: str) -> Path:
    """The folder of a model's files in Hugging Face's cache."""
    refused = RequestError(
        f"--model-dir {name}: no such folder, and no such model in Hugging Face's cache; nothing is downloaded",
        remedy="the folder of the model; or download it before: hf download " + name,
    )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as missing:
        raise refused from missing
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise refused from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing or has no object; RequestError if it is not JSON."""
    try:
        found = json.loads(read_small(path.resolve()))  # Hugging Face's cache has links to its files
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError, OSError) as error:
        raise RequestError(f"{path}: not JSON ({error})", remedy="download the model again") from error
    return found if isinstance(found, dict) else {}


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
