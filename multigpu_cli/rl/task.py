"""Proximal policy optimization: rollouts in environments, and updates from them."""

from collections.abc import Callable
from math import fsum
from typing import Any

import torch
from torch import Tensor, nn

from multigpu_cli.config.schema import DataConfig, TaskConfig
from multigpu_cli.data.loader import Batch, BatchStream
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World, all_gather_object, all_reduce_sum
from multigpu_cli.errors import RequestError
from multigpu_cli.rl.env_source import EnvSource
from multigpu_cli.rl.metrics import Episodes
from multigpu_cli.rl.objective import losses
from multigpu_cli.rl.policy import build_policy
from multigpu_cli.rl.stream import RolloutStream
from multigpu_cli.runtime.module_state import eval_mode
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.tasks.base import BatchMetrics, Evaluation, Task


class PPO(Task):
    """An epoch is one update: a rollout in all environments, and some passes over it in minibatches.

    Networks are called with observations (T, n, *shape), begun (T, n) and memory (n, S), and return outputs (T, n, k),
    values (T, n) and the memory after the last step; their attribute `memory_size` is S, 0 for those without memory.
    The better result has the greater mean reward of an episode.
    """

    expected_shapes = (
        "outputs (T, n, k), values (T, n) and memory (n, S), for observations (T, n, …), begun (T, n), memory"
    )

    def __init__(self, source: DataSource, config: TaskConfig, **args: Any) -> None:
        """The source has the settings that the `args` are."""
        super().__init__(source, config)
        if not isinstance(source, EnvSource):
            raise RequestError("--task ppo needs environments, and --data names a dataset", remedy="another --task")
        self.acting, self.settings, self.policy = source, source.settings, build_policy(source.action)

    def train_stream(self, config: DataConfig, world: World, seed: int) -> BatchStream:
        self.rollouts = RolloutStream(self.acting, self.policy, world, seed, lambda: self.moved())
        return self.rollouts

    def loader(self, split: str, config: DataConfig, world: World, seed: int) -> Episodes:
        return Episodes(self.acting, split, world, self.settings.evaluate_episodes)

    def check_model(self, model: nn.Module, precision: Precision) -> None:
        """Raise RequestError if the model is not an actor-critic, or can't learn from whole sequences."""
        if not isinstance(memory := getattr(model, "memory_size", None), int):
            problem = f"--model: a {type(model).__name__} is not an actor-critic: it has no memory_size"
            raise RequestError(problem, remedy="--model actor-critic, lstm-actor-critic or clstm-actor-critic")
        if self.settings.normalize_observations and not hasattr(model, "normalizer"):
            raise RequestError(
                f"task.args.normalize_observations: a {type(model).__name__} has no normalizer to keep the statistics",
                remedy="leave it out, or self.normalizer = multigpu_cli.models.networks.mlp.Normalizer(input_shape)",
            )
        if memory and self.acting.group % self.acting.minibatches:
            raise RequestError(
                f"--env-group {self.acting.group}: a network with a memory learns from whole sequences, and "
                f"{self.acting.minibatches} minibatches do not divide the environments of a group",
                remedy="fewer task.args.minibatches (a larger --batch-size), or a larger --env-group",
            )
        self.rollouts.start(model, precision)

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        seen, then = batch.inputs, batch.targets
        outputs, values, _ = model(seen.observations, seen.begun, seen.memory)
        log_probabilities, entropies = self.policy.evaluate_actions(outputs.float(), then.actions)
        loss, figures = losses(log_probabilities, entropies, values.float(), then, self.settings)
        self.rollouts.metrics.record_step(seen.slot, batch.micro_batch_index, figures)
        return loss.sum()

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        seen = batch.inputs
        outputs, values, memory = model(seen.observations, seen.begun, seen.memory)
        shapes = [tuple(value.shape) for value in (outputs, values, memory)]
        wanted = [(*seen.begun.shape, self.policy.outputs), tuple(seen.begun.shape), tuple(seen.memory.shape)]
        if shapes != wanted:
            raise ValueError(f"outputs, values and memory of shapes {shapes}, not {wanted}")
        return BatchMetrics(values.double().sum(), torch.zeros(1, dtype=torch.int64))

    def score(self, metrics: dict[str, float]) -> tuple[float, ...]:
        return (metrics["reward"],)

    def should_evaluate(self, epoch: int) -> bool:
        return epoch % self.settings.evaluate_every == 0

    def stop_reason(self) -> str:
        wanted, played = self.config.episodes, self.rollouts.metrics.episodes
        return f"{played:,} episodes" if wanted and played >= wanted else ""

    def log_fields(self, seconds: float) -> dict[str, Any]:
        return self.rollouts.metrics.read(seconds)

    def state(self, world: World) -> dict[str, Any]:
        mine = self.rollouts.state()
        groups = [group for part in all_gather_object(world, mine.pop("groups")) for group in part]
        return mine | {"groups": groups}

    def load_state(self, state: dict[str, Any], world: World) -> str:
        anew = torch.tensor(float(self.rollouts.load_state(state["groups"], state)), device=world.device)
        count = int(all_reduce_sum(world, anew))
        return f"{count} environments could not be restored and restarted their episode" if count else ""

    def evaluate(
        self, model: nn.Module, loader: Any, world: World, precision: Precision, batch_size: int
    ) -> Evaluation:
        """Play every episode once, on one worker, always with the most likely action."""

        def network(observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with precision.autocast():
                return model(observations, begun, memory)  # type: ignore[no-any-return]

        with eval_mode(model):
            size = int(model.memory_size)  # type: ignore[arg-type]
            played = [group for group in self.run_passes(world, loader.play(network, self.policy, size)) if group]
        names = next(part for part in all_gather_object(world, [list(found) for _, found in played]) if part)[0]
        slots = torch.zeros(len(names), loader.size, dtype=torch.float64, device=world.device)
        for numbers, found in played:
            for row, name in zip(slots, names, strict=True):
                row[numbers.start : numbers.stop] = found[name]
        means = {
            name: fsum(row) / loader.size
            for name, row in zip(names, all_reduce_sum(world, slots).tolist(), strict=True)
        }
        details: dict[str, Any] = next(filter(None, all_gather_object(world, loader.details())), {})
        return Evaluation(means, loader.size, details)

    def plots(self, summary: dict[str, Any]) -> dict[str, bytes]:
        if "equity_curve" not in summary:
            return {}
        from multigpu_cli.monitor.plot_style import draw_equity

        return {"equity_curve.png": draw_equity(**summary["equity_curve"])}
