"""One process of the selftest: the only worker, or one of several."""

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.loader import Batch
from multigpu_cli.faults.stop import StopRequest
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.assemble_run import assemble_run
from multigpu_cli.run.build_components import build_components
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.fit_batch_sizes_to_memory import warm_up
from multigpu_cli.run.part import load_parts
from multigpu_cli.run.prepare_spec import prepare_spec
from multigpu_cli.run.run import Run
from multigpu_cli.runtime.choose_strategy_and_devices import Placement, count_cores
from multigpu_cli.runtime.torch_settings import set_threads_per_rank
from multigpu_cli.runtime.world import World

Measured = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SelftestProcess:
    """What one process of the test works with.

    Attributes:
        config: the user's settings, with the global batch fixed and a temporary run folder.
        placement, world: as for a run.
        source: the dataset, shortened.
        workers: of the run with several; the single worker takes as many threads as each of them.
        steps: length of the runs that are compared.
        exact: whether --exact is tried too.
        batch: the samples on which the model is tried; None takes the first ones.
    """

    config: Config
    placement: Placement
    world: World
    source: DataSource
    workers: int
    steps: int
    exact: bool = True
    batch: Batch | None = None

    @property
    def alone(self) -> "SelftestProcess":
        """The same process without the other workers."""
        config, device = replace_settings(self.config, {"num_workers": 0}), self.world.device
        single = Placement("single", (device,), 0, "selftest")
        return replace(self, config=config, placement=single, world=World(device))

    def components(self, **overrides: Any) -> TrainComponents:
        """Newly built components of a training."""
        config = replace_settings(self.config, overrides)
        spec = prepare_spec(config, self.placement, self.world, source=self.source)
        set_threads_per_rank(self.workers, count_cores(), exact=config.reproducibility.exact)
        components = build_components(spec, self.world, load_parts(spec, self.world))
        warm_up(components)
        return components

    def run(self, stack: ExitStack, **overrides: Any) -> Run:
        """A run that is ready for its first step."""
        components = self.components(**overrides)
        stack.callback(components.loaders.close)
        watch = Watchdog(self.world, components.config.fault.hang_timeout, lambda error: None)
        return assemble_run(components, Console("silent"), StopRequest(), watch, stack)


def first_batch(process: SelftestProcess) -> Batch:
    """The first micro-batch of the first step."""
    components = process.alone.components()
    with closing(components.loaders.train):
        _, work = next(components.loaders.train.epoch(components.plan.batches, 0, 0, 0, 1))
        return next(work)
