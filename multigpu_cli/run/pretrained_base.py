"""What a run learns beside: what its checkpoints record of the pretrained model, and whether that is still the same."""

from collections.abc import Mapping

from multigpu_cli.config.schema import Config
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.errors import RequestError, combine_errors
from multigpu_cli.runtime.model_folder import find_model_folder, hash_weights

_OTHER = {"weights": "other weights", "tokenizer": "another tokenizer", "template": "another chat template"}


def describe_base(config: Config, source: DataSource) -> dict[str, str]:
    """SHA-256 of the weights beside which an adapter learns, and of the tokenizer; and the chat template's text.

    The weights are read once in a process, however often this is called.
    """
    if config.adapter.kind == "none":
        return dict(source.text_model)
    return {"weights": hash_weights(find_model_folder(config.model.dir))} | dict(source.text_model)


def check_base(before: Mapping[str, str], config: Config, source: DataSource, origin: str) -> None:
    """Compare with what a checkpoint has recorded, as far as it has; an older version recorded nothing.

    Args:
        origin: the run folder or file that has the record.

    Raises:
        RequestError: names what differs.
    """
    now = describe_base(config, source) if before else {}
    differing = [
        RequestError(
            f"--model-dir {config.model.dir} has {_OTHER.get(name, name)} than {origin} was started with",
            remedy="--model-dir with the folder of that very model; or a new run with another --save-dir",
        )
        for name in now
        if before.get(name, now[name]) != now[name]
    ]
    if differing:
        raise combine_errors(differing)
