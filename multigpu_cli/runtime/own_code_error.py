"""Errors of the user's own code in the middle of a run: one message that names the flag, the call and the line."""

from collections.abc import Iterator
from contextlib import contextmanager

from multigpu_cli.errors import TrainingError
from multigpu_cli.runtime.factories import describe_place
from multigpu_cli.runtime.out_of_memory import is_out_of_memory


@contextmanager
def name_own_code(call: str) -> Iterator[None]:
    """Report an error inside as one of the user's own code; out of memory stays what it is.

    Args:
        call: the flag with its value, and what was called.

    Raises:
        TrainingError: says what was raised, and where.
    """
    try:
        yield
    except TrainingError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code may raise anything, and sets no exit code
        if is_out_of_memory(error):
            raise
        message = (str(error).splitlines() or [""])[0]
        raise TrainingError(
            f"{call} raised {type(error).__name__} in {describe_place(error)}: {message}",
            remedy="--debug shows the traceback",
        ) from error
