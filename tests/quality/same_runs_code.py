"""Code of a user, for the runs of same_runs.py: nothing of the package is imported, so it runs on any version."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def dataset(split: str, seed: int) -> TensorDataset:
    inputs = torch.randn(600, 8, generator=torch.Generator().manual_seed(seed + len(split)))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def network(input_shape: tuple[int, ...], num_classes: int, width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[0], width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, num_classes))


class Notes:
    """A hook with a state: what it is told and has seen so far, a line a call."""

    ranks = "all"
    every = 2
    budget_ms = 60_000

    def __init__(self) -> None:
        self.seen = 0.0

    def _write(self, name: str, numbers: Any) -> None:
        told = [numbers.step, numbers.epoch, numbers.samples, numbers.learning_rate, numbers.loss, numbers.grad_norm]
        with open(f"notes-{numbers.rank}.jsonl", "a") as file:
            print(json.dumps([name, self.seen, dict(numbers.metrics or {}), *told]), file=file)

    def start(self, numbers: Any) -> None:
        self._write("start", numbers)

    def after_backward(self, numbers: Any, tensors: Any) -> None:
        self.seen += sum(float(tensor.abs().sum()) for tensor in tensors.values())
        self._write("after_backward", numbers)

    def step_end(self, numbers: Any, tensors: Any) -> None:
        self.seen += sum(float(tensor.abs().sum()) for tensor in tensors.values())
        self._write("step_end", numbers)

    def evaluated(self, numbers: Any) -> None:
        self._write("evaluated", numbers)

    def epoch_end(self, numbers: Any) -> None:
        self._write("epoch_end", numbers)

    def end(self, numbers: Any) -> None:
        self._write("end", numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric with one value for each sample: by how much the true class leads the mean of all."""
    return outputs.gather(1, targets.unsqueeze(1)).squeeze(1) - outputs.mean(1)


class Kappa:
    """A metric from sums over a split: Cohen's kappa."""

    def __init__(self, num_classes: int) -> None:
        self.classes = num_classes

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.bincount(targets * self.classes + outputs.argmax(1), minlength=self.classes**2)

    def compute(self, sums: Tensor) -> Tensor:
        shares = sums.view(self.classes, self.classes).double() / sums.sum()
        by_chance = shares.sum(0) @ shares.sum(1)
        return (shares.trace() - by_chance) / (1 - by_chance)


class Spread:
    """A metric that sees the batches in the order of the samples: the standard deviation of the outputs."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.outputs.append(outputs)

    def compute(self) -> Tensor:
        return torch.cat(self.outputs).double().std()


class Lines:
    """A logger that notes the names of the numbers it gets of each step."""

    def open(self, run_id: str, config: dict[str, Any]) -> None:
        self.file = Path("logged.jsonl")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        with self.file.open("a") as file:
            print(json.dumps([step, sorted(numbers)]), file=file, flush=True)

    def close(self) -> None:
        pass
