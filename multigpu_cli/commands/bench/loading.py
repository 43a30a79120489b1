"""bench --data-only: samples per second with 0, 1, 2, 4, … loader processes, and which number to take."""

import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import Config
from multigpu_cli.data.loader import Loader
from multigpu_cli.planning.batch import plan_batches
from multigpu_cli.runtime.choose_strategy_and_devices import count_cores, cuda_devices, usable_gpus
from multigpu_cli.tasks.open_data import check_has_samples, open_data

_SECONDS = 3.0  # of each pass at most
_ENOUGH = 0.95  # of the best rate


@dataclass(frozen=True)
class LoadingRates:
    """The measured rates.

    Attributes:
        where: the loader's description of where its data is.
        rates: samples a second by the number of loader processes, one figure a repetition; 0 alone for data in memory.
        advice: the flag to give, with the reason.
    """

    where: str
    rates: dict[int, list[float]]
    advice: str


def measure_loading(config: Config, repetitions: int) -> LoadingRates:
    """Fetch, prepare and augment batches as a training would, in turns with each number of processes.

    Raises:
        RequestError: the dataset can't be opened.
    """
    check_has_samples(config, "bench --data-only")
    source = open_data(config)
    in_memory, cores = isinstance(source.train, TensorDataset), count_cores()
    processes = [0] if in_memory else sorted({0, cores, *(count for count in (1, 2, 4, 8) if count <= cores)})
    (device,) = cuda_devices(usable_gpus(config.device)[:1]) or (torch.device("cpu"),)
    size = 32 if config.batch.size == "auto" else int(config.batch.size)
    rates: dict[int, list[float]] = {number: [] for number in processes}
    for number in processes * repetitions:
        data = replace(config.data, num_workers=number)
        with closing(Loader(source.train, source, data, device=device, seed=config.reproducibility.seed)) as loader:
            rates[number].append(_measure_rate(loader, size))
    return LoadingRates(loader.data_location, rates, _choose_advice(rates, in_memory=in_memory))


def _measure_rate(loader: Loader, size: int) -> float:
    """Samples per second after the first batch, which starts the processes; of two epochs where one has one batch."""
    plan = plan_batches(samples=loader.size, micro_batch=min(size, loader.size), workers=1)
    samples, began, last = 0, 0.0, 0.0
    synchronize = torch.get_device_module(loader.device).synchronize
    for epoch in count():
        for _, work in loader.epoch(plan, epoch, 0, 0, 1):
            for batch in work:
                synchronize()
                last = time.perf_counter()
                if began:
                    samples += len(batch.sample_indices)
                else:
                    began = last
            if last - began > _SECONDS:
                break
        if last > began:
            break
    return samples / (last - began)


def _choose_advice(rates: dict[int, list[float]], *, in_memory: bool) -> str:
    if in_memory:
        return "the data is in memory and indexed by whole batches: --num-workers has no effect"
    typical = {count: statistics.median(each) for count, each in rates.items()}
    best = max(typical.values())
    enough = min(count for count, rate in typical.items() if rate >= _ENOUGH * best)
    return f"--num-workers {enough}: {typical[enough]:,.0f} samples/s; more processes add less than 5 %"


def format_loading(loading: LoadingRates) -> Iterator[str]:
    """The rates and the advice."""
    yield f"loading alone: {loading.where}"
    for number, each in loading.rates.items():
        spread = f"({min(each):,.0f} to {max(each):,.0f})"
        yield f"{number:>4} loader process(es)  {statistics.median(each):>10,.0f} samples/s {spread}"
    yield loading.advice
