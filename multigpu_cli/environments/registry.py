"""The environments by name; nothing is imported until one is asked for."""

ENVIRONMENTS = {
    "gym": "multigpu_cli.environments.gym:group",
    "trading": "multigpu_cli.environments.trading.request:group",
}
"""`gym` takes a gymnasium id after a colon: gym:CartPole-v1."""
