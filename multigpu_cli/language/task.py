"""Tasks of language models: the next token at every place of a sequence, and direct preference optimization.

Source of the latter: Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
2023, eq. 7; label smoothing is that of Mitchell, "A note on DPO with noisy preferences" (cDPO), 2023.
"""

from collections.abc import Callable
from dataclasses import replace
from math import exp
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.config.types import number
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.language.adapter import as_reference, find_adapted
from multigpu_cli.language.hugging_face import Logits
from multigpu_cli.language.text import Vocabulary
from multigpu_cli.models.token_losses import (
    ComputesTokenLosses,
    TokenLosses,
    TokenTargets,
    check_causal,
    check_packing,
    count_tokens_at_once,
    find_difference,
    score_logits,
)
from multigpu_cli.runtime.model_call import IGNORED
from multigpu_cli.runtime.module_state import eval_mode
from multigpu_cli.runtime.precision import Precision, at_least_float32
from multigpu_cli.tasks.base import BatchMetrics, Task
from multigpu_cli.tasks.supervised import compute_accuracy, count_right

_LARGEST_LOSS = 700.0  # nats, of which e to the power is a number


class _TokenTask(Task):
    """A task of tokens, whose losses are computed in chunks where the model can, and the share that is right."""

    _in_chunks = False

    def check_model(self, model: nn.Module, precision: Precision) -> None:
        """See `Task`; also that packed texts do not see each other, and whether the model can compute token losses."""
        with precision.autocast():
            check_network(model, self.source)
            if self.source.noun == "packs":
                check_packing(model, self.source.num_classes, next(model.parameters()).device)
            self._in_chunks, self.logits_note = try_chunks(model)

    def metrics(self, counts: Tensor, units: int) -> dict[str, float]:
        return {"accuracy": compute_accuracy(counts, units)}

    def _compute_losses(
        self, model: Callable[..., Any], batch: Batch, *, whole: bool = False, **wanted: Any
    ) -> TokenLosses:
        """The losses of the tokens of (n, t) targets; `whole` computes the logits of all, as a metric compares them."""
        if self._in_chunks and not whole:
            learned = batch.tokens and batch.tokens.learned
            found: TokenLosses = model(TokenTargets(batch.inputs, batch.targets, learned, **wanted))
            return found
        return score_logits(_check_logits(model(batch.inputs), batch.targets), batch.targets)


