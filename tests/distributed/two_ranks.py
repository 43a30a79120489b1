"""Runs of two ranks, one after the other, forked from a process that has imported torch and nothing of FSDP.

Each argument is the JSON of a run's flags, with `sets` of --set.
"""

import json
import os
import socket
import sys

import sympy  # type: ignore[import-untyped]  # noqa: F401 - half a second in each rank, and nothing of torch

from main_multi_gpu import leave
from multigpu_cli.config.sources import resolve
from train_multi_gpu import train

for request in sys.argv[1:]:
    flags = json.loads(request)
    with socket.create_server(("localhost", 0)) as server:
        os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])})
    for rank in ("0", "1"):
        if os.fork() == 0:
            os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
            train(resolve(flags, flags.pop("sets", []), None), screen="quiet")
            leave(0)
    if max(os.wait()[1] for _ in range(2)):
        leave(1)
leave(0)
