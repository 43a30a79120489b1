"""Finds and calls factories: built-in ones by registry name, the user's own as 'module:factory'."""

import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, get_args

from multigpu_cli.config.schema import SETTINGS
from multigpu_cli.config.types import ValueType, quote_value
from multigpu_cli.errors import RequestError, TrainingError, did_you_mean

_EXTRAS = {"timm": "vision", "torchvision": "vision"}  # packages of the networks that have a library's name


def find_factory(name: str, registry: Mapping[str, str], *, flag: str) -> Callable[..., Any]:
    """Import the factory for a registry name, or for the user's own 'module:factory', or raise a RequestError."""
    module_name, colon, attribute = registry.get(name, name).partition(":")
    if not colon:
        problem = f"{flag}: unknown name {name!r}"
        raise RequestError(problem, remedy=f"{did_you_mean(name, registry)} (or your own as module:factory)")
    try:
        module = importlib.import_module(module_name) if name in registry else _import_own(module_name)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything: reported as a RequestError
        missing = isinstance(error, ModuleNotFoundError) and name not in registry and error.name
        if missing and (module_name + ".").startswith(missing + "."):
            raise RequestError(
                f"{flag} {name}: there is no module {module_name!r} in {Path.cwd()} or among the installed packages",
                remedy="run from the folder that contains it, or check the spelling before the colon",
            ) from error
        raise _not_imported(name, module_name, flag, error) from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [known for known in vars(module) if not known.startswith("_")]
            problem = f"{flag} {name}: module {module_name!r} has no {attribute!r}"
            raise RequestError(problem, remedy=did_you_mean(attribute, public))
        found = getattr(found, part)
    if not callable(found):
        problem = f"{flag} {name}: {attribute!r} is of type {type(found).__name__}, which is not callable"
        raise RequestError(problem, remedy="name a function or a class")
    return found


def _import_own(name: str) -> ModuleType:
    """Import a module of the user's own; the working directory is searched before the installed packages.

    The module itself may have the name of one of Python's own. Other files there that have such a name are not taken
    for them, whoever imports them: neither this program nor torch would go on.
    """
    here, stdlib, top = str(Path.cwd()), sysconfig.get_path("stdlib"), name.partition(".")[0]
    if here not in sys.path:
        first = [path for path in sys.path if path in (stdlib, str(Path(stdlib, "lib-dynload")))]
        sys.path[:] = [*first, here, *(path for path in sys.path if path not in first)]
    spec = None if top in sys.modules else PathFinder.find_spec(top, [here])
    if spec and spec.loader and spec.origin:
        sys.modules[top] = module_from_spec(spec)
        try:
            with _no_arguments(spec.origin):
                spec.loader.exec_module(sys.modules[top])
        except BaseException:
            del sys.modules[top]
            raise
    with _no_arguments(name):
        return importlib.import_module(name)


@contextmanager
def _no_arguments(script: str) -> Iterator[None]:
    """A script that parses a command line when it is imported gets an empty one, and so its own defaults."""
    ours, sys.argv = sys.argv, [script]
    try:
        yield
    finally:
        sys.argv = ours


def import_extra(package: str, problem: str, remedy: str) -> Any:
    """Import a package that not everybody has installed; RequestError, with these words, if it can't be imported."""
    try:
        return importlib.import_module(package)
    except ImportError as missing:
        raise explain_torchvision(f"import {package}", missing) or RequestError(problem, remedy=remedy) from missing


def call_factory(
    factory: Callable[..., Any], offered: Mapping[str, Any], args: Mapping[str, Any], *, where: str
) -> Any:
    """Call a factory with the offered values that it names, and with all of the user's own arguments.

    Values for any factory are offered (input_shape, num_classes, seed, …); the user's `--set WHERE.args.NAME=value`
    override them; `where` is their section (data, model, task), for messages. A parameter may say by its annotation
    what the user's value has to be: `Annotated[int, integer(1)]`, of config.types. RequestError: it is something else,
    or the factory does not accept an argument, lacks a value for a parameter, or raises an error.
    """
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any and (unknown := sorted(args.keys() - parameters.keys())):
        ours = {key.removeprefix(f"{where}.") for key in SETTINGS if key.startswith(f"{where}.")} - {"args"}
        problem = f"{where}.args.{unknown[0]}: {_name(factory)} has no such parameter"
        raise RequestError(problem, remedy=did_you_mean(unknown[0], {*parameters, *ours}))
    chosen = {name: value for name, value in offered.items() if name in parameters}
    chosen |= {name: _parse(value, parameters.get(name), f"{where}.args.{name}") for name, value in args.items()}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [name for name, each in parameters.items() if each.default is each.empty and each.kind not in variadic]
    if missing := [name for name in needed if name not in chosen]:
        raise RequestError(
            f"--{where}: {_name(factory)} needs {', '.join(missing)}",
            remedy=f"use --set {where}.args.{missing[0]}=…, or give the parameter a default; "
            f"these are passed automatically: {', '.join(offered)}",
        )
    try:
        return factory(**chosen)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything: reported as a RequestError
        if foreign := explain_torchvision(f"--{where} {_name(factory)}", error):
            raise foreign from error
        if isinstance(error, TrainingError):
            raise
        lines = [f"--{where}: {_name(factory)} raised {type(error).__name__} in {describe_place(error)}: {error}"]
        lines += ["  it was called with"] + [f"    {name} = {quote_value(value)}" for name, value in chosen.items()]
        remedy = f"change {where}.args, or use --debug to see the traceback"
        raise RequestError("\n".join(lines), remedy=remedy) from error


