"""Muon for the hidden matrices of a network, and AdamW for all else, as one optimizer."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from multigpu_cli.config.code_names import match_names
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.fused import AdamW


class Muon(torch.optim.Optimizer):
    """torch's Muon for the groups that are hidden, and AdamW for the others; both work on one state.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". By default its steps are as large as
    those of AdamW, so that both take the same rate and weight decay: Liu et al. 2025, "Muon is Scalable for LLM
    Training" (`adjust_lr_fn="match_rms_adamw"`).

    Args:
        params: groups, each with `hidden` and `weight_decay`.
        momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: of torch.optim.Muon.
        betas, eps: of AdamW.

    Raises:
        RequestError: this torch has no Muon.
    """

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RequestError(
                f"--optimizer muon: torch {torch.__version__} has no Muon", remedy="torch 2.9 or later, or adamw"
            )
        self._parts: dict[bool, torch.optim.Optimizer] = {
            True: torch.optim.Muon(
                [nn.Parameter(torch.zeros(1, 1))],
                momentum=momentum,
                nesterov=nesterov,
                ns_coefficients=tuple(ns_coefficients),  # type: ignore[arg-type]  # torch itself says how many
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
            ),
            False: AdamW([nn.Parameter(torch.zeros(1))], betas=tuple(betas), eps=eps, fused=True),  # type: ignore[arg-type]
        }
        groups = [{**self._parts[bool(group["hidden"])].defaults, "lr": lr, **group} for group in params]
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each part over its groups; a loaded state has replaced groups and state since the last one."""
        for hidden, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["hidden"] == hidden]
            part.state = self.state
            part.step()


def find_hidden_matrices(model: nn.Module, spared: Collection[str] = ()) -> set[str]:
    """The names of the matrices that Muon moves: of two dimensions, and neither of an embedding nor of the head.

    The head is the model's last linear layer, unless that is within one of several blocks of a class: then the output
    has the weights of an embedding.

    Args:
        spared: patterns of further matrices that AdamW moves.

    Raises:
        RequestError: a pattern matches nothing, or no matrix is left.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2}
    outside = [layer.weight for layer in model.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    if (head := _find_head(model)) is not None:
        outside.append(head.weight)
    left_out = {id(weight) for weight in outside}
    hidden = {name for name, parameter in matrices.items() if id(parameter) not in left_out}
    for pattern in spared:
        hidden -= set(match_names(list(matrices), pattern, f"optimizer.args.adamw {pattern!r}", "matrix that learns"))
    if not hidden:
        raise RequestError(
            "--optimizer muon: no hidden matrix learns, only embeddings, the head, kernels or vectors",
            remedy="--optimizer adamw",
        )
    return hidden


def _find_head(model: nn.Module) -> nn.Linear | None:
    linear = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        return None
    path = linear[-1][0].split(".")
    for depth in range(1, len(path)):
        parent, block = (model.get_submodule(".".join(path[:end])) for end in (depth - 1, depth))
        if sum(type(sibling) is type(block) for sibling in parent.children()) > 1:
            return None
    return linear[-1][1]
