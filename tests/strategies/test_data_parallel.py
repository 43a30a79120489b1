import torch
from torch import nn

from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.runtime.model_call import bind_call
from multigpu_cli.strategies.base import DataParallel, Single
from tests.strategies.one_step import network, reduce_step, state

TWO = (torch.device("cuda", 0), torch.device("cuda", 1))


def test_a_pass_takes_one_micro_batch_for_each_device() -> None:
    strategy = DataParallel(network(), TWO)
    assert (strategy.name, strategy.replicas_per_process, strategy.loss_factor) == ("dp", 2, 1.0)
    assert isinstance(strategy.callable, nn.DataParallel)


def test_the_step_is_that_of_one_device() -> None:
    """Without CUDA, nn.DataParallel passes on to the model: what is tested here is how a step is cut and divided."""
    plan = BatchPlan(samples=22, micro_batch=3, global_batch=22, workers=2)
    model, alone = network(norm=False), network(norm=False)
    reduce_step(DataParallel(model, TWO), plan, 0)
    reduce_step(Single(alone), BatchPlan(samples=22, micro_batch=22, global_batch=22, workers=1), 0)
    for name, value in state(alone).items():
        assert torch.allclose(torch.tensor(state(model)[name]), torch.tensor(value), atol=1e-12), name


def test_buffers_move_by_the_mean_of_the_passes() -> None:
    plan = BatchPlan(samples=24, micro_batch=3, global_batch=24, workers=2)
    model, alone = network(), network()
    reduce_step(DataParallel(model, TWO), plan, 0)
    reduce_step(Single(alone), BatchPlan(samples=24, micro_batch=6, global_batch=24, workers=1), 0)
    for name, buffer in model.named_buffers():
        assert torch.allclose(buffer, dict(alone.named_buffers())[name]), name


def test_replicas_are_called_with_several_inputs_as_their_model_is() -> None:
    class Sum(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return left + right

    model, inputs = Sum(), (torch.ones(2), torch.ones(2))
    bind_call(model)
    replica = model._replicate_for_data_parallel()
    assert replica(inputs).tolist() == model(inputs).tolist() == DataParallel(model, TWO).callable(inputs).tolist()
