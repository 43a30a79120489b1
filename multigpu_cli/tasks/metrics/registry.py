"""The built-in metrics by name; nothing is imported until one is asked for."""

METRICS = {
    "macro_accuracy": "multigpu_cli.tasks.metrics.builtin:MacroAccuracy",
    "macro_f1": "multigpu_cli.tasks.metrics.builtin:MacroF1",
    "top5_accuracy": "multigpu_cli.tasks.metrics.builtin:compute_top5",
    "auroc": "multigpu_cli.tasks.metrics.builtin:AUROC",
    "r2": "multigpu_cli.tasks.metrics.builtin:R2",
}
