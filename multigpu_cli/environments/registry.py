"""The built-in environments by name; a module is imported when its environment is requested."""

ENVIRONMENTS = {
    "gym": "multigpu_cli.environments.gym:group",
    "trading": "multigpu_cli.environments.trading.request:group",
}
"""`gym` takes a gymnasium id after a colon: gym:CartPole-v1."""
