"""One device does all the work."""

from multigpu_cli.strategies.base import Strategy


class Single(Strategy):
    """One process, one device."""

    name = "single"
