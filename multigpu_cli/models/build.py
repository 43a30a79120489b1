"""Builds the model of a run from its settings: factory, SyncBatchNorm, frozen parameters, checkpointed activations.

Ranks that are sent their weights build it on the meta device, where tensors have shapes and no memory. Nothing is
initialised there: some of torch's initialisers return at once for such tensors, and leave them as they are.
"""

import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from multigpu_cli.capabilities import ADAPTERS, BUILDERS, MODELS, OUTPUTS, load, load_given
from multigpu_cli.config.code_names import match_names
from multigpu_cli.config.schema import Config, ModelConfig
from multigpu_cli.config.types import quote_value
from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.runtime import factories
from multigpu_cli.runtime.model_call import bind_call
from multigpu_cli.runtime.module_state import preserve_buffers


def build_model(
    config: ModelConfig,
    name: str,
    offered: dict[str, Any],
    *,
    whole_output: bool = False,
    adapt: Callable[..., nn.Module] | None = None,
) -> nn.Module:
    """Call the factory, then freeze and checkpoint activations; the caller has seeded the generators.

    The model's name is the dataset's own where the user gave none. `offered` are input_shape, num_classes, task, mode
    and seed. `adapt` of `find_adapter` takes the place of `adapt_model`, for which `whole_output` is.
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
    """What the settings want to be made of a new network, to learn in its place; see `capabilities.ADAPTERS`."""
    return next((choose(config, reference=reference) for choose in load_given(ADAPTERS, config)), None)


def refuse_torchscript(model: nn.Module, origin: str) -> None:
    """Refuse a network that was scripted or traced: it takes no hooks, and its code is not that of torch.compile."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise RequestError(
            f"{origin} a TorchScript module", remedy="the nn.Module that it was made of, with --compile default"
        )


def adapt_model(model: nn.Module, *, whole_output: bool = False) -> nn.Module:
    """A network that is called with the inputs of a batch: itself, or with an adapter where it is one of transformers.

    With `whole_output` that returns transformers' output objects, else their logits.
    """
    if not is_of_transformers(model):
        bind_call(model)
        return model
    adapted: nn.Module = load(OUTPUTS["whole" if whole_output else "logits"])(model)
    return adapted


def list_unused_methods(model: nn.Module) -> list[str]:
    """The methods by which Lightning's Trainer would train a network, and which nothing calls here."""
    return [name for name in ("training_step", "configure_optimizers") if callable(getattr(model, name, None))]


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a network is one of transformers, or like one: it names its input, and has a configuration."""
    return isinstance(getattr(model, "main_input_name", None), str) and hasattr(model, "config")


def prepare_model(model: nn.Module, config: ModelConfig, name: str) -> nn.Module:
    """What the settings ask for beside the network itself: SyncBatchNorm, frozen parameters, checkpointing."""
    if config.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    frozen = find_frozen(model, config.freeze)
    if len(frozen) == sum(p.requires_grad for p in model.parameters()):
        raise RequestError(f"--model {name}: no parameter is left to train", remedy="freeze fewer with --freeze")
    if config.unfreeze_at is None:  # else freezing.py does it, once the optimizer has them
        for parameter in frozen:
            parameter.requires_grad_(False)
    if config.grad_checkpointing:
        checkpoint_activations(model)
    return model


def use_channels_last(model: nn.Module) -> bool:
    """Lay 2-d convolutions' kernels out with channels last, for faster steps (1.5 times on a CPU); False if none."""
    if not has_2d_convolutions(model):
        return False
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return True


def has_2d_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules())


def find_frozen(model: nn.Module, patterns: Sequence[str]) -> list[Tensor]:
    """The parameters whose names match one of --freeze's shell patterns, and that would learn otherwise."""
    parameters = dict(model.named_parameters())
    names = {name for pattern in patterns for name in match_names(list(parameters), pattern, f"--freeze {pattern!r}")}
    return [parameter for name, parameter in parameters.items() if name in names and parameter.requires_grad]


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute each block's activations in backward instead of keeping them (Chen et al. 2016).

    Blocks are the members of the model's Sequentials and ModuleLists (not of nested ones), or else its children, as far
    as they have parameters; of a network of transformers those of the outermost ones, wherever they lie. Dropout draws
    the same numbers again, and BatchNorm does not count a batch twice.
    """
    rows = _find_rows(model, sys.maxsize if hasattr(model, "callees") else 1)
    for block in [block for row in rows for block in row.children()] or list(model.children()):
        if any(p.requires_grad for p in block.parameters()):
            # only if there is something to restore: torch.compile can't trace a checkpoint with contexts
            contexts: dict[str, Any] = {"context_fn": partial(_contexts, block)} if list(block.buffers()) else {}
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **contexts)


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


_DOWNLOADS = ["pretrained", "weights", "weights_backbone"]  # how timm and torchvision call what they would download
_OUTPUTS = re.compile("class|label|(^|_)out|action|vocab")  # in the name of a parameter that is a number of outputs
_NO_DEFAULT = inspect.Parameter.empty


def find_model_factory(name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """The factory of a built-in network, of one of a library (timm/resnet18), or the user's own (module:factory)."""
    library, slash, network = name.partition("/")
    if not slash or library + slash not in MODELS:
        return factories.find_factory(name, MODELS, flag="--model")
    factory = _find_in_library(library, network)
    if wanted := next((each for each in _DOWNLOADS if args.get(each)), None):
        raise _no_download(f"model.{wanted}={quote_value(args[wanted])}", name)
    return factory


