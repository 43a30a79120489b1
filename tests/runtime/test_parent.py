import os
import signal
import time

from multigpu_cli.runtime.parent import die_with_parent
from tests.forked import exit_code


def test_a_child_ends_with_its_parent() -> None:
    read, write = os.pipe()

    def parent() -> None:
        if os.fork() == 0:
            die_with_parent()
            os.write(write, b"asked")
            time.sleep(30)
            os._exit(0)
        assert os.read(read, 5) == b"asked"
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(parent) == -signal.SIGKILL
    os.close(write)
    began = time.monotonic()
    assert os.read(read, 1) == b"", "the pipe ends when the last of them is gone"
    assert time.monotonic() - began < 10


def test_a_parent_that_lives_is_no_reason_to_end() -> None:
    assert exit_code(die_with_parent) == 0
