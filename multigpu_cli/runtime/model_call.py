"""How a network is called with a batch: whole, one argument for each part, or by name, as its `forward` is declared."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_origin

import torch
from torch import Tensor, nn

from multigpu_cli.errors import RequestError

TARGETS = ("target", "targets", "label", "labels", "y")
"""What the target of a sample is called, and the parameter of a network that is given it."""

IGNORED = -100  # a target that does not count: torch's own default
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Labelled(NamedTuple):
    """Inputs together with their targets, for a network that computes its own loss from both."""

    inputs: Any
    targets: Any


@dataclass(frozen=True)
class ModelCall:
    """The parameters of a network's `forward`, and what they make of the inputs of a batch.

    As a forward pre-hook it turns `model(inputs)` into the call that the network wants; a call with several arguments,
    or with named ones, stays as it is.

    - A tuple is one argument for each part, a mapping one for each entry by name; anything else is one argument.
    - `forward(batch)` with one parameter gets a tuple or a mapping whole; so does a first parameter that is annotated
      as one. A parameter with a default other than None is an option, and no input.
    - A mapping that has none of the parameters' names is one argument, where one will do.
    """

    inputs: tuple[str, ...]  # parameters that an input may be for, in order
    required: tuple[str, ...]  # those of them without a default
    names: tuple[str, ...]  # all that may be given by name
    takes_more: bool  # there is an *args; `takes_any`: there is a **kwargs
    takes_any: bool
    takes_whole: bool  # the first parameter is annotated as a tuple or a mapping

    @classmethod
    def of(cls, model: nn.Module) -> "ModelCall":
        """By the signature of its `forward`, also within torch.compile."""
        parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters.values()
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        inputs = [p for p in positional if p.default is p.empty or p.default is None]
        return cls(
            inputs=tuple(p.name for p in inputs),
            required=tuple(p.name for p in inputs if p.default is p.empty),
            names=tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)),
            takes_more=any(p.kind is p.VAR_POSITIONAL for p in parameters),
            takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
            takes_whole=bool(positional) and _is_container(positional[0].annotation),
        )

    @property
    def takes_one(self) -> bool:
        """Whether there is one parameter for a batch, whatever that is; (*args, **kwargs) says nothing else."""
        both = self.takes_more and self.takes_any
        return (not self.inputs and both) or (len(self.inputs) == 1 and not self.takes_more and not self.takes_any)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Arguments | None:
        """The arguments in place of those of `model(inputs)`; None leaves them."""
        return None if named or len(args) != 1 or isinstance(args[0], Tensor) else self.arguments(args[0])

    def arguments(self, inputs: Any) -> Arguments:
        """Positional and named arguments; the RequestError says which input `forward` does not take, or misses."""
        if isinstance(inputs, Labelled):
            return self._with_targets(*inputs)
        if type(inputs) is tuple:
            too_many = len(inputs) > len(self.inputs) and not self.takes_more
            whole = self.takes_one or self.takes_whole or (too_many and len(self.required) == 1)
            return ((inputs,) if whole else self._check_count(inputs)), {}
        return self._by_name(inputs) if isinstance(inputs, Mapping) else ((inputs,), {})

    def _check_count(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        most = len(parts) if self.takes_more else len(self.inputs)
        if not len(self.required) <= len(parts) <= most:
            problem = f"--model: {self} does not take the {len(parts)} parts of a sample"
            raise RequestError(problem, remedy=f"as many parameters as parts, or {_WHOLE}")
        return parts

    def _by_name(self, entries: Mapping[str, Any]) -> Arguments:
        foreign = not any(name in self.names for name in entries)
        for_one = len(self.required) == 1 or not (self.required or self.takes_any)
        if self.takes_one or self.takes_whole or (foreign and for_one):
            return (entries,), {}
        self.check_names(entries)
        if missing := [name for name in self.required if name not in entries]:
            problem = f"--model: {self} needs {', '.join(missing)}, and a sample has {', '.join(map(str, entries))}"
            raise RequestError(problem, remedy=f"an entry of that name, a default of None, or {_WHOLE}")
        return (), dict(entries)

    def check_names(self, entries: Iterable[str]) -> None:
        """Raises RequestError for entries of a sample that are no parameters: a second target must be no input."""
        if not self.takes_any and (unknown := [str(name) for name in entries if name not in self.names]):
            remedy = f"leave {unknown[0]} out of the samples, add a parameter of that name, or {_WHOLE}"
            raise RequestError(f"--model: {self} takes no {', '.join(unknown)}, which a sample has", remedy=remedy)

    def _with_targets(self, inputs: Any, targets: Any) -> Arguments:
        if self.takes_one:
            return (Labelled(inputs, targets),), {}
        taken = inputs if isinstance(inputs, Mapping) else {}
        free = [name for name in self.names if name not in taken]
        chosen = [name for name in free if name in TARGETS]
        if not chosen and not isinstance(inputs, Mapping):
            spread = type(inputs) is tuple and not self.takes_whole
            return self._check_count((*inputs, targets) if spread else (inputs, targets)), {}
        chosen = chosen or [name for name in free if name in self.required]
        if len(chosen) != 1:
            problem = f"--model: {self} has no parameter for the targets"
            raise RequestError(problem, remedy=f"one called {' or '.join(TARGETS)}")
        rest = self._without(chosen[0])
        args, named = rest.arguments(inputs)
        return (), dict(zip(rest.inputs, args, strict=False)) | named | {chosen[0]: targets}

    def _without(self, name: str) -> "ModelCall":
        inputs, required, names = (
            tuple(each for each in kind if each != name) for kind in (self.inputs, self.required, self.names)
        )
        return replace(self, inputs=inputs, required=required, names=names)

    def __str__(self) -> str:
        more = [*(["*args"] if self.takes_more else []), *(["**kwargs"] if self.takes_any else [])]
        return f"forward({', '.join([*dict.fromkeys([*self.inputs, *self.names]), *more])})"


_WHOLE = "forward(self, batch) for the whole sample"


def bind_call(model: nn.Module) -> None:
    """Let `model(inputs)` work for the inputs of a batch, where `forward` has more than one parameter for them."""
    if isinstance(model, torch.jit.ScriptModule) or _find_call(model):
        return
    call = ModelCall.of(model)
    if not call.takes_one:
        model.register_forward_pre_hook(call, with_kwargs=True)


def unbind_call(model: nn.Module) -> None:
    """Undo `bind_call`: somebody's own network is left as it came."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, ModelCall):
            del model._forward_pre_hooks[key], model._forward_pre_hooks_with_kwargs[key]