def call_model_factory(factory: Callable[..., Any], offered: Mapping[str, Any], args: Mapping[str, Any]) -> Any:
    """Call it with what it names of the offered values, and with the user's own arguments.

    A factory with **kwargs does not name all that it takes: it is called with the number of classes too, and one of
    timm with what fits its network to the images. Where it refuses these, it is called without them.
    """
    likely = {name: value for name, value in _likely_keywords(factory, offered).items() if name not in args}
    if _package(factory) == "torchvision":
        offered = {**offered, "weights_backbone": None}  # some download it by default
    try:
        return factories.call_factory(factory, offered, {**likely, **args}, where="model")
    except RequestError as refused:
        if not likely:
            raise
        try:
            return factories.call_factory(factory, offered, args, where="model")
        except RequestError as error:  # of the two the one that is not about what nobody has asked for
            raise error if any(name in str(refused.__cause__) for name in likely) else refused from None


def suggest_outputs(name: str, args: Mapping[str, Any], returned: int, wanted: int) -> str:
    """What to type for a network with `returned` outputs to have as many as are `wanted`."""
    parameters = inspect.signature(find_model_factory(name, args)).parameters
    values = {each: parameter.default for each, parameter in parameters.items() if each != "num_classes"} | dict(args)
    numbers = {
        each: value for each, value in values.items() if type(value) is int or value is None or value is _NO_DEFAULT
    }
    named = [each for each in numbers if _OUTPUTS.search(each)]
    same = [each for each, value in numbers.items() if value == returned]
    if best := [*(each for each in named if each in same), *named, *same]:
        return f"--set model.{best[0]}={wanted}"
    return f"a factory that has as many outputs as its num_classes says, which is {wanted}"


def _find_in_library(library: str, network: str) -> Callable[..., Any]:
    name = f"{library}/{network}"
    known: list[str] = factories.find_factory(name, {name: MODELS[f"{library}/"]}, flag="--model")()
    if network in known:
        return load(BUILDERS[library])(network)  # type: ignore[no-any-return]
    without_tag, tag, _ = network.partition(".")
    if tag and without_tag in known:
        raise _no_download(network, f"{library}/{without_tag}")
    nearest = get_close_matches(network, known, n=4, cutoff=0.0)
    problem = f"--model {name}: {library} has no such network among its {len(known)}"
    raise RequestError(problem, remedy=did_you_mean(network, nearest))


def _no_download(what: str, name: str) -> RequestError:
    problem = f"{what} names weights to download, and nothing is downloaded"
    return RequestError(problem, remedy=f"--model {name} --init-from FILE, with weights on this machine")


def _likely_keywords(factory: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {}
    likely = {name: offered[name] for name in ("num_classes",) if name in offered}
    if _package(factory) == "timm" and len(offered["input_shape"]) == 3:
        from timm import get_pretrained_cfg  # late: where it has been loaded already

        channels, *size = offered["input_shape"]
        made_for = get_pretrained_cfg(getattr(factory, "__name__", ""))
        if channels != 3:
            likely["in_chans"] = channels
        if made_for and made_for.fixed_input_size and list(made_for.input_size[1:]) != size:
            likely["img_size"] = tuple(size)
    return {name: value for name, value in likely.items() if name not in parameters}


def _package(factory: Callable[..., Any]) -> str:
    return str(getattr(factory, "__module__", "")).partition(".")[0]


META = torch.device("meta")


def build_on_meta(build: Callable[[], nn.Module]) -> tuple[nn.Module | None, str]:
    """Call a factory on the meta device; returns the network, or why it would not be what the factory builds else."""
    before, earlier = torch.get_rng_state(), _list_meta_tensors()
    try:
        with META:
            model = build()
    except Exception as error:  # the user's own code may raise anything; if not for this, the whole build raises it too
        return None, f"on the meta device its factory raises {type(error.__cause__ or error).__name__}"
    if any(map(is_lazy, model.parameters())):
        return None, "its first pass creates weights"
    gc.collect()  # what it built by the way
    for buffer in filter(Tensor._is_view, model.buffers()):
        # such as a mask with new dims: nobody need give a value to what it is a view of
        torch.utils.swap_tensors(buffer, torch.empty_like(buffer))
    if not torch.equal(before, torch.get_rng_state()):
        return None, "its factory draws random numbers on a device of its own choice"
    known = set(map(id, chain(model.parameters(), model.buffers(), earlier)))
    if any(id(tensor) not in known for tensor in _list_meta_tensors()):  # wherever they are kept, nobody gives a value
        return None, "it has tensors that are neither parameters nor buffers"
    return model, ""


def copy_to_meta(model: nn.Module) -> nn.Module:
    """A copy of the network whose parameters and buffers have no memory."""
    memory: dict[int, Tensor] = {id(buffer): buffer.to(META) for buffer in model.buffers()}
    for parameter in model.parameters():
        memory[id(parameter)] = nn.Parameter(parameter.to(META), requires_grad=parameter.requires_grad)
    return deepcopy(model, memory)


def find_unsaved_tensors(model: nn.Module) -> list[str]:
    """The names of parameters and buffers that are in no state dict, and so in no checkpoint."""
    saved = model.state_dict(keep_vars=True).keys()
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return [name for name, _ in tensors if name not in saved]


def _list_meta_tensors() -> list[Tensor]:
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.is_meta]
