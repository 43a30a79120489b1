"""Builds the optimizer of a run: torch's by name, or the user's own class, over groups of parameters."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multigpu_cli.config.code_names import match_names
from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.config.types import patterns
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.eval_weights import is_schedule_free
from multigpu_cli.optimizers.fused import SGD, AdamW, Muon, avoid_compiler, find_hidden_matrices
from multigpu_cli.planning.schedule import OPTIMIZERS
from multigpu_cli.runtime import factories
from multigpu_cli.runtime.module_state import TensorPath, map_tensors

_OURS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {}),
    "sgd": (SGD, {"momentum": 0.9, "nesterov": True}),
    "muon": (Muon, {}),
}
_FUSED = ("adamw", "sgd", "adam")
_OTHER_KERNELS = {"foreach", "capturable", "differentiable"}  # arguments that exclude fused ones
_DEFAULT_DECAY = OptimizerConfig().weight_decay
OWN_LOOP = "with several of them a training loop of your own, around setup_multi_gpu_training(model) for each network"
"""What a message suggests to who needs another step than one of one optimizer."""


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    factors: Mapping[str, float] = MappingProxyType({}),
    moved: Sequence[Tensor] | None = None,
    rate: float = 0.0,
) -> torch.optim.Optimizer:
    """The optimizer over all that learns; weight decay on matrices and kernels only, not on biases and norms.

    SGD has Nesterov momentum 0.9. What is schedule-free is in the mode for steps. The rate of a parameter is multiplied
    by its factor, by name. `moved` is what this process moves in place of each parameter that learns, in their order;
    None: these themselves. The rate is the highest of the schedule's; until `set_rate` nothing moves. RequestError:
    there is no such optimizer, it does not accept optimizer.args, or a pattern matches nothing.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained = [p for p in model.parameters() if p.requires_grad] if moved is None else moved
    hidden = None
    if config.name == "muon":  # some matrices are left to AdamW
        hidden = find_hidden_matrices(model, patterns.read(config.args.get("adamw", []), "optimizer.args.adamw"))
    groups = group_parameters(dict(zip(names, trained, strict=True)), config, factors, hidden)
    optimizer = construct_optimizer(config, groups, rate)
    set_rate(optimizer, 0.0)
    if isinstance(optimizer, SGD) and optimizer.defaults["momentum"]:
        for parameter in trained:  # the first step would create them, from uninitialised memory if it is skipped
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def construct_optimizer(
    config: OptimizerConfig, groups: Sequence[dict[str, Any]], rate: float = 0.0
) -> torch.optim.Optimizer:
    """The optimizer over these groups, with a state of its own; a RequestError if it does not take optimizer.args."""
    kind, defaults = _find_kind(config.name)
    args = {name: value for name, value in config.args.items() if (config.name, name) != ("muon", "adamw")}
    if taken := sorted(args.keys() & {"lr", "params", "weight_decay"}):
        raise RequestError(f"optimizer.args.{taken[0]} can't be set here", remedy="--lr or --weight-decay")
    offered = {"params": groups, "lr": rate, **defaults}
    if config.name in _FUSED and not args.keys() & _OTHER_KERNELS:
        members = [parameter for group in groups for parameter in group["params"]]
        # torch's fused SGD would silently leave 16 bits on CPU unchanged (torch 2.13)
        short = [p for p in members if p.device.type == "cpu" and p.dtype in (torch.bfloat16, torch.float16)]
        # fused kernels take no complex numbers
        offered["fused"] = all(map(torch.is_floating_point, members)) and (kind is not SGD or not short)
    avoid_compiler()
    optimizer = factories.call_factory(kind, offered, args, where="optimizer")
    _check_is_usable(optimizer, config)
    StateLoader(optimizer)
    if is_schedule_free(optimizer):
        optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def _find_kind(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The class, and arguments that are not its own defaults."""
    if name in _OURS:
        return _OURS[name]
    if name in OPTIMIZERS:
        return getattr(torch.optim, OPTIMIZERS[name].class_name), {}
    kind = factories.find_factory(name, {}, flag="--optimizer")
    if isinstance(kind, type) and issubclass(kind, torch.optim.LBFGS):
        raise RequestError(
            f"--optimizer {name}: LBFGS evaluates the loss several times per step (a closure), which is not supported",
            remedy="another optimizer, or a training loop of your own around setup_multi_gpu_training(model)",
        )
    return kind, {}


def _check_is_usable(optimizer: Any, config: OptimizerConfig) -> None:
    """Whether the user's own class made something that schedule and weight decay can reach."""
    flag = f"--optimizer {config.name}"
    if not isinstance(optimizer, torch.optim.Optimizer):
        several = OWN_LOOP if isinstance(optimizer, tuple | list) else ""
        raise RequestError(f"{flag}: a {type(optimizer).__name__} is not a torch.optim.Optimizer", remedy=several)
    if not all("lr" in group for group in optimizer.param_groups):
        problem = f"{flag}: its parameter groups have no 'lr', so no schedule can set it"
        raise RequestError(problem, remedy='pass {"lr": lr} among the defaults to super().__init__(params, defaults)')
    decays = any(group.get("weight_decay") for group in config.groups) or config.weight_decay not in (0, _DEFAULT_DECAY)
    if decays and "weight_decay" not in optimizer.defaults:
        raise RequestError(
            f"{flag}: it has no weight decay, and --weight-decay or optimizer.groups ask for one",
            remedy='leave it out, or pass {"weight_decay": …} among the defaults to super().__init__(params, defaults)',
        )


def describe_step(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> str:
    """Weight decay and clipping, in words; nothing of the decay where the class knows none by that name."""
    decays = sorted({float(decay) for group in optimizer.param_groups if (decay := group.get("weight_decay"))})
    said = f"weight decay {' and '.join(f'{decay:g}' for decay in decays)}" if decays else "no weight decay"
    limit = config.max_grad_norm
    clipping = "gradient not clipped" if limit == "off" else f"gradient clipped to norm {float(limit):g}"
    return f"{said}, {clipping}" if "weight_decay" in optimizer.defaults else clipping


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the schedule's rate, or its share of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)


def base_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate that `set_rate` was given; the first group's rate in a user's own optimizer."""
    group = optimizer.param_groups[0]
    return float(group["lr"]) / float(group.get("rate_factor", 1.0))


class GroupKey(NamedTuple):
    """What the parameters of a group have in common."""

    factor: float  # their share of the schedule's rate
    is_matrix: bool  # they have two dimensions or more
    weight_decay: float  # of each step
    hidden: bool | None  # updated by Muon; None if one algorithm updates all parameters


def group_parameters(
    trained: Mapping[str, Tensor], config: OptimizerConfig, factors: Mapping[str, float], hidden: Collection[str] | None
) -> list[dict[str, Any]]:
    """Parameter groups by share of the rate, the full rate first, and matrices before the others.

    Matrices and kernels decay, biases and norms do not, unless optimizer.groups says otherwise. Checkpoints hold the
    optimizer's state in this order. Muon moves what is `hidden`, and AdamW the rest; None: one algorithm moves all.
    RequestError: a pattern matches nothing that learns.
    """
    decays = _compute_decays(trained, config)
    groups: dict[GroupKey, list[Tensor]] = {}
    if hidden is None:
        groups = {GroupKey(1.0, matrix, config.weight_decay * matrix, None): [] for matrix in (True, False)}
    for name, parameter in trained.items():
        by_muon = None if hidden is None else name in hidden
        key = GroupKey(factors.get(name, 1.0), parameter.ndim >= 2, decays[name], by_muon)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": members, "weight_decay": key.weight_decay}
        | ({"rate_factor": key.factor} if key.factor != 1 else {})
        | ({} if key.hidden is None else {"hidden": key.hidden})
        for key, members in groups.items()
        if members
    ]


def _compute_decays(trained: Mapping[str, Tensor], config: OptimizerConfig) -> dict[str, float]:
    """The weight decay of each parameter; of the groups that match one, the last that has any counts."""
    decays = {name: config.weight_decay if parameter.ndim >= 2 else 0.0 for name, parameter in trained.items()}
    for group in config.groups:
        chosen = match_names(
            list(trained), group["match"], f"optimizer.groups {group['match']!r}", "parameter that learns"
        )
        if "weight_decay" in group:
            decays.update(dict.fromkeys(chosen, float(group["weight_decay"])))
    return decays


class StateLoader:
    """Steps that an optimizer's `load_state_dict` takes in addition to torch's own.

    Raises RequestError for a state with other parameter groups.

    torch gives every tensor but "step" the dtype of its parameter, so that counts would become fractions, and sums in
    float64 lose their last bits; these get their own dtype again. Of a text it makes a generator (torch 2.13), so what
    is no tensor is taken as it was saved. A checkpoint may also come from another device, so fused kernels and strides
    become those of this one: fused kernels on CPU traverse weights and state in memory order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._saved: dict[str, Any] = {}
        optimizer.register_load_state_dict_pre_hook(self._keep)
        optimizer.register_load_state_dict_post_hook(self._adapt)

    def _keep(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        sizes, saved = ([len(g["params"]) for g in part] for part in (optimizer.param_groups, state["param_groups"]))
        if sizes != saved:
            raise RequestError(
                f"--resume: the optimizer has parameter groups of {sizes} tensors, and the checkpoint's of {saved}",
                remedy="resume with the settings and the version that wrote it, or start from its weights: --init-from",
            )
        self._saved = state

    def _adapt(self, optimizer: torch.optim.Optimizer) -> None:
        numbers = [number for group in self._saved["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states, self._saved = self._saved["state"], {}
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in states:
                optimizer.state[parameter] = _restore(optimizer.state[parameter], states[number], parameter)
        if "fused" in optimizer.defaults:
            for group in optimizer.param_groups:
                group["fused"] = optimizer.defaults["fused"]


def _restore(loaded: Any, saved: Any, parameter: Tensor) -> Any:
    """A parameter's saved state on the device of the loaded one, with the parameter's strides."""

    def restore(path: TensorPath, value: Tensor) -> Tensor:
        found = loaded
        for key in path:
            found = found[key]
        if found.dtype != value.dtype and path[-1:] != ("step",):
            found = value.to(found.device, copy=True)
        if found.shape == parameter.shape and found.stride() != parameter.stride():
            found = torch.empty_like(parameter, dtype=found.dtype).copy_(found)
        return found  # type: ignore[no-any-return]

    return map_tensors(saved, restore)
