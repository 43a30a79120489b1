"""The experiment loggers by name; nothing is imported until one is asked for."""

LOGGERS = {
    "mlflow": "multigpu_cli.monitor.loggers.mlflow_logger:MLflowLogger",
    "wandb": "multigpu_cli.monitor.loggers.wandb_logger:WandbLogger",
}

PACKAGES = {"mlflow": "mlflow", "wandb": "wandb"}
"""The package that each needs, which is also the name of the extra."""
