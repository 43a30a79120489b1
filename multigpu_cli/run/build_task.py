"""Builds the task: the user's own loss, or a task by name."""

from multigpu_cli.config.schema import Config
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime import factories
from multigpu_cli.tasks.base import Loss, Task
from multigpu_cli.tasks.registry import TASKS


def build_task(config: Config, source: DataSource, criterion: Loss | None = None, *, has_logits: bool = False) -> Task:
    """The user's own loss as a task, else the task that the user named, else the dataset's own.

    Args:
        has_logits: the model is one of transformers.
    """
    if criterion:
        from multigpu_cli.tasks.criterion import Criterion  # late: most losses have a name

        return Criterion(source, config.task, criterion, has_logits=has_logits)
    name = config.task.name or source.task
    factory = factories.find_factory(name, TASKS, flag="--task")
    task = factories.call_factory(factory, {"source": source, "config": config.task}, config.task.args, where="task")
    if not isinstance(task, Task):
        raise RequestError(f"--task {name}: not a subclass of multigpu_cli.tasks.base.Task")
    return task