def _parse(value: Any, parameter: inspect.Parameter | None, key: str) -> Any:
    """The user's value, checked by the annotation of its parameter; see `call_factory`."""
    annotation = parameter and parameter.annotation
    kind = next((each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, ValueType)), None)
    if kind is None or (value is None and NoneType in get_args(get_args(annotation)[0])):
        return value
    return kind.read(value, key)


def bind_call(
    function: Callable[..., Any], given: int, args: Mapping[str, Any], *, problem: str, remedy: str
) -> Callable[..., Any]:
    """The function with the user's own arguments, which it must take, to be called with `given` values beside them."""
    try:
        inspect.signature(function).bind(*range(given), **args)
    except TypeError as error:
        raise RequestError(f"{problem}: {error}", remedy=remedy) from error
    return partial(function, **args)


def _not_imported(name: str, module: str, flag: str, error: BaseException) -> BaseException:
    """The error for a module that can't be imported."""
    if isinstance(error, TrainingError):
        return error
    if isinstance(error, SystemExit):
        return RequestError(
            f"{flag} {name}: importing {module} ends the program, as a script does that parses its command line",
            remedy=f'what it does beside its definitions below if __name__ == "__main__":, '
            f"or {name.partition(':')[2]} in a file of its own",
        )
    if foreign := explain_torchvision(f"{flag} {name}", error):
        return foreign
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        remedy = f"pip install 'multigpu-cli[{_EXTRAS[error.name]}]'"
        return RequestError(f"{flag} {name}: the package {error.name} is not installed", remedy=remedy)
    of_ours = isinstance(error, ImportError) and (error.name or "").startswith("multigpu_cli")
    return RequestError(
        f"{flag} {name}: importing {module} raised {type(error).__name__} in {describe_place(error)}: {error}",
        remedy="the current name, or the version of multigpu-cli that the code was written for"
        if of_ours
        else f"python -c 'import {module}' must work where you run this",
    )


def explain_torchvision(what: str, error: BaseException | None = None) -> RequestError | None:
    """Return the error to raise if `error` comes from a torchvision that was built for another torch, otherwise None.

    Such a torchvision, from another index than torch, fails whenever it is imported, also inside timm, torchmetrics,
    transformers and peft, whose errors then name something unrelated. Without an error, the import itself decides.
    """
    # most errors have nothing of torchvision in their traceback, and need no import, which takes a second
    if error and "torchvision" not in "".join(traceback.format_exception(error)):
        return None
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:  # it is not installed, or lacks another package, which the error names
        return None
    except Exception as fault:  # a library that can't be loaded may raise any error
        import torch  # late: torchvision has loaded it

        base, _, build = torch.__version__.partition("+")
        index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
        return RequestError(
            f"{what}: the installed torchvision is not built for torch {torch.__version__} ({fault})",
            # torchvision 0.15 is that of torch 2.0
            remedy=f"pip install --force-reinstall --no-deps 'torchvision==0.{int(base.split('.')[1]) + 15}.*'{index}",
        )
    return None


def describe_place(error: BaseException) -> str:
    """File and line of an error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    lines = [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith("<frozen ")]
    return f"{Path(lines[-1].filename).name}:{lines[-1].lineno}"


def describe_error(error: BaseException) -> str:
    """'ValueError in my_code.py:12: what it says', in one line."""
    return f"{type(error).__name__} in {describe_place(error)}: {(str(error).splitlines() or [''])[0]}"


def _name(factory: Callable[..., Any]) -> str:
    return f"{factory.__module__}:{factory.__qualname__}" if hasattr(factory, "__qualname__") else repr(factory)


@contextmanager
def name_own_code(call: str) -> Iterator[None]:
    """Report an error inside as a TrainingError of the user's own code in this call; out of memory stays what it is."""
    try:
        yield
    except TrainingError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code may raise anything, and sets no exit code
        from multigpu_cli.distributed.world import is_out_of_memory  # late: torch, which the front door lacks

        if is_out_of_memory(error):
            raise
        raise TrainingError(f"{call} raised {describe_error(error)}", remedy="--debug shows the traceback") from error
