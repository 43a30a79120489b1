"""`FaultToleranceManager`: what an error means, and what is done about it."""

from typing import Any

from multigpu_cli.api.gpu_info import clear_gpu_memory
from multigpu_cli.api.trainers import MultiGPUTrainer
from multigpu_cli.faults.diagnose import remedy_for
from multigpu_cli.runtime.out_of_memory import is_out_of_memory


class FaultToleranceManager:
    """Says what an error of a training step means.

    It does not continue after an error: a failed step leaves replicas that differ, or half of a gradient. The engine
    itself survives running out of memory, with smaller micro-batches.

    Attributes:
        errors: what was handled, as dicts with error, kind and remedy.
    """

    def __init__(self, trainer: MultiGPUTrainer | None = None) -> None:
        self.trainer = trainer
        self.errors: list[dict[str, Any]] = []

    def handle_error(self, error: BaseException) -> dict[str, Any]:
        """Note the error, free cached memory after a lack of it, and raise it again with what can be done as a note.

        Raises:
            BaseException: the same error, always; the run's last checkpoint is whole, and the same script goes on
                from there where it has a save_dir.
        """
        remedy = remedy_for(error) if isinstance(error, Exception) else ""
        self.errors.append({"error": str(error), "kind": type(error).__name__, "remedy": remedy})
        if is_out_of_memory(error):
            clear_gpu_memory()
        folder = self.trainer.run.folder if self.trainer and self.trainer.run else None
        if folder:
            error.add_note(f"the run goes on from its last checkpoint with save_dir={str(folder)!r}")
        if remedy:
            error.add_note(f"try: {remedy}")
        raise error
