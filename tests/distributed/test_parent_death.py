import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from multigpu_cli.distributed.processes import die_with_parent
from tests.support.fork import exit_code, wait_for_end
from tests.test_house_rules import ROOT


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
    wait_for_end(read)


def test_a_worker_ends_with_its_agent_while_torch_still_loads(tmp_path: Path) -> None:
    """It takes seconds; a worker that is left behind would go on to train beside the run that follows."""
    read, write = os.pipe()
    (tmp_path / "torch.py").write_text(f"import os, time\nos.write({write}, b'loading')\ntime.sleep(30)\n")
    launch_env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    environment = os.environ | launch_env | {"PYTHONPATH": str(tmp_path)}

    def agent() -> None:
        subprocess.Popen([sys.executable, str(ROOT / "main_multi_gpu.py")], env=environment, pass_fds=(write,))
        os.close(write)
        assert os.read(read, 7) == b"loading"
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(agent) == -signal.SIGKILL
    os.close(write)
    wait_for_end(read)


def test_a_parent_that_lives_is_no_reason_to_end() -> None:
    assert exit_code(die_with_parent) == 0
