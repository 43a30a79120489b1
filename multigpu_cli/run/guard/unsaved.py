"""Refuses what `after_step` of a model or a task may not do: replace parameters, change what no checkpoint contains."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from multigpu_cli.errors import TrainingError
from multigpu_cli.run.guard.findings import list_names
from multigpu_cli.run.guard.state import Snapshot

Version = tuple[int, ...]  # numbers that change if user code changes what it may not change of a tensor


class UnsavedState:
    """The parts of a model, and of other objects of the user by name, that a resumed run would not have.

    Python attributes are compared in the first call only, because reading them takes long, and not if `guard` is off or
    if a module saves some by its get_extra_state.
    """

    def __init__(self, model: nn.Module, others: Mapping[str, object], *, guard: bool) -> None:
        self._model, self._others = model, others
        default = nn.Module.get_extra_state
        self._reads_attributes = guard and all(type(part).get_extra_state is default for part in model.modules())
        self._unsaved: Sequence[str] | None = None  # tensors that no checkpoint contains; None before the first call

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Raise TrainingError if user code inside the context changes unsaved state, replaces parameters or shapes.

        The optimizer would not notice another parameter, and a resumed run could not load a buffer of another shape.
        """
        attributes = Snapshot(self._model, self._others) if self._reads_attributes else None
        before = self._read_versions()
        yield
        after = self._read_versions()
        changed = [name for name, version in before.items() if after.get(name) != version]
        unsaved = [name for name in changed if name in (self._unsaved or ())]
        if changed and not unsaved:
            problem = f"after_step replaces parameters, or buffers by others of another shape: {list_names(changed)}"
            raise TrainingError(problem, remedy="write their values: parameter.copy_(…), parameter.lerp_(…)")
        if attributes:
            unsaved += attributes.list_changed(Snapshot(self._model, self._others), 0.0)
            self._reads_attributes = False
        if unsaved:
            problem = f"after_step changes {list_names(unsaved)}, which no checkpoint contains"
            remedy = "keep it in a buffer that is saved (register_buffer without persistent=False)"
            raise TrainingError(problem, remedy=f"{remedy}; for attributes of no importance --set guard=off")

    def _read_versions(self) -> dict[str, Version]:
        """Return the identity of each parameter, the shape of each buffer, and whether unsaved tensors were written."""
        parameters, buffers = dict(self._model.named_parameters()), dict(self._model.named_buffers())
        tensors = parameters | buffers
        if self._unsaved is None:
            saved = {id(value) for value in self._model.state_dict(keep_vars=True).values()}
            self._unsaved = [name for name, value in tensors.items() if id(value) not in saved]
        versions: dict[str, Version] = {name: tuple(value.shape) for name, value in buffers.items()}
        versions |= {name: (id(value), value.data_ptr()) for name, value in parameters.items()}
        written = {name: tensors[name] for name in self._unsaved if name in tensors}
        return versions | {name: (id(value), value._version) for name, value in written.items()}
