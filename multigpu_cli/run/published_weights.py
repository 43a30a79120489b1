"""Puts the weights that are evaluated and published into the model, where those that take steps are others."""

from collections.abc import Iterator
from contextlib import contextmanager

from multigpu_cli.run.run import Run
from multigpu_cli.runtime.schedule_free import eval_weights, is_schedule_free


@contextmanager
def use_published_weights(run: Run) -> Iterator[None]:
    """The model has the weights that are evaluated and published; those of a schedule-free optimizer are others.

    A checkpoint in flight copies the weights that take steps first.
    """
    if is_schedule_free(run.state.optimizer):
        run.checkpointer.writer.wait_for_staging()
    with eval_weights(run.state.optimizer):
        yield
