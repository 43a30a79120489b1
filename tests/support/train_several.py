"""A script for torchrun: one whole run after the other, each argument the JSON of one's flags, with `sets` of --set."""

import json
import sys

from main_multi_gpu import leave
from multigpu_cli.config.sources import resolve
from train_multi_gpu import train

for request in sys.argv[1:]:
    flags = json.loads(request)
    train(resolve(flags, flags.pop("sets", []), None), screen="quiet")
leave(0)
