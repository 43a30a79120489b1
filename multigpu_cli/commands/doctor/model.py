"""Whether a model fits on one device of this machine, and with which batch: by running it there."""

import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import torch

from multigpu_cli.commands.doctor.findings import Finding
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.run.batch_size_finder import fit_batch_sizes_to_memory, measure_peak_memory
from multigpu_cli.run.build import build_components
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.resolve_spec import resolve_spec
from multigpu_cli.runtime.device_placement import choose_placement, count_cores, count_visible_gpus
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.open_data import uses_environments

_GIB = 2.0**30


def check_model(config: Config) -> Iterator[Finding]:
    """Forward and backward passes of the micro-batch that is asked for, then of larger ones.

    Raises:
        RequestError: the settings can't be carried out at all.
    """
    if uses_environments(config):
        yield Finding("model", "ok", "it acts in environments: nothing to try before there are rollouts")
        return
    alone = replace(config.device, multi_gpu="none", nproc_per_node=None)
    placement = choose_placement(alone, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=None)
    world = World(placement.devices[0])
    with tempfile.TemporaryDirectory(prefix="multigpu-doctor-") as folder:
        config = replace_settings(
            config, {"save_dir": folder, "resume": "never", "num_workers": 0, "multi_gpu": "none"}
        )

        def tried(size: object) -> TrainComponents:
            each = replace_settings(config, {"batch_size": size, "grad_accum_steps": None})
            components = build_components(resolve_spec(each, placement, world), world)
            with closing(components.loaders.train):
                fit_batch_sizes_to_memory(components)
                return components

        try:
            if config.batch.size != "auto":
                components = tried(config.batch.size)
                yield _judge_batch_size(components, int(config.batch.size))
                if components.world.device.type != "cuda":
                    return
            components = tried("auto")
            batches = components.plan.batches
            reason = components.plan.batch_size_reason or "the largest that is of use here"
            yield Finding("largest batch", "ok", f"--batch-size {batches.micro_batch} a device: {reason}")
        except RequestError:
            raise
        except TrainingError as error:
            yield Finding("model", "fail", error.problem, error.remedy)


def _judge_batch_size(components: TrainComponents, size: int) -> Finding:
    parameters = sum(p.numel() for p in components.state.model.parameters())
    evidence = f"{components.spec.model}, {parameters:,} parameters"
    device = components.world.device
    fits = components.plan.batches.micro_batch
    if fits < size:
        fix = f"--batch-size {fits}, with more --grad-accum-steps for the same global batch"
        return Finding("model", "warn", f"{evidence}: --batch-size {size} does not fit, {fits} does", fix)
    if device.type != "cuda":
        return Finding("model", "ok", f"{evidence}: --batch-size {size} runs on the CPU; no GPU to try it on")
    peak, total = measure_peak_memory(components), torch.cuda.get_device_properties(device).total_memory
    return Finding("model", "ok", f"{evidence}: --batch-size {size} takes {peak / _GIB:.2f} of {total / _GIB:.0f} GiB")
