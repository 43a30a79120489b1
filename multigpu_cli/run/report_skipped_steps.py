"""Reports steps that were skipped for a non-finite gradient, and ends a run that has too many of them."""

from multigpu_cli.errors import TrainingError, pluralize
from multigpu_cli.run.run import Run


def report_skipped_steps(run: Run) -> None:
    """Journal the steps that were skipped since the last call.

    Raises:
        TrainingError: too many, or any with --nonfinite stop; or workers ran different blocks of a sharded model.
    """
    skipped = run.observer.nonfinite.read()
    if not skipped:
        return
    run.strategy.check_passes()
    samples = _list_samples(run, skipped[-1])
    last = f"last in step {skipped[-1] + 1}, of samples {_first_samples(samples)}"
    text = f"{pluralize(len(skipped), 'step')} skipped: the gradient was NaN or infinite, {last}"
    run.log_fault("nonfinite", text, samples=samples)
    try:
        run.observer.nonfinite.check_may_continue(skipped)
    except TrainingError as error:
        error.problem += f", of samples {_first_samples(samples)}"
        raise


def _list_samples(run: Run, step: int) -> list[int]:
    """The sample numbers of a step's global batch: the same on every rank, without communication."""
    batches = run.plan.batches
    epoch, in_epoch = divmod(step, batches.steps_per_epoch)
    order = run.loaders.train.sample_order(epoch)
    first = in_epoch * batches.global_batch
    return [int(number) for number in order[first : first + batches.num_samples(in_epoch)]]


def _first_samples(samples: list[int]) -> str:
    return ", ".join(map(str, samples[:8])) + (" …" if len(samples) > 8 else "")
