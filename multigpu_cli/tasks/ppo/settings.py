"""The settings of PPO in task.args, validated."""

from dataclasses import dataclass

from multigpu_cli.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """The numbers of PPO (Schulman et al. 2017, arXiv 1707.06347; defaults as in CleanRL's ppo.py).

    Attributes:
        rollout: steps that each environment takes between two updates.
        passes: of the optimizer over each rollout.
        minibatches: optimizer steps in one pass; --batch-size gives the same in samples.
        gamma, gae_lambda: discount, and the trade of bias for variance in advantages (Schulman et al. 2015).
        clip: limit of the change of a probability ratio.
        value_clip: limit of the change of a value in one update; 0: no limit.
        value_weight, entropy_weight: of those terms in the loss.
        target_kl: an update ends after a pass that moved the policy further than this; 0: never.
        normalize_advantages: over the global batch.
        normalize_observations, normalize_rewards: by running statistics over all environments of all workers.
        evaluate_every: updates between two evaluations; there is one at the end.
        evaluate_episodes: of each evaluation.
    """

    rollout: int = 128
    passes: int = 4
    minibatches: int = 4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    target_kl: float = 0.0
    normalize_advantages: bool = True
    normalize_observations: bool = False
    normalize_rewards: bool = False
    evaluate_every: int = 10
    evaluate_episodes: int = 20

    def __post_init__(self) -> None:
        for name in ("rollout", "passes", "minibatches", "evaluate_every", "evaluate_episodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"task.args.{name}: {value!r}", remedy="a whole number of at least 1")
        for name in ("gamma", "gae_lambda", "clip", "value_clip", "value_weight", "entropy_weight", "target_kl"):
            value, most = getattr(self, name), 1.0 if name in ("gamma", "gae_lambda", "clip") else float("inf")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise RequestError(
                    f"task.args.{name}: {value!r}",
                    remedy="a number from 0 to 1" if most == 1 else "a number of at least 0",
                )
        for name in ("normalize_advantages", "normalize_observations", "normalize_rewards"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"task.args.{name}: {getattr(self, name)!r}", remedy="true or false")
