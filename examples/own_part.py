"""A capability of one's own, a Part: after each epoch the length of every weight goes into the journal.

CONTRIBUTING.md, "Add a capability", takes it into the program as a room: a file, a setting, a line in capabilities.py.
"""

from multigpu_cli.distributed.world import World
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.run.run import Run


class WeightLengths(Part):
    """Made where its setting is given; what it does not override costs nothing."""

    def __init__(self, spec: RunSpec, world: World) -> None:
        self.is_main = world.is_main

    def epoch_end(self, run: Run) -> None:
        """All ranks come here together, after the epoch's evaluation."""
        lengths = {name: round(float(weight.norm()), 6) for name, weight in run.state.model.named_parameters()}
        run.log.journal.write("weights", step=run.progress.step, lengths=lengths)
        if self.is_main:
            run.log.console.note(f"the longest weight is {max(lengths, key=lengths.__getitem__)}")
