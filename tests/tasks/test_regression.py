import numpy
import pytest
import torch
from sklearn.metrics import mean_absolute_error, mean_squared_error
from torch import Tensor, nn
from torch.nn.functional import huber_loss, l1_loss, mse_loss
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import DataConfig, TaskConfig
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.factories import call_factory
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.tasks.supervised import Regression
from tests.support.ranks import run_on_each_rank
from tests.support.world import CPU


def draw_pair(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)


def task(split: TensorDataset | None = None, **args: str) -> Regression:
    split = split or TensorDataset(*draw_pair(4, 2))
    source = DataSource(train=split, val=split, test=None, input_shape=(2,), num_classes=0)
    return Regression(source, TaskConfig(), **args)


def batch(outputs: Tensor, targets: Tensor) -> Batch:
    return Batch(outputs, targets, torch.arange(len(targets)), 0)


@pytest.mark.parametrize("shape", [(30,), (30, 4)])
@pytest.mark.parametrize(("loss", "torchs"), [("squared", mse_loss), ("absolute", l1_loss), ("huber", huber_loss)])
def test_a_mean_over_samples_is_torchs_own_mean(shape: tuple[int, ...], loss: str, torchs: object) -> None:
    outputs, targets = draw_pair(*shape)
    components = task(loss=loss)
    expected = float(torchs(outputs.double(), targets.double()))  # type: ignore[operator]
    assert float(components.loss_sum(nn.Identity(), batch(outputs, targets))) / 30 == pytest.approx(expected, rel=1e-6)
    measured = components.measure(nn.Identity(), batch(outputs, targets))
    assert float(measured.loss_sum) / 30 == pytest.approx(expected, rel=1e-12)


def test_one_output_stands_for_one_number_and_nothing_is_broadcast() -> None:
    outputs, targets = draw_pair(30)
    boxed = task().loss_sum(nn.Identity(), batch(outputs[:, None], targets))
    assert float(boxed) == float(task().loss_sum(nn.Identity(), batch(outputs, targets)))
    with pytest.raises(ValueError, match=r"outputs \(30,\) for targets \(30, 1\)"):
        task().loss_sum(nn.Identity(), batch(outputs, targets[:, None]))


def test_an_evaluation_agrees_with_scikit_learn_on_any_number_of_workers() -> None:
    inputs, targets = draw_pair(37, 3)
    split = TensorDataset(inputs, targets)

    def evaluate_on_rank(world: World) -> dict[str, float]:
        components = task(split)
        loader = Loader(split, components.source, DataConfig(), device=CPU, seed=1)
        return components.evaluate(nn.Identity(), loader, world, Precision("off", CPU), 4).metrics

    alone = evaluate_on_rank(World(CPU))
    assert run_on_each_rank(3, evaluate_on_rank) == [alone] * 3
    truth, said = numpy.asarray(targets, dtype=float), numpy.asarray(inputs, dtype=float)
    squared = mean_squared_error(truth, said)
    expected = {"loss": squared, "mae": mean_absolute_error(truth, said), "rmse": squared**0.5}
    assert alone == pytest.approx(expected, rel=1e-12)


def test_an_unknown_loss_is_refused() -> None:
    offered = {"source": task().source, "config": TaskConfig()}
    with pytest.raises(RequestError, match=r"task\.args\.loss must .* not 'squard'; did you mean 'squared'\?"):
        call_factory(Regression, offered, {"loss": "squard"}, where="task")
