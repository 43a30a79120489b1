"""Builds the model of a run from its settings: factory, SyncBatchNorm, frozen parameters, checkpointed activations."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multigpu_cli.capabilities import ADAPTERS, load_given
from multigpu_cli.config.match_names import match_names
from multigpu_cli.config.schema import Config, ModelConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.models.factory import call_model_factory, find_model_factory
from multigpu_cli.runtime.model_call import bind_call
from multigpu_cli.runtime.preserve_module_state import preserve_buffers


def build_model(
    config: ModelConfig,
    name: str,
    offered: dict[str, Any],
    *,
    whole_output: bool = False,
    adapt: Callable[..., nn.Module] | None = None,
) -> nn.Module:
    """Call the factory, then freeze and checkpoint activations; the caller has seeded the generators.

    Args:
        name: of the model, the dataset's own where the user named none.
        offered: input_shape, num_classes, task, mode, seed.
        whole_output: as for `adapt_model`.
        adapt: in place of `adapt_model`, from `find_adapter`.

    Raises:
        RequestError: no such model, arguments or adapter it does not take, or something that is no nn.Module.
    """
    model: nn.Module = call_model_factory(find_model_factory(name, config.args), offered, config.args)
    if not isinstance(model, nn.Module):
        raise RequestError(f"--model {name}: the factory returned a {type(model).__name__}, not an nn.Module")
    refuse_torchscript(model, f"--model {name}: the factory returned")
    if adapt:
        model = adapt(model, config, offered["seed"], whole_output=whole_output)
    else:
        model = adapt_model(model, whole_output=whole_output)
    return prepare_model(model, config, name)


def find_adapter(config: Config, *, reference: bool = False) -> Callable[..., nn.Module] | None:
    """What the settings want to be made of a new network, to learn in its place; see `capabilities.ADAPTERS`.

    Args:
        reference: and it keeps beside that what was loaded first; see `RunSpec.has_reference`.
    """
    return next((choose(config, reference=reference) for choose in load_given(ADAPTERS, config)), None)


def refuse_torchscript(model: nn.Module, origin: str) -> None:
    """Refuse a network that was scripted or traced: it takes no hooks, and its code is not that of torch.compile.

    Raises:
        RequestError: it, or a part of it, is a TorchScript module; the message begins with `origin`.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise RequestError(
            f"{origin} a TorchScript module", remedy="the nn.Module that it was made of, with --compile default"
        )


def adapt_model(model: nn.Module, *, whole_output: bool = False) -> nn.Module:
    """A network that is called with the inputs of a batch: itself, or with an adapter where it is one of transformers.

    Args:
        whole_output: of transformers' output objects, whole or their logits.
    """
    if not is_of_transformers(model):
        bind_call(model)
        return model
    from multigpu_cli.models.hugging_face import Logits, NamedInputs  # late: few networks come from there

    return NamedInputs(model) if whole_output else Logits(model)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a network is one of transformers, or like one: it names its input, and has a configuration."""
    return isinstance(getattr(model, "main_input_name", None), str) and hasattr(model, "config")


def prepare_model(model: nn.Module, config: ModelConfig, name: str) -> nn.Module:
    """What the settings ask for beside the network itself: SyncBatchNorm, frozen parameters, checkpointed activations.

    Raises:
        RequestError: nothing is left to train.
    """
    if config.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    frozen = find_frozen(model, config.freeze)
    if len(frozen) == sum(p.requires_grad for p in model.parameters()):
        raise RequestError(f"--model {name}: no parameter is left to train", remedy="freeze fewer with --freeze")
    if config.unfreeze_at is None:  # else run/freezing.py does it, once the optimizer has them
        for parameter in frozen:
            parameter.requires_grad_(False)
    if config.grad_checkpointing:
        checkpoint_activations(model)
    return model


def use_channels_last(model: nn.Module) -> bool:
    """Lay the kernels of 2-d convolutions out with channels last, which makes a step about 1.5 times as fast.

    Returns False where the model has none, and nothing was changed.
    """
    if not has_2d_convolutions(model):
        return False
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return True


def has_2d_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules())


def find_frozen(model: nn.Module, patterns: Sequence[str]) -> list[Tensor]:
    """The parameters whose names match one of --freeze's shell patterns, and that would learn otherwise.

    Raises:
        RequestError: a pattern that matches nothing.
    """
    parameters = dict(model.named_parameters())
    names = {name for pattern in patterns for name in match_names(list(parameters), pattern, f"--freeze {pattern!r}")}
    return [parameter for name, parameter in parameters.items() if name in names and parameter.requires_grad]


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute each block's activations in backward instead of keeping them (Chen et al. 2016).

    Blocks are the members of the model's Sequentials and ModuleLists (not of nested ones), or else its children, as far
    as they have parameters; of a network of transformers those of the outermost ones, wherever they lie. Dropout draws
    the same numbers again, and BatchNorm does not count a batch twice.
    """
    for block in _blocks(model):
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            context_fn=partial(_contexts, block),
        )


def _blocks(model: nn.Module) -> list[nn.Module]:
    levels = 1 if not hasattr(model, "callees") else sys.maxsize
    roots = list(_find_rows(model, levels))
    blocks = [block for root in roots for block in root.children()] or list(model.children())
    return [block for block in blocks if any(p.requires_grad for p in block.parameters())]


def _find_rows(module: nn.Module, levels: int) -> Iterator[nn.Module]:
    """The Sequentials and ModuleLists that lie in no other one, at most so many levels deep."""
    if isinstance(module, nn.Sequential | nn.ModuleList):
        yield module
    elif levels:
        for child in module.children():
            yield from _find_rows(child, levels - 1)


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """While a block runs a second time its running statistics stay as the first time left them."""
    return nullcontext(), preserve_buffers(block)
