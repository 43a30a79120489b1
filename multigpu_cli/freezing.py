"""Parameters that --freeze keeps as they are until an epoch (model.unfreeze_at).

Everything is built, and tried for memory, as if all of them learned: the optimizer has its groups from the start, and
later epochs fit as well as the first. Then they are frozen, and the strategy is built anew without them, so that no
worker computes or sends their gradients; when their epoch begins, once more with them. Which of the two it is follows
from the step alone, on resume too.
"""

from torch import Tensor

from multigpu_cli.errors import pluralize
from multigpu_cli.models.build import find_frozen
from multigpu_cli.run.assembly.assemble import build_strategy
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.batch_size import warm_up
from multigpu_cli.run.part import Part
from multigpu_cli.run.run import Run


class Unfreeze(Part):
    """Lets what --freeze keeps learn from model.unfreeze_at on."""

    _frozen: list[Tensor]

    def fitted(self, components: TrainComponents) -> None:
        """Freeze, unless the run is there already."""
        self._frozen = []
        if components.progress.step < _find_first_step(components):
            self._frozen = find_frozen(components.state.model, components.config.model.freeze)
            components.frozen = {f"frozen until epoch {components.config.model.unfreeze_at}": self._frozen}
            self._set_learning(components, learns=False)

    def epoch_begin(self, run: Run) -> None:
        """Let the frozen parameters learn, if their epoch begins."""
        if not self._frozen or run.progress.step < _find_first_step(run):
            return
        self._set_learning(run, learns=True)
        tensors, self._frozen, run.frozen = self._frozen, [], {}
        numbers = {"tensors": len(tensors), "parameters": sum(tensor.numel() for tensor in tensors)}
        run.log.journal.write("unfreeze", step=run.progress.step, **numbers)
        epoch, what = run.config.model.unfreeze_at, pluralize(len(tensors), "tensor")
        run.log.console.note(f"epoch {epoch}: {what} of --freeze are trained from here on")

    def _set_learning(self, components: TrainComponents, *, learns: bool) -> None:
        """DDP and the exact reduction know the parameters that learn when they are built, and from then on."""
        for parameter in self._frozen:
            parameter.requires_grad_(learns)
        model = components.compiled or components.state.model
        components.strategy = components.strategy.follow_trained(
            lambda: build_strategy(model, components.state.average, components.world, components.spec)
        )
        warm_up(components)


def _find_first_step(components: TrainComponents) -> int:
    """The first optimizer step, counted from 0, in which everything learns."""
    return (int(components.config.model.unfreeze_at or 1) - 1) * components.plan.batches.steps_per_epoch
