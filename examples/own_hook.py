"""A hook that notes which weights have the largest gradients, and goes on counting after a restart.

python main_multi_gpu.py --hook own_hook:GradientNotes
"""

from typing import Any


class GradientNotes:
    ranks = 0  # the default; "all" and (0, 1) are others
    every = 3  # steps between two calls of after_backward and step_end
    budget_ms = 50  # a call that takes longer is warned about, once

    def __init__(self, file: str = "gradients.txt") -> None:  # --set 'hook.args.GradientNotes={file: other.txt}'
        self.file, self.count = file, dict[str, int]()

    def after_backward(self, numbers: Any, tensors: Any) -> None:  # the gradients by name: look, don't change
        largest = max(tensors, key=lambda name: tensors[name].abs().max().item())
        self.count[largest] = self.count.get(largest, 0) + 1

    def epoch_end(self, numbers: Any) -> None:
        with open(self.file, "a") as file:
            print(numbers.epoch, f"{numbers.metrics['val_loss']:.4f}", self.count, file=file)

    def state_dict(self) -> dict[str, Any]:  # goes into each checkpoint
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
