"""What the worker script and its test agree on."""

from typing import NamedTuple

WORKERS = (1, 2, 3, 4)
STEPS = 50
FEWER = 4  # in double precision: two epochs, too
SHAPES = {"own": "[6]", "mlp": "[6]", "convnet": "[2, 8, 8]", "har-convnet": "[3, 32]", "resnet18": "[3, 8, 8]"}


class Case(NamedTuple):
    """A run.

    Attributes:
        network: one of SHAPES.
        normed: with BatchNorm, where there is a choice.
        double: in double precision.
        samples, global_batch, batch: how an epoch is cut.
    """

    network: str
    normed: bool = True
    double: bool = False
    samples: int = 60
    global_batch: int = 26
    batch: int = 4
    optimizer: str = "adamw"

    @property
    def steps(self) -> int:
        """In single precision BatchNorm lets rounding grow with each step, so only the first one is compared."""
        return FEWER if self.double else STEPS if self.network == "mlp" else 1


UNEVEN = {"samples": 60, "global_batch": 26, "batch": 4}  # 7 micro-batches, one of them short; the last step has 2
IDLE = {"samples": 26, "global_batch": 12, "batch": 6}  # 2 micro-batches for up to 4 workers; the last step has 1

CASES = {
    f"{network}{'' if normed else '-plain'}-{cut}-{'double' if double else 'single'}": Case(
        network, normed, double, optimizer="sgd" if cut == "idle" else "adamw", **shape
    )
    for network, normed in (
        ("own", True),
        ("own", False),
        ("mlp", True),
        ("convnet", True),
        ("har-convnet", True),
        ("resnet18", True),
    )
    for cut, shape in (("uneven", UNEVEN), ("idle", IDLE))
    for double in (False, True)
    if cut == "uneven" or (double and network != "resnet18")
}
