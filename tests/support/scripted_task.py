"""A task whose evaluations score what scores.json in the working directory lists, one after the other.

Where a file `even` lies there too, it evaluates after each second epoch.
"""

import json
from pathlib import Path
from typing import Any

from multigpu_cli.tasks.supervised import Classification


class Planned(Classification):
    def __init__(self, source: Any, config: Any) -> None:
        super().__init__(source, config)
        self.scores = iter(json.loads(Path("scores.json").read_text()))

    def should_evaluate(self, epoch: int) -> bool:
        return not Path("even").exists() or epoch % 2 == 0

    def score(self, metrics: dict[str, float]) -> tuple[float, ...]:
        return next(self.scores), 0.5
