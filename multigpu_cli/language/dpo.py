"""Direct preference optimization: a chosen answer becomes likelier than a rejected one, compared with a reference.

Source: Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", 2023, eq. 7;
label smoothing is that of Mitchell, "A note on DPO with noisy preferences" (cDPO), 2023.
"""

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.language.adapter import as_reference, has_adapter
from multigpu_cli.language.task import check_network, try_chunks
from multigpu_cli.language.token_losses import TokenLosses, TokenTargets, score_logits
from multigpu_cli.runtime.module_state import eval_mode
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.tasks.base import BatchMetrics, Task
from multigpu_cli.tasks.classification import compute_accuracy, count_right


class DPO(Task):
    """Inputs and targets (n, 2, t) of n pairs, the chosen answer first; model outputs (2n, t, vocabulary).

    The reference is the network with the adapter of --init-from, or without one, and without dropout. The reward of an
    answer is `beta` times the logarithm of how much likelier it is than there, summed over its tokens. The loss is the
    mean over the pairs of the global batch of -log σ(reward of the chosen answer - reward of the rejected one): ln 2
    before the first step, where the network has no dropout. Accuracy is the share of pairs whose chosen answer has the
    higher reward. The better result has the lower loss.

    Args:
        beta: how closely the network is held to the reference: the greater, the closer.

    Raises:
        RequestError: the data are no preferences, or a setting is out of range.
    """

    rows_per_sample = 2
    sums = ("chosen_reward", "rejected_reward")
    expected_shapes = "targets (n, 2, t) int64 tokens, -100 where none counts; outputs (2n, t, vocabulary) logits"

    def __init__(self, source: DataSource, config: TaskConfig, beta: float = 0.1) -> None:
        super().__init__(source, config)
        if source.noun != "pairs":
            raise RequestError(
                "--task dpo: the data are no preferences: a prompt, and a chosen and a rejected answer to it",
                remedy="--data chat with records that have fields chosen and rejected (data.args.format=preference)",
            )
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 < beta < inf:
            raise RequestError(f"task.args.beta: {beta!r}", remedy="a number above 0, such as 0.1")
        if config.label_smoothing >= 0.5:
            raise RequestError(
                f"--label-smoothing {config.label_smoothing:g}: with --task dpo it is the share of pairs whose answers "
                "were mixed up, and nothing could be learned of so many",
                remedy="a number below 0.5",
            )
        self._beta, self._in_chunks = beta, False

    def check_model(self, model: nn.Module, precision: Precision) -> None:
        """See `Task`; without an adapter there is no reference."""
        if not has_adapter(model):
            raise RequestError(
                "--task dpo: the network has no adapter, and the reference is the network without it",
                remedy="--adapter lora",
            )
        with precision.autocast():
            check_network(model, self.source)
            self._in_chunks, self.logits_note = try_chunks(model)

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return self._losses(self._rewards(model, batch)).sum()

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        rewards = self._rewards(model, batch)
        counts = count_right(rewards[:, 0] > rewards[:, 1], rewards)
        return BatchMetrics(self._losses(rewards).double().sum(), counts, rewards.double().sum(0))

    def predictions(self, model: nn.Module, batch: Batch) -> dict[str, list[Any]]:
        return dict(zip(self.sums, self._rewards(model, batch).T.tolist(), strict=True))

    def metrics(self, counts: Tensor, units: int) -> dict[str, float]:
        return {"accuracy": compute_accuracy(counts, units)}

    def figures(self, means: dict[str, float]) -> dict[str, float]:
        return {"margin": means["chosen_reward"] - means["rejected_reward"]} | means

    def _losses(self, rewards: Tensor) -> Tensor:
        """(n, 2) → (n,)"""
        margins, smoothing = rewards[:, 0] - rewards[:, 1], self.config.label_smoothing
        losses = -logsigmoid(margins)
        return torch.lerp(losses, -logsigmoid(-margins), smoothing) if smoothing else losses

    def _rewards(self, model: Any, batch: Batch) -> Tensor:
        """(n, 2): chosen and rejected. Differences are taken by token, which are small and lose no digits."""
        with as_reference(model), eval_mode(model):
            reference = self._compute_losses(model, batch)
        gains = (reference - self._compute_losses(model, batch)).sum(1)
        return self._beta * gains.view(-1, 2)

    def _compute_losses(self, model: Any, batch: Batch) -> Tensor:
        """(2n, t): of each target, 0 where none counts."""
        inputs = {name: part.flatten(0, 1) for name, part in batch.inputs.items()}
        targets = batch.targets.flatten(0, 1)
        if not self._in_chunks:
            return score_logits(model(inputs), targets).losses
        found: TokenLosses = model(TokenTargets(inputs, targets, batch.tokens and batch.tokens.learned))
        return found.losses
