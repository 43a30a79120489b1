"""`make gpu-check`: every way that needs a GPU, one JSON line each as it comes, with this machine's own python3.

    make gpu-check                  # at most nine minutes; run the same command again to resume where it stopped
    make gpu-check BUDGET=300       # seconds
    make gpu-check ONLY=bf16,mfu    # those again, whatever an earlier call found
    make gpu-check RESULTS=FILE     # instead of gpu-check.jsonl: results of earlier calls, and where new ones go

Exit code: 0 all is well; 1 something failed; 75 the time was over, the same command goes on; 2 there is no CUDA device.
Results count for the code and the machine that they were found with. The most telling checks come first. On a simulated
device what only a real one can show is "unverified", never "passed"; what needs more GPUs than there are is "skipped".
"""

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.machine import ROOT, describe_machine
from tests.gpu.registry import CHECKS, carry_out
from tests.gpu.results import FAILED, PASSED, UNVERIFIED, Results
from tests.gpu.runner import about, run_all

_NO_DEVICE = 2


def main(words: Sequence[str]) -> int:
    asked = _parse_arguments(words)
    if asked.child:
        return _child(asked.child[0], Path(asked.child[1]))
    if asked.about:
        _say(describe_machine())
        return 0
    machine = about()
    _say(machine or {"end": "no CUDA device here", "left": asked.only})
    if not machine:
        return _NO_DEVICE
    results = Results(asked.results, machine)
    names = results.left(CHECKS) if asked.only == list(CHECKS) else asked.only
    for line in run_all(names, results, asked.budget, simulated=machine["simulated"], devices=machine["devices"]):
        _say({key: value for key, value in line.items() if key not in ("machine", "time")})
    end, code = results.end(asked.only)
    _say(end)
    return code


def _parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="of this call")
    parser.add_argument("--only", type=_names, default=list(CHECKS), metavar="NAME,…", help=", ".join(CHECKS))
    parser.add_argument("--results", type=Path, default=ROOT / "gpu-check.jsonl", metavar="FILE")
    parser.add_argument("--about", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CHECKS]:
        raise argparse.ArgumentTypeError(f"no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    return names


def _child(function: str, told: Path) -> int:
    """Carry out one check in this process, and write down how it ended."""
    verdict, said, facts = PASSED, "", {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        try:
            facts = carry_out(function, Path(folder))
        except AssertionError as error:
            verdict, said = FAILED, str(error) or traceback.format_exc(limit=-1)
        except ModuleNotFoundError as error:  # of an optional package: nothing is known without it
            verdict, said = UNVERIFIED, str(error)
        except Exception:  # whatever a device or a library raises is what was found
            verdict, said = FAILED, traceback.format_exc(limit=-6)
    told.write_text(json.dumps({"verdict": verdict, "said": said, "facts": facts}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # past torch's exit, where gloo now and then aborts a process that is done


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
