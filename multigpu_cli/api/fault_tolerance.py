"""`FaultToleranceManager`: explains an error of a training step."""

from typing import Any

from multigpu_cli.api.gpu_info import clear_gpu_memory
from multigpu_cli.api.trainers import MultiGPUTrainer
from multigpu_cli.faults.interpret_error import remedy_for
from multigpu_cli.runtime.out_of_memory import is_out_of_memory


class FaultToleranceManager:
    """Explains an error of a training step.

    Training does not continue after it: a failed step leaves replicas that differ, or an incomplete gradient. The
    engine itself survives a lack of memory, with smaller micro-batches.

    Attributes:
        errors: what was handled, as dicts with error, kind and remedy.
    """

    def __init__(self, trainer: MultiGPUTrainer | None = None) -> None:
        self.trainer = trainer
        self.errors: list[dict[str, Any]] = []

    def handle_error(self, error: BaseException) -> dict[str, Any]:
        """Record the error, free cached memory after a lack of it, and raise it again with the remedy as a note.

        Raises:
            BaseException: the same error, always; a script with a save_dir resumes from the last checkpoint.
        """
        remedy = remedy_for(error) if isinstance(error, Exception) else ""
        self.errors.append({"error": str(error), "kind": type(error).__name__, "remedy": remedy})
        if is_out_of_memory(error):
            clear_gpu_memory()
        folder = self.trainer.run.folder if self.trainer and self.trainer.run else None
        if folder:
            error.add_note(f"save_dir={str(folder)!r} resumes the run from its last checkpoint")
        if remedy:
            error.add_note(f"try: {remedy}")
        raise error
