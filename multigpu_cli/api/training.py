"""`train_with_multi_gpu` and `evaluate_with_multi_gpu`: whole runs of the engine on the user's model and loaders."""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from multigpu_cli import engine
from multigpu_cli.api.from_objects import FromObjects
from multigpu_cli.api.inputs import UserInputs, from_loader, refuse_forgotten_scheduler, with_collate
from multigpu_cli.api.monitoring import get_gpu_info, gpu_utilisation
from multigpu_cli.api.settings import MultiGPUConfig, TrainingMode, to_python_error
from multigpu_cli.checkpoint.run_folder import resolve_folder
from multigpu_cli.checkpoint.weights import broadcast_weights
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.data.loader import Loader
from multigpu_cli.distributed.launch_env import LaunchEnv, refuse_srun_copies
from multigpu_cli.distributed.placement import Placement, check_gpus_exist, count_visible_gpus
from multigpu_cli.distributed.process_group import place_on_machine, process_group
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.launch import run_in_workers
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.open import ResolvedRequest, resolve_request
from multigpu_cli.runtime.model_call import unbind_call
from multigpu_cli.runtime.precision import Precision, agree_on_precision
from multigpu_cli.tasks.base import Loss


def train_with_multi_gpu(
    model: nn.Module,
    train_loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer | None = None,
    criterion: Loss | None = None,
    num_epochs: int = 10,
    strategy: str | TrainingMode = "auto",
    device_ids: list[int] | None = None,
    use_mixed_precision: bool = True,
    gradient_accumulation_steps: int = 1,
    *,
    val_loader: DataLoader[Any] | None = None,
    test_loader: DataLoader[Any] | None = None,
    scheduler: LRScheduler | None = None,
    scheduler_step: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a model in place, on all visible GPUs or under torchrun; with `save_dir`, resume where it stopped.

    Dataset, batch size (per device), collate_fn, loader processes, drop_last and shuffling are those of the loader; a
    custom sampler hears `set_epoch` on every rank, is drawn once per epoch on rank 0, and must draw equally many
    samples in each epoch. All ranks start with rank 0's weights; each must make the same dataset. The model ends with
    the weights that were best on `val_loader`, else with the last. `auto` takes DDP, never DataParallel, for any number
    of GPUs. An epoch's last step also counts if it has fewer micro-batches. A batch that fails is not skipped: errors
    are raised. `max_grad_norm` is None unless given.

    Args:
        model: a DataParallel or DistributedDataParallel around it is removed.
        optimizer: over the model's parameters, any of torch's but LBFGS; None is AdamW with a scaled rate.
        criterion: (outputs, targets) → loss; () mean over the micro-batch, or (n, …) one per sample.
            `nn.CrossEntropyLoss` and `nn.NLLLoss` are means over the global batch, with their weights and ignored
            labels. None is cross-entropy for (n,) classes and (n, t) next tokens, squared error for real numbers.
        strategy: auto, none, dp or DataParallel, ddp or DistributedDataParallel, fsdp. With fsdp an optimizer is
            refused; under torchrun the model stays sharded, and best.pt has its whole weights.
        gradient_accumulation_steps: micro-batches (of the loader's batch size) per optimizer step.
        val_loader, test_loader: data to evaluate after each epoch, and at the end.
        scheduler: of the optimizer, stepped after each `scheduler_step`: "epoch", "step", or None: as its length tells.
        settings: fields of MultiGPUConfig: save_dir, global_batch_size, seed, exact, screen, …

    Returns:
        success, status, epochs_completed, final_loss (mean over the last epoch's samples), training_time (seconds),
        gpu_info, gpu_utilization (per cent), multi_gpu_metrics, error (None), and `summary`, as in summary.json. A run
        that a signal stopped has success False and status "stopped".

    Raises:
        RequestError: an argument is invalid; nothing was written.
        TrainingError: the training failed; its journal shows the last step.
    """
    config = MultiGPUConfig(
        training_mode=TrainingMode.named(strategy),
        device_ids=device_ids,
        use_mixed_precision=use_mixed_precision,
        gradient_accumulation_steps=None if "global_batch_size" in settings else gradient_accumulation_steps,
        num_epochs=num_epochs,
        **{"max_grad_norm": None} | settings,
    )
    train, order, config = from_loader(train_loader, config)
    refuse_forgotten_scheduler(optimizer, scheduler)
    val = None if val_loader is None else with_collate(val_loader, config.seed, "val")
    test = None if test_loader is None else with_collate(test_loader, config.seed, "test")
    inputs = UserInputs(model, train, val, test, criterion, optimizer, scheduler, scheduler_step, order)
    return _results(prepare_run(config, inputs).train())


def _results(summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "success": summary["status"] == "completed",
        "status": summary["status"],
        "epochs_completed": summary["epochs"],
        "final_loss": summary["final"].get("epoch_loss", summary["final"]["train_loss"]),  # the former name
        "training_time": summary["train_seconds"],
        "gpu_info": get_gpu_info(),
        "gpu_utilization": gpu_utilisation(),
        "multi_gpu_metrics": {name: summary[name] for name in ("strategy", "world_size", "devices", "precision")},
        "error": None,
        "summary": summary,
    }


class PreparedRun(NamedTuple):
    """A run from Python that was checked: the engine's settings and objects, where it trains, and what it shows."""

    config: Config
    objects: FromObjects
    launch_env: LaunchEnv | None
    placement: Placement
    screen: str

    @contextmanager
    def open(self) -> Iterator[ResolvedRequest]:
        """`resolve_request` for objects from Python: errors name what Python has, and the model is left as it came."""
        level: Any = "silent" if self.launch_env and self.launch_env.rank else self.screen

        def report(error: TrainingError) -> None:  # of a process that ends where no exception can be raised any more
            Console("quiet", sys.stderr).error(f"error: {error}")

        opening = resolve_request(self.config, self.placement, self.launch_env, Console(level), report, self.objects)
        try:
            with opening as request:
                yield request
        except RequestError as error:
            raise to_python_error(error) from error.__cause__
        finally:
            unbind_call(self.objects.model)

    def train(self) -> dict[str, Any]:
        """Train from start to end, in this process or in several of this machine; returns the summary."""
        return self._train_in_processes() if self.placement.num_processes_to_launch else self._train_here()

    def _train_here(self) -> dict[str, Any]:
        try:
            with ExitStack() as stack:  # and no name for the request, which keeps the run from being collected
                return engine.run(stack.enter_context(self.open()))
        finally:
            if self.launch_env:
                gc.collect()  # ends gloo's threads, which a cycle keeps: at Python's exit they now and then abort

    def _train_in_processes(self) -> dict[str, Any]:
        """On copies of the objects; the model gets their weights."""
        run = self._replace(config=resolve_folder(self.config))
        try:
            ForkingPickler.dumps(run.objects)
        except Exception as error:  # the user's own classes raise anything: reported as what is wrong with the request
            raise RequestError(
                f"{run.placement.reason}: model, data, loss or optimizer can't be sent to other processes ({error})",
                remedy="torchrun --nproc_per_node=N SCRIPT, where each process makes its own; or classes and functions "
                "at the top of a module, no lambdas",
            ) from error
        answers = run_in_workers(run.placement, _train_in_worker, run, max_restarts=run.config.fault.max_restarts)
        summary, problem, remedy = answers[0]
        if problem:
            raise RequestError(problem, remedy=remedy)
        if summary["status"] == "completed":
            run.objects.adopt_weights(summary["save_dir"], World(torch.device("cpu")))
        return dict(summary)


def _train_in_worker(run: PreparedRun) -> tuple[dict[str, Any], str, str]:
    """One worker process: returns the summary, or problem and remedy of a RequestError, which every rank raises."""
    launch_env, (model, optimizer) = LaunchEnv.current(), (run.objects.model, run.objects.optimizer)
    here = place_on_machine(run.config.device, launch_env)
    here = here._replace(backend=run.placement.backend, timeout=run.placement.timeout)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()  # it arrived in memory that all processes share
    if optimizer:
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    try:
        return run._replace(launch_env=launch_env, placement=here).train(), "", ""
    except RequestError as error:
        return {}, error.problem, error.remedy


def prepare_run(config: MultiGPUConfig, inputs: UserInputs) -> PreparedRun:
    """Check settings and objects, turn them into those of the engine, and choose strategy and devices."""
    try:
        inputs = inputs.check(config.seed)
        config = inputs.settings(config)
        frozen, objects = replace_settings(config.frozen(), inputs.names()), inputs.factories(config)
        launch_env = find_launch_env(config)
        placement = resolve_placement(config, frozen, launch_env)
        return PreparedRun(frozen, objects, launch_env, placement, config.screen)
    except RequestError as error:
        raise to_python_error(error) from error.__cause__


def evaluate_with_multi_gpu(
    model: nn.Module,
    test_loader: DataLoader[Any],
    criterion: Loss | None = None,
    strategy: str | TrainingMode = "auto",
    device_ids: list[int] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Loss and accuracy over the loader's samples, each counted once; under torchrun the ranks divide them.

    Without torchrun it runs on one device: no processes are started for an evaluation. The loss is the mean over
    samples, not a mean of batch means. Errors are raised.

    Args:
        model, criterion, device_ids, settings: as for `train_with_multi_gpu`.
        test_loader: its dataset, batch size and collate_fn are used.
        strategy: as for `train_with_multi_gpu`; neither DataParallel nor fsdp is used to evaluate.

    Returns:
        success, test_loss, accuracy (per cent; None without classes), samples, gpu_info, gpu_utilization,
        multi_gpu_metrics, evaluation_time (seconds), error (None).

    Raises:
        RequestError: an argument is invalid.
    """
    began = time.perf_counter()
    config = MultiGPUConfig(training_mode=TrainingMode.named(strategy), device_ids=device_ids, **settings)
    dataset, _, config = from_loader(test_loader, config)
    inputs = UserInputs(model, dataset, criterion=criterion)
    frozen, factories, launch_env, placement, _ = prepare_run(config, inputs)
    timeout = placement.timeout or frozen.fault.hang_timeout
    group = process_group(launch_env, placement.devices[0], timeout=timeout, backend=placement.backend)
    with group as world, ExitStack() as stack:
        data = replace(frozen.data, num_workers=0)
        loader = Loader(dataset, factories.source, data, device=world.device, seed=config.seed)
        task = factories.build_task(frozen, factories.source)
        stack.callback(unbind_call, factories.model)
        network = factories.adapt_model(frozen).to(world.device)
        broadcast_weights(network, world)
        precision = Precision(agree_on_precision(frozen.precision.amp, world, [world.device]).name, world.device)
        task.check_model(network, precision)
        task.group_size = frozen.batch.global_size or 0
        found = task.evaluate(network, loader, world, precision, int(test_loader.batch_size or 1))
        size = world.size
    accuracy = found.metrics.get("accuracy")
    return {
        "success": True,
        "test_loss": found.metrics["loss"],
        "accuracy": None if accuracy is None else 100 * accuracy,
        "samples": found.samples,
        "gpu_info": get_gpu_info(),
        "gpu_utilization": gpu_utilisation(),
        "multi_gpu_metrics": {"strategy": "ddp" if size > 1 else "single", "world_size": size},
        "evaluation_time": time.perf_counter() - began,
        "error": None,
    }


def find_launch_env(config: MultiGPUConfig) -> LaunchEnv | None:
    """Rank and world size of this process: from torchrun, an existing process group, or the config."""
    launch_env = LaunchEnv.current()
    if launch_env is None and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        local = rank if config.local_rank is None else config.local_rank
        launch_env = LaunchEnv(rank, size, local, size, "", 0, attempt=0, agent_store=False)
    if launch_env is None and config.rank is not None and (config.world_size or 1) > 1:
        launch_env = LaunchEnv.for_existing_group(config.rank, config.world_size or 1, config.local_rank)
    if launch_env is None:
        refuse_srun_copies()
        return None
    facts = {"world_size": launch_env.size, "rank": launch_env.rank, "local_rank": launch_env.local_rank}
    for name, fact in facts.items():
        if getattr(config, name) not in (None, fact):
            problem = f"{name}={getattr(config, name)}, but the launcher says {fact}"
            raise RequestError(problem, remedy=f"leave {name} out: it is read from the environment")
    return launch_env


def resolve_placement(config: MultiGPUConfig, frozen: Config, launch_env: LaunchEnv | None) -> Placement:
    """Choose strategy and devices, which must exist and support the backend."""
    device, gpus = frozen.device, count_visible_gpus()
    if launch_env is None and config.rank is None and (config.world_size or 1) > 1:
        device = replace(device, nproc_per_node=config.world_size)
    placement = place_on_machine(replace(device, gpu_ids=None) if launch_env else device, launch_env)
    ids = config.device_ids
    if launch_env and ids:
        check_gpus_exist("device_ids", ids, gpus)
        if gpus > 1 and launch_env.local_rank >= len(ids):
            raise RequestError(f"device_ids {ids}: {launch_env.local_size} processes here need as many GPUs")
        placement = placement._replace(devices=(torch.device("cuda", ids[launch_env.local_rank] if gpus > 1 else 0),))
    if config.backend == "nccl" and placement.devices[0].type == "cpu":
        raise RequestError("backend='nccl' needs GPUs, and none is visible", remedy="leave backend out: gloo on CPU")
    seconds = config.timeout.total_seconds() if config.timeout else None
    return placement._replace(backend=config.backend, timeout=seconds)
