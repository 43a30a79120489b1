"""The tasks by name; nothing is imported until one is asked for."""

TASKS = {
    "classification": "multigpu_cli.tasks.classification:Classification",
    "language-model": "multigpu_cli.tasks.language_model:LanguageModel",
}