class LanguageModel(_TokenTask):
    """Inputs (n, t) int64 tokens, targets (n, t) int64, -100 if not counted, model outputs (n, t, vocabulary).

    Loss and accuracy are means over the targets that count, on all workers together: nats per token, and the share of
    tokens that were the likeliest ones; perplexity is e to the loss. The better result has the lower loss.
    """

    unit = "token"
    expected_shapes = "targets (n, t) int64 tokens, -100 where none counts; outputs (n, t, vocabulary) logits"

    def __init__(self, source: DataSource, config: TaskConfig) -> None:
        super().__init__(source, config)
        if source.num_classes < 2:
            raise RequestError(
                f"--task language-model: the dataset has a vocabulary of {source.num_classes} tokens",
                remedy="--data text, or a dataset with an attribute num_classes: the size of its vocabulary",
            )
        if source.noun == "pairs":
            raise RequestError(
                "--task language-model: the data are preferences, a chosen and a rejected answer each",
                remedy="--task dpo; or data.args.format=messages, say, where records hold a conversation beside them",
            )
        self.units_per_sample = max(1, source.input_shape[-1]) if source.input_shape else 1

    def check_model(self, model: nn.Module, precision: Precision) -> None:
        super().check_model(model, precision)
        if self._in_chunks and self.own_metrics:
            self.logits_note += "; in evaluations all of a batch, for --metric"

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        smoothing = self.config.label_smoothing
        if self._in_chunks:
            return self._compute_losses(model, batch, smoothing=smoothing, summed=True).losses.sum()
        logits = at_least_float32(_check_logits(model(batch.inputs), batch.targets).flatten(0, -2))
        return cross_entropy(
            logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
        )

    def units(self, batch: Batch) -> Tensor:
        return torch.count_nonzero(batch.targets != IGNORED)

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        losses, right = self._compute_losses(model, batch, whole=bool(self.own_metrics))
        return BatchMetrics(losses.double().sum(), count_right(right, losses))

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the `loss` (n, t) of each token, which is 0 for targets of -100."""
        return {"loss": self._compute_losses(model, batch).losses}

    def predictions(self, model: nn.Module, batch: Batch) -> dict[str, list[Any]]:
        counting = (batch.targets != IGNORED).sum(1)
        mean = self._compute_losses(model, batch).losses.double().sum(1) / counting.clamp(min=1)
        return {"tokens": counting.tolist(), "loss": mean.tolist()}

    def figures(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": exp(min(means["loss"], _LARGEST_LOSS))}


def check_network(model: nn.Module, source: DataSource) -> None:
    """Refuse a network of transformers that sees the token that it is to foretell, or has a loss beside.

    The latter would be a product of means over a micro-batch, and no sum.
    """
    if not isinstance(model, Logits):
        return
    vocabulary, places = model.limits
    if isinstance(source.codec, Vocabulary):  # else targets may be masked tokens
        check_causal(model, vocabulary, next(model.parameters()).device, places)
    if model.has_router_loss:
        raise RequestError(
            "--model: output_router_logits of its config.json asks for a second loss, which balances its experts: it "
            "is no mean over the tokens of a global batch, and would be left out",
            remedy='"output_router_logits": false in config.json, to train without it',
        )


def try_chunks(model: nn.Module) -> tuple[bool, str]:
    """Whether a model computes the losses of tokens in chunks; and of how many tokens at once, for the plan."""
    device = next(model.parameters()).device
    own = device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()  # --exact keeps its rounding
    if not isinstance(model, ComputesTokenLosses) or not (isinstance(model, Logits) or own):
        return False, ""
    vocabulary, places = model.limits
    if difference := find_difference(model, vocabulary, device, places):
        return False, f"of all tokens at once, since in chunks {difference}"
    compiled = "" if isinstance(model, Logits) else "; in a compiled pass of all"
    return True, f"of the learned tokens alone, at most {count_tokens_at_once(vocabulary):,} at once{compiled}"


def _check_logits(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"outputs {tuple(logits.shape)} for targets {tuple(targets.shape)}: (n, tokens, vocabulary)?")
    return logits


class DPO(_TokenTask):
    """Inputs and targets (n, 2, t) of n pairs, the chosen answer first; model outputs (2n, t, vocabulary).

    The reference is the network with the adapter of --init-from, or without one, and without dropout. The reward of an
    answer is `beta` times the logarithm of how much likelier it is than there, summed over its tokens. The loss is the
    mean over the pairs of the global batch of -log σ(reward of the chosen answer - reward of the rejected one): ln 2
    before the first step, where the network has no dropout. Accuracy is the share of pairs whose chosen answer has the
    higher reward. The better result has the lower loss. The greater `beta`, the closer the network is held to the
    reference.
    """

    rows_per_sample = 2
    sums = ("chosen_reward", "rejected_reward")
    expected_shapes = "targets (n, 2, t) int64 tokens, -100 where none counts; outputs (2n, t, vocabulary) logits"

    def __init__(
        self, source: DataSource, config: TaskConfig, beta: Annotated[float, number(0, above=True)] = 0.1
    ) -> None:
        super().__init__(source, config)
        if source.noun != "pairs":
            raise RequestError(
                "--task dpo: the data are no preferences: a prompt, and a chosen and a rejected answer to it",
                remedy="--data chat with records that have fields chosen and rejected (data.args.format=preference)",
            )
        if config.label_smoothing >= 0.5:
            raise RequestError(
                f"--label-smoothing {config.label_smoothing:g}: with --task dpo it is the share of pairs whose answers "
                "were mixed up, and must be below one half",
                remedy="a number below 0.5",
            )
        self._beta = beta

    def check_model(self, model: nn.Module, precision: Precision) -> None:
        """See `Task`; without an adapter there is no reference."""
        if find_adapted(model) is None:
            problem = "--task dpo: the network has no adapter, and the reference is the network without it"
            raise RequestError(problem, remedy="--adapter lora")
        super().check_model(model, precision)

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return self._losses(self._rewards(model, batch)).sum()

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        rewards = self._rewards(model, batch)
        counts = count_right(rewards[:, 0] > rewards[:, 1], rewards)
        return BatchMetrics(self._losses(rewards).double().sum(), counts, rewards.double().sum(0))

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return dict(zip(self.sums, self._rewards(model, batch).T, strict=True))

    def predictions(self, model: nn.Module, batch: Batch) -> dict[str, list[Any]]:
        return {name: value.tolist() for name, value in self.outputs(model, batch).items()}

    def figures(self, means: dict[str, float]) -> dict[str, float]:
        return {"margin": means["chosen_reward"] - means["rejected_reward"]} | means

    def _losses(self, rewards: Tensor) -> Tensor:
        """(n, 2) → (n,)"""
        margins, smoothing = rewards[:, 0] - rewards[:, 1], self.config.label_smoothing
        losses = -logsigmoid(margins)
        return torch.lerp(losses, -logsigmoid(-margins), smoothing) if smoothing else losses

    def _rewards(self, model: Any, batch: Batch) -> Tensor:
        """(n, 2): chosen and rejected. Differences are taken by token, which are small and lose no digits."""
        inputs = {name: part.flatten(0, 1) for name, part in batch.inputs.items()}
        answers = replace(batch, inputs=inputs, targets=batch.targets.flatten(0, 1))  # (2n, t)
        with as_reference(model), eval_mode(model):
            reference = self._compute_losses(model, answers).losses
        gains = (reference - self._compute_losses(model, answers).losses).sum(1)
        return self._beta * gains.view(-1, 2)
