"""The state of a hook in a checkpoint: plain values and tensors, copied."""

from typing import Any

from torch import Tensor

from multigpu_cli.errors import TrainingError


def copy_state(value: Any, what: str) -> Any:
    """A copy in host memory, in the types that load without running code.

    NumPy's numbers become Python's, and subclasses of plain types the plain ones.

    Args:
        what: returned the value, for the message.

    Raises:
        TrainingError: something in it is neither a plain value nor a tensor.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):  # or a subclass, such as NumPy's float64
        return next(plain(value) for plain in (int, float, str) if isinstance(value, plain))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {copy_state(name, what): copy_state(entry, what) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(copy_state(entry, what) for entry in value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    raise TrainingError(
        f"{what} a {type(value).__module__}.{type(value).__name__}, which a checkpoint can't hold",
        remedy="numbers, texts and tensors, in dicts, lists and tuples (an array: torch.tensor(array))",
    )
