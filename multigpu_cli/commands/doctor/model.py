"""Whether a model fits on one device of this machine, and with which batch size: tried by running it.

A pretrained model whose weights or data are not there yet is not run: what it takes is computed from its config.json.
"""

import tempfile
from collections.abc import Iterator

import torch

from multigpu_cli.commands.doctor.findings import Finding
from multigpu_cli.commands.plan.measure import build_probed
from multigpu_cli.commands.plan.without_weights import FILLED, Outline, outline_training
from multigpu_cli.commands.workers import place_on_one_device
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.monitor.format import format_bytes
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.fit_batch_sizes_to_memory import measure_peak_memory
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.open_data import uses_environments

_GIB = 2.0**30


def check_model(config: Config) -> Iterator[Finding]:
    """Run forward and backward passes of the requested micro-batch, then of larger ones.

    Raises:
        RequestError: the settings can't be carried out at all.
    """
    if uses_environments(config):
        yield Finding("model", "ok", "it acts in environments: there is nothing to try before the first rollouts")
        return
    if outline := outline_training(config):
        yield judge_outline(outline)
        return
    placement = place_on_one_device(config.device)
    world = World(placement.devices[0])
    with tempfile.TemporaryDirectory(prefix="multigpu-doctor-") as folder:
        single = {"num_workers": 0, "multi_gpu": "none"}

        def try_batch(size: object) -> TrainComponents:
            each = replace_settings(config, single | {"batch_size": size, "grad_accum_steps": None})
            components, _ = build_probed(each, placement, world, folder)
            components.loaders.train.close()
            return components

        try:
            if config.batch.size != "auto":
                components = try_batch(config.batch.size)
                yield _judge_batch_size(components, int(config.batch.size))
                if components.world.device.type != "cuda":
                    return
            components = try_batch("auto")
            batches = components.plan.batches
            reason = components.plan.batch_size_reason or "larger ones are no faster here"
            yield Finding("largest batch", "ok", f"--batch-size {batches.micro_batch} a device: {reason}")
        except RequestError:
            raise
        except TrainingError as error:
            yield Finding("model", "fail", error.problem, error.remedy)


def judge_outline(outline: Outline) -> Finding:
    """Whether a pretrained model fits that was not run."""
    memory, rows, capacity, fits = outline.memory, outline.rows, outline.capacity, outline.fits
    kept = f"{format_bytes(memory.activations(rows))} for --batch-size {rows} of {outline.tokens:,} tokens"
    evidence = (
        f"{outline.folder}, {outline.parameters:,} parameters ({outline.trained:,} trained): "
        f"{format_bytes(outline.state_bytes)} for weights, gradients and the optimizer, "
        + (f"activations not counted ({outline.activations})" if outline.activations else kept)
        + f"\ncomputed from config.json, not measured: {outline.reason}"
        + "; the weights are counted whole, which take less in 4 bits" * outline.quantized
    )
    numbers = {"state_bytes": outline.state_bytes, "capacity": capacity, "largest_batch": fits}
    if capacity is None:
        return Finding("model", "not checked", f"no GPU here to compare with: {evidence}", numbers=numbers)
    evidence = f"{evidence}; the GPU has {format_bytes(capacity)}"
    if outline.state_bytes > FILLED * capacity or fits == 0:
        fix = "--multi-gpu fsdp over several GPUs; --adapter lora; a shorter --max-length with --grad-checkpointing"
        return Finding("model", "fail", evidence, fix, numbers)
    if fits is not None and fits < rows:
        fix = f"--batch-size {fits}, with more --grad-accum-steps for the same global batch"
        return Finding("model", "warn", evidence, fix, numbers)
    return Finding("model", "ok", evidence, numbers=numbers)


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
