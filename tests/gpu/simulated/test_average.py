"""On a GPU a skipped step leaves the average alone, though the host does not know which step was skipped."""

import pytest
import torch
from torch import nn

from multigpu_cli.optimizers.eval_weights import EMAModel
from tests.gpu.simulated.gpus import alone
from tests.gpu.simulated.install import Simulated

STEADY = 2  # by then the count is on the device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_that_of_the_steps_that_were_taken(dtype: torch.dtype) -> None:
    """Its bits are those of a run on the CPU that never sees the skipped steps; the host waits for nothing."""

    def work(sim: Simulated) -> None:
        torch.manual_seed(0)
        host = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(dtype)
        host.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        device = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("cuda", dtype)
        device.register_buffer("mask", host.get_buffer("mask").to("cuda"))
        device.load_state_dict(host.state_dict())
        expected, shadow = EMAModel(host, 0.4), EMAModel(device, 0.4)
        for number in range(12):
            skipped = torch.tensor(float(number in (0, 3, 4)), device="cuda")
            if not skipped:
                for parameter in host.parameters():
                    nn.init.normal_(parameter)
                expected.update_parameters(host)
                device.load_state_dict(host.state_dict())
            with sim.record.watching() as events:
                shadow.update_parameters(device, skipped)
            assert number < STEADY or not [event for event in events if event.kind in ("sync", "pageable")]
            found, wanted = shadow.state_dict(), expected.state_dict()
            assert all(torch.equal(found[name].cpu(), wanted[name]) for name in wanted), number

    alone(work)
