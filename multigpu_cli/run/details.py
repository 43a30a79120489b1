"""What was found out and chosen beside the plan: for --verbose."""

import platform

import torch

from multigpu_cli.errors import counted
from multigpu_cli.run.parts import Run
from multigpu_cli.runtime.aside import log_of


def rows(run: Run) -> list[tuple[str, str]]:
    """Label and value of each line; called by every rank, once its run has begun."""
    settled, world, config = run.settled, run.world, run.config
    parameters = list(run.kept.model.parameters())
    trained = sum(each.numel() for each in run.trained)
    count = sum(each.numel() for each in parameters)
    size = sum(each.numel() * each.element_size() for each in parameters) / 2**20
    splits = {"training": run.train, "validation": run.val, "test": run.test}
    samples = ", ".join(f"{loader.size:,} {name}" for name, loader in splits.items() if loader is not None)
    found = [
        ("versions", f"torch {torch.__version__}, Python {platform.python_version()}"),
        ("model", f"{settled.model}: {count:,} parameters, {trained:,} trained, {size:.1f} MiB"),
        ("samples", f"{samples}; {run.train.where}; evaluated in batches of {run.eval_batch}"),
        ("optimizer", f"{type(run.kept.optimizer).__name__}, {counted(len(run.trained), 'tensor')}"),
        ("checkpoints", f"every {config.checkpoint.every or 'epoch'}, {config.checkpoint.keep} are kept"),
    ]
    if world.size > 1:
        cap = config.communication.bucket_cap_mb
        buckets = f", buckets of {cap:g} MiB" if isinstance(cap, (int, float)) else ""
        found.append(("gradients", f"{torch.distributed.get_backend()}{buckets}"))
        first, last = log_of(run.folder / "logs", 1), log_of(run.folder / "logs", world.size - 1)
        found.append(("other ranks", f"print to {first}" + (f" … {last.name}" if world.size > 2 else "")))
    return found
