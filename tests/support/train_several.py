"""A script for torchrun: one whole run after the other, each argument the JSON of one's flags, with `sets` of --set.

In place of flags, `calls` names a function of the Python API's user as module:function, which gets the run folder.
"""

import json
import sys

from main_multi_gpu import leave
from multigpu_cli.capabilities import load
from multigpu_cli.config.sources import resolve
from train_multi_gpu import train

for request in sys.argv[1:]:
    flags = json.loads(request)
    if "calls" in flags:
        load(flags["calls"])(flags["save_dir"])
        continue
    train(resolve(flags, flags.pop("sets", []), None), screen="quiet")
leave(0)
