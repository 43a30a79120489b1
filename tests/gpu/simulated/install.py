"""Turns this process, for good, into one on a simulated machine."""

import importlib.util
import os
from importlib.machinery import ExtensionFileLoader
from types import ModuleType
from typing import Any, NamedTuple

from tests.gpu.simulated import build
from tests.gpu.simulated.machine import Machine
from tests.gpu.simulated.record import Record


class Simulated(NamedTuple):
    """What a test can look at and steer in this process.

    Attributes:
        device: the compiled library: `kernels()` launches since the last call, by operator; `memory(n)`;
            `fail_allocation(n, after, at_least)`: on cuda:n, after so many further allocations of at least so many
            bytes, one is out of memory.
        record: what it was asked to do.
        machine: its GPUs.
    """

    device: Any
    record: Record
    machine: Machine


def install(machine: Machine) -> Simulated:
    """From now on torch.cuda, the nccl backend and pynvml are this machine's. There is no way back: fork first.

    Raises:
        NoCompiler: see `build`.
    """
    device = _load_library()
    import torch

    from tests.gpu.simulated import management, parallel, torch_cuda

    torch.set_num_threads(torch.get_num_threads())  # makes a forked process's pool anew: autograd's threads race for it

    visible = machine.visible(os.environ)
    record = Record(machine.record)
    device.begin([machine.gpus[number].memory for number in visible], [machine.uuid(number) for number in visible])
    device.listen(record.heard)
    torch_cuda.put_in_place(device, machine, visible)
    parallel.put_in_place(device)
    management.put_in_place(machine)
    return Simulated(device, record, machine)


def install_from_environment() -> None:
    """The same where the environment names a machine; what sitecustomize calls."""
    if machine := Machine.from_environment(os.environ):
        install(machine)


def _load_library() -> ModuleType:
    import torch.distributed  # noqa: F401  # the library's types stand on torch's

    loader = ExtensionFileLoader(build.NAME, str(build.build_library()))
    spec = importlib.util.spec_from_loader(build.NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
