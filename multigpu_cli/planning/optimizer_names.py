"""The optimizers by name: the rate that suits each, how it scales with the batch, and what can be done with it.

Those of torch.optim that take a step from gradients alone. `rate` is for one batch of 32 samples (--base-lr).
"""

from typing import NamedTuple


class KnownOptimizer(NamedTuple):
    """What is known of an optimizer.

    Attributes:
        class_name: in torch.optim.
        rate: the learning rate that suits the base batch.
        scaling: how the rate grows with the global batch: linear, sqrt or none.
        needs_whole_weights: its step on some rows of a weight is not that of its step on the whole.
    """

    class_name: str
    rate: float
    scaling: str
    needs_whole_weights: bool = False


OPTIMIZERS: dict[str, KnownOptimizer] = {
    "adamw": KnownOptimizer("AdamW", 1e-3, "sqrt"),
    "sgd": KnownOptimizer("SGD", 0.1, "linear"),
    "adam": KnownOptimizer("Adam", 1e-3, "sqrt"),
    "nadam": KnownOptimizer("NAdam", 2e-3, "sqrt"),
    "radam": KnownOptimizer("RAdam", 1e-3, "sqrt"),
    "adamax": KnownOptimizer("Adamax", 2e-3, "sqrt"),
    "rmsprop": KnownOptimizer("RMSprop", 1e-3, "sqrt"),
    "adagrad": KnownOptimizer("Adagrad", 0.01, "none"),
    "adadelta": KnownOptimizer("Adadelta", 1.0, "none"),
    "adafactor": KnownOptimizer("Adafactor", 0.01, "none", needs_whole_weights=True),
    "muon": KnownOptimizer("Muon", 1e-3, "sqrt", needs_whole_weights=True),
}
"""Rates: Goyal et al. 2017 for sgd (0.1 for 256 samples there), Hinton's lecture 6e for rmsprop, torch's own defaults
for the others; muon's steps are as large as AdamW's (Liu et al. 2025). Scaling: linear by Goyal et al. 2017; square
root by Malladi et al. 2022, who derive it for Adam and RMSprop; none where no rule is published."""

REFUSED = {
    "lbfgs": "it evaluates the loss several times in a step (a closure), and a step here has one gradient",
    "sparseadam": "it takes sparse gradients only, and gradients here are dense",
    "rprop": "it takes the learning rate in its first step only, so that no schedule reaches it; try rmsprop",
    "asgd": "torch evaluates nothing with its averaged weights; try sgd with --ema",
}
"""Names of torch.optim that are no choice here, each with the reason."""


def find_rate(name: str) -> float | None:
    """The learning rate that suits the base batch; None for an optimizer of the user's own."""
    return OPTIMIZERS[name].rate if name in OPTIMIZERS else None


def find_scaling(name: str) -> str:
    """How the rate scales with the batch: linear, sqrt, or none where no rule is known."""
    return OPTIMIZERS[name].scaling if name in OPTIMIZERS else "none"
