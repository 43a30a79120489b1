"""What a run learns beside: what its checkpoints record of the pretrained model, and whether that is still the same."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from multigpu_cli.config.schema import Config
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.errors import RequestError, combine_errors
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.part import Part
from multigpu_cli.run.spec import RunSpec
from multigpu_cli.runtime.model_folder import find_model_folder, hash_weights
from multigpu_cli.runtime.raise_on_all_ranks import run_on_main_rank
from multigpu_cli.runtime.world import World

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
        self._note = f"{words}: {counts[True]:,} parameters learn, {counts[False]:,} stay{compared}"

    def plan_notes(self) -> dict[str, str | list[str]]:
        return {"adapter": self._note}

    def fitted(self, components: TrainComponents) -> None:
        """Note which weights the adapter learns beside, once: their files may go."""
        spec = components.spec
        base = run_on_main_rank(self._world, lambda: describe_base(spec.config, spec.source))
        components.spec = replace(spec, base=base)


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