def bind_arguments(model: nn.Module, inputs: Any) -> Arguments:
    """What `forward` is called with for `model(inputs)`."""
    call = _find_call(model)
    return (call and call(model, (inputs,), {})) or ((inputs,), {})


class CallRecorder:
    """Notes how a network is called, and what it returns, as long as the context lasts."""

    def __init__(self, model: nn.Module) -> None:
        self._callees: tuple[nn.Module, ...] = getattr(model, "callees", (model,))
        self._called: nn.Module | None = None  # the outer one of them
        self.calls: list[Arguments] = []
        self.outputs: list[Any] = []  # a call that failed has none

    def __enter__(self) -> "CallRecorder":
        self._hooks = [each.register_forward_pre_hook(self._note_call, with_kwargs=True) for each in self._callees]
        self._hooks += [each.register_forward_hook(self._note_output) for each in self._callees]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note_call(self, callee: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._called = self._called or callee
        if callee is self._called:
            self.calls.append((args, named))

    def _note_output(self, callee: nn.Module, _: Any, output: Any) -> None:
        if callee is self._called:
            self.outputs.append(output)

    def describe(self) -> str:
        """How the network was called first, and why, in words; empty for a lone tensor."""
        if self._called is None:
            return ""
        args, named = self.calls[0]
        if not named and len(args) == 1:
            kind = "tuple" if isinstance(args[0], tuple) else "dict" if isinstance(args[0], Mapping) else "list"
            whole = f"model(batch): its forward takes one argument, and gets the whole {kind}"
            return whole if isinstance(args[0], tuple | list | Mapping) else ""
        parameters = list(inspect.signature(self._called.forward).parameters)
        parts = [parameters[place] if place < len(parameters) else "…" for place in range(len(args))]
        parts += [f"{name}=…" for name in named]
        reason = "by name, as its forward has them" if named else "one argument for each part of a sample"
        return f"model({', '.join(parts)}): {reason}"


def _find_call(model: nn.Module) -> ModelCall | None:
    return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, ModelCall)), None)


def _is_container(annotation: Any) -> bool:
    """Whether an annotation, or its text, is a tuple or a mapping."""
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2].lower() in ("tuple", "dict", "mapping")
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, tuple | Mapping)
