"""The tasks by name; nothing is imported until one is asked for."""

TASKS = {
    "classification": "multigpu_cli.tasks.classification:Classification",
    "multi-label": "multigpu_cli.tasks.multi_label:MultiLabel",
    "regression": "multigpu_cli.tasks.regression:Regression",
    "language-model": "multigpu_cli.tasks.language_model:LanguageModel",
    "dpo": "multigpu_cli.tasks.dpo:DPO",
    "from-model": "multigpu_cli.tasks.from_model:FromModel",
    "ppo": "multigpu_cli.tasks.ppo.task:PPO",
}
