"""The pause of a trial at its rung (`tune.pause_at`): a stop at the end of an epoch, after which the run can go on."""

from contextlib import ExitStack

from multigpu_cli.distributed.world import World
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.run.run import Run


class PauseAtRung(Part):
    """Stops a run after an epoch as a signal would, with exit code 75, and keeps a trial from its test split.

    Schedule and warm-up are those of the whole run. A run that is past the epoch already, because it was killed between
    its checkpoint and its end, stops after its next step: it stays on its curve, and the evaluation at the rung counts.
    """

    def __init__(self, spec: RunSpec, world: World) -> None:
        """Schema and rules have checked its setting."""
        self._epoch = int(spec.config.length.pause_at or 0)

    def built(self, components: TrainComponents) -> None:
        """The test split is for the winner of a study, once."""
        if (test := components.loaders.test) is not None:
            test.close()
            components.loaders.test = None

    def start(self, run: Run, stack: ExitStack) -> None:
        """All ranks stop at the same step, without a vote."""
        run.control.pause_at = self._epoch * run.plan.batches.steps_per_epoch
        self._note(run)

    def epoch_end(self, run: Run) -> None:
        self._note(run)

    def _note(self, run: Run) -> None:
        """Stop the run at the rung, and name it as the reason."""
        reached = run.progress.step >= (run.control.pause_at or 0)
        if reached and not run.finished and not run.progress.evaluation_pending:
            run.control.stop.signal = f"tune.pause_at {self._epoch}"
