"""The factory of a network: found by its name, called with what it takes."""

import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from multigpu_cli.config.types import quote_value
from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.models.registry import MODELS
from multigpu_cli.runtime import factories

_DOWNLOADS = ("pretrained", "weights", "weights_backbone")  # how timm and torchvision call what they would download
_OUTPUTS = re.compile("class|label|(^|_)out|action|vocab")  # in the name of a parameter that is a number of outputs

_NO_DEFAULT = inspect.Parameter.empty


def find_model_factory(name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """The factory of a built-in network, of one of a library (timm/resnet18), or the user's own (module:factory).

    Raises:
        RequestError: there is none of that name, or its arguments ask for weights to be downloaded.
    """
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

    Raises:
        RequestError: the factory does not take the arguments, or failed.
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
    known: dict[str, Callable[..., Any]] = factories.find_factory(name, {name: MODELS[f"{library}/"]}, flag="--model")()
    if network in known:
        return known[network]
    without_tag, tag, _ = network.partition(".")
    if tag and without_tag in known:
        raise _no_download(network, f"{library}/{without_tag}")
    nearest = get_close_matches(network, known, n=4, cutoff=0.0)
    raise RequestError(
        f"--model {name}: {library} has no such network among its {len(known)}",
        remedy=did_you_mean(network, nearest),
    )


def _no_download(what: str, name: str) -> RequestError:
    return RequestError(
        f"{what} names weights to download, and --model {name} starts with fresh ones",
        remedy=f"--model {name} --init-from FILE, with weights that lie on this machine",
    )


def _likely_keywords(factory: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {}
    likely = {name: offered[name] for name in ("num_classes",) if name in offered}
    if _package(factory) == "timm":
        from multigpu_cli.models.timm_networks import fit_to_images  # late: where timm has been loaded already

        likely |= fit_to_images(factory, offered["input_shape"])
    return {name: value for name, value in likely.items() if name not in parameters}


def _package(factory: Callable[..., Any]) -> str:
    return str(getattr(factory, "__module__", "")).partition(".")[0]
