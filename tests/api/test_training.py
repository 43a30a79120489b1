"""train_with_multi_gpu and evaluate_with_multi_gpu: a user's own objects in, the engine's promises out."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler

from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from tests.support.fork import exit_code
from tests.support.interrupted_evaluation import strike, terminate_self
from tests.support.optimizers import Manifold, Noisy, ScheduleFreeSGD
from tests.support.ranks import run_on_each_rank
from tests.support.user_inputs import Points, loader, network, weights
from train_multi_gpu import evaluate_with_multi_gpu, train_with_multi_gpu

QUIET: dict[str, Any] = {"screen": "silent"}


def test_it_does_what_a_plain_loop_does(tmp_path: Path) -> None:
    """Batches in order, an epoch's last one short: the same weights as torch's own few lines, in the same objects."""
    model, plain = network().eval(), network()
    modes: list[bool] = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    optimizer, by_hand = (torch.optim.RMSprop(m.parameters(), lr=1e-2) for m in (model, plain))
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)
    results = train_with_multi_gpu(
        model, loader(20), optimizer, criterion, num_epochs=2, save_dir=str(tmp_path / "run"), **QUIET
    )
    losses = []
    for _ in range(2):
        for inputs, targets in loader(20):
            by_hand.zero_grad()
            loss = criterion(plain(inputs), targets)
            loss.backward()
            by_hand.step()
            losses.append(loss.item() * len(inputs))
    assert weights(model) == pytest.approx(weights(plain), abs=1e-6)
    assert modes[-6:] == [True] * 6, "although it came in evaluation mode, as pretrained networks do"
    assert results["final_loss"] == pytest.approx(sum(losses[3:]) / 20, abs=1e-6)
    assert (results["success"], results["epochs_completed"], results["gpu_info"]["gpu_count"]) == (True, 2, 0)
    assert (tmp_path / "run" / "last.pt").is_file()


class Following(nn.Module):
    """A network with the mean of its outputs."""

    mean: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)  # type: ignore[no-any-return]

    def after_step(self, step: int, outputs: Tensor) -> None:
        self.steps.fill_(step)
        self.mean.copy_(outputs.mean(0))


def test_after_step_gets_the_outputs_of_the_global_batch(tmp_path: Path) -> None:
    model = Following()
    expected = model.network(torch.cat([inputs for inputs, _ in loader(24)])).mean(0).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = str(tmp_path / "run")
    train_with_multi_gpu(model, loader(24), optimizer, num_epochs=1, global_batch_size=24, save_dir=folder, **QUIET)
    assert int(model.steps) == 1
    torch.testing.assert_close(model.mean, expected)


def test_ranks_share_the_work_of_one_whatever_they_drew_before(tmp_path: Path) -> None:
    """A sampler of the user's, a scheduler, three ranks whose weights differed, in a group that is there already."""

    def run(world: World | None) -> tuple[list[float], str, dict[str, Any]]:
        rank, size = (world.rank, world.size) if world else (0, 1)
        model = network(rank)
        torch.manual_seed(rank)
        sampler = WeightedRandomSampler([1.0] * 24 + [3.0] * 24, 40)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        results = train_with_multi_gpu(
            model,
            DataLoader(Points(), batch_size=4, sampler=sampler),
            optimizer,
            nn.CrossEntropyLoss(),
            num_epochs=2,
            val_loader=loader(10),
            scheduler=StepLR(optimizer, 1, 0.5),
            global_batch_size=16,
            exact=True,
            save_dir=str(tmp_path / f"run-{size}"),
            settings={"trace_samples": True},
            **QUIET,
        )
        found = evaluate_with_multi_gpu(model, loader(10), nn.CrossEntropyLoss(), **QUIET)
        assert optimizer.param_groups[0]["lr"] == 0.005
        return weights(model), results["summary"]["fingerprint"], {k: found[k] for k in ("test_loss", "accuracy")}

    alone, *ranks = run(None), *run_on_each_rank(3, run)
    assert ranks == [alone] * 3
    traces = [(tmp_path / f"run-{size}" / "samples.jsonl").read_text() for size in (1, 3)]
    assert traces[0] == traces[1]
    drawn = [number for line in traces[0].splitlines() for number in json.loads(line)["samples"]]
    assert len(drawn) == 80
    assert drawn[:40] != drawn[40:]


def train_sharded(folder: str, **more: Any) -> nn.Module:
    """Whose first weights differ from rank to rank."""
    model = network(more.pop("seed", 0))
    train_with_multi_gpu(
        model, loader(20), num_epochs=2, val_loader=loader(10), global_batch_size=16, save_dir=folder, **QUIET, **more
    )
    return model


def read_best(folder: Path) -> list[float]:
    return torch.cat([value.flatten() for value in torch.load(folder / "best.pt")["model"].values()]).tolist()


def test_a_model_of_ones_own_is_sharded_and_its_whole_weights_are_in_best_pt(tmp_path: Path) -> None:
    def run(world: World) -> str:
        model = train_sharded(str(tmp_path / "three"), strategy="fsdp", seed=world.rank)
        with pytest.raises(RequestError) as raised:
            evaluate_with_multi_gpu(model, loader(10), **QUIET)
        return str(raised.value)

    alone = weights(train_sharded(str(tmp_path / "alone")))
    assert ["its weights are divided over processes" in said for said in run_on_each_rank(3, run)] == [True] * 3
    assert read_best(tmp_path / "three") == pytest.approx(alone, abs=1e-6)


@pytest.mark.slow
def test_processes_that_are_started_shard_copies_and_the_model_gets_the_whole_weights(tmp_path: Path) -> None:
    alone, model = (
        train_sharded(str(tmp_path / name), **more)
        for name, more in (("alone", {}), ("two", {"strategy": "fsdp", "world_size": 2}))
    )
    assert weights(model) == pytest.approx(weights(alone), abs=1e-6)


@pytest.mark.parametrize("each", ["epoch", "step"])
def test_a_run_goes_on_with_optimizer_and_scheduler_where_it_stopped(tmp_path: Path, each: str) -> None:
    def run(folder: str, **more: Any) -> list[float]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train_with_multi_gpu(
            model,
            loader(shuffle=True),
            optimizer,
            nn.CrossEntropyLoss(),
            num_epochs=3,
            scheduler=StepLR(optimizer, 1, 0.7),
            scheduler_step=each,
            save_dir=str(tmp_path / folder),
            settings=more,
            **QUIET,
        )
        return weights(model)

    whole = run("whole")
    assert run("parts", max_steps=6) != whole
    assert run("parts", max_steps=9) != whole
    assert run("parts") == whole
    assert run("parts") == whole, "of a completed run the weights are read"


@pytest.mark.parametrize("kind", [Manifold, ScheduleFreeSGD, Noisy])
def test_an_optimizer_class_of_ones_own_goes_on_with_all_its_bits_on_other_workers(kind: Any, tmp_path: Path) -> None:
    """Its state has several formats; and the model ends with the weights for use."""

    def run(folder: str, **more: Any) -> list[float]:
        model = network()
        optimizer = kind(model.parameters(), lr=0.05)
        train_with_multi_gpu(
            model,
            loader(),
            optimizer,
            num_epochs=3,
            val_loader=loader(10),
            global_batch_size=16,
            exact=True,
            save_dir=str(tmp_path / folder),
            settings=more,
            **QUIET,
        )
        if kind is Manifold:
            state = optimizer.state[next(model.parameters())]
            assert (state["sums"]["all"][0].dtype, state["count"].dtype) == (torch.float64, torch.int64)
            assert state["name"] == "w"
        return weights(model)

    whole = run("whole")
    assert run_on_each_rank(2, lambda world: run("parts", max_steps=4)) != [whole] * 2
    assert run("parts") == whole
    used = network()
    used.load_state_dict(torch.load(tmp_path / "whole/best.pt", weights_only=True)["model"])
    assert weights(used) == whole


def test_a_plateau_lowers_the_rate(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    train_with_multi_gpu(
        model,
        loader(),
        optimizer,
        num_epochs=3,
        val_loader=loader(8),
        scheduler=ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
        save_dir=str(tmp_path),
        **QUIET,
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)


def test_plateau_survives_a_stop_in_an_evaluation(tmp_path: Path) -> None:
    """The scheduler takes the loss of the evaluation that the resume makes."""

    def train(folder: str, prepare: Callable[[], object] = lambda: None) -> None:
        prepare()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        asked: dict[str, Any] = {"num_epochs": 3, "val_loader": loader(8, 1), "settings": {"log_interval": 1}, **QUIET}
        train_with_multi_gpu(
            model, loader(), optimizer, scheduler=scheduler, save_dir=str(tmp_path / folder), exact=True, **asked
        )

    def read(folder: str) -> list[Any]:
        lines = list(map(json.loads, (tmp_path / folder / "journal.jsonl").read_text().splitlines()))
        rates = [(line["step"], line["lr"], line["loss"]) for line in lines if line["event"] == "train"]
        return [rates, [(line["step"], line["loss"]) for line in lines if line["event"] == "eval"]]

    for folder, prepare in (
        ("whole", lambda: None), ("run", partial(strike, "val", 2, 1, terminate_self)), ("run", lambda: None),
    ):  # fmt: skip
        assert exit_code(partial(train, folder, prepare)) == 0
    assert read("run") == read("whole")
    assert len({rate for _, rate, _ in read("run")[0]}) == 2


def train_scheduled(folder: Path, make: Callable[[torch.optim.Optimizer], LRScheduler], **more: Any) -> list[float]:
    """Twelve steps in two epochs; returns the rate of each from the journal."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    asked: dict[str, Any] = {"num_epochs": 2, "global_batch_size": 8, "settings": {"log_interval": 1}, **QUIET, **more}
    train_with_multi_gpu(model, loader(), optimizer, scheduler=make(optimizer), save_dir=str(folder), **asked)
    lines = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    return [line["lr"] for line in lines if line["event"] == "train"]


def one_cycle(steps: int) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    return lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=steps)


def test_a_scheduler_made_for_the_steps_of_the_run_is_stepped_after_each(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9)
    scheduler, by_hand = OneCycleLR(optimizer, 0.1, total_steps=12), []
    for _ in range(12):
        by_hand.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert train_scheduled(tmp_path / "one", one_cycle(12)) == by_hand
    two = run_on_each_rank(2, lambda world: train_scheduled(tmp_path / "two", one_cycle(12))[:12])
    assert two == [by_hand] * 2
    by_epoch = train_scheduled(tmp_path / "epochs", one_cycle(2))
    assert by_epoch == [by_epoch[0]] * 6 + [by_epoch[6]] * 6
    assert by_epoch[0] != by_epoch[6]
    train_scheduled(tmp_path / "part", one_cycle(12), settings={"log_interval": 1, "max_steps": 7})
    assert train_scheduled(tmp_path / "part", one_cycle(12)) == by_hand, "from the checkpoint on"


def test_a_scheduler_that_does_not_fit_the_run_is_refused_before_it(tmp_path: Path) -> None:
    neither = "OneCycleLR is made for 24 steps, and the run has 12 optimizer steps of up to 8 samples in 2 epochs"
    with pytest.raises(RequestError, match=f"{neither}(?s:.)*scheduler_step='step'"):
        train_scheduled(tmp_path / "run", one_cycle(24))
    with pytest.raises(RequestError, match="OneCycleLR has 6 steps, and the run steps it 11 times"):
        train_scheduled(tmp_path / "run", one_cycle(6), scheduler_step="step")
    assert not (tmp_path / "run").exists()
    asked_for = train_scheduled(tmp_path / "run", one_cycle(24), scheduler_step="step")
    assert asked_for[11] > asked_for[0] * 20, "half of it, as asked for"
    train_scheduled(tmp_path / "longer", one_cycle(12))
    with pytest.raises(RequestError, match="OneCycleLR has 12 steps, and the run steps it 17 times"):
        train_scheduled(tmp_path / "longer", one_cycle(12), num_epochs=3, scheduler_step="step")


def test_a_longer_run_does_not_go_on_with_the_horizon_of_its_checkpoint(tmp_path: Path) -> None:
    """The state of a scheduler has its length, which would silently take the place of the new one's."""

    def cosine(steps: int) -> Callable[[torch.optim.Optimizer], LRScheduler]:
        return lambda optimizer: CosineAnnealingLR(optimizer, steps)

    for name, make in (("cosine", cosine), ("cycle", one_cycle)):
        train_scheduled(tmp_path / name, make(12))
        said = "ends after 18 steps, and that of the checkpoint, from which the run would resume, after 12"
        with pytest.raises(RequestError, match=said):
            train_scheduled(tmp_path / name, make(18), num_epochs=3)


def test_a_scheduler_that_was_made_and_not_passed_is_noticed(tmp_path: Path) -> None:
    model, other = network(), network()
    optimizer, loaded = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, other))
    OneCycleLR(optimizer, 0.1, total_steps=12)
    loaded.load_state_dict(optimizer.state_dict())
    with pytest.raises(
        RequestError, match=r"made for it but not passed: the rate would stay at 0.004(?s:.)*initial_lr"
    ):
        train_with_multi_gpu(model, loader(), optimizer, save_dir=str(tmp_path / "run"), **QUIET)
    assert not (tmp_path / "run").exists()
    for group in optimizer.param_groups:
        del group["initial_lr"]
    for trained, moves in ((model, optimizer), (other, loaded)):  # as the message says; state of an earlier training
        assert train_with_multi_gpu(trained, loader(), moves, num_epochs=1, **QUIET)["success"]


def test_losses_of_single_samples_and_targets_of_any_shape(tmp_path: Path) -> None:
    def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs = torch.stack([inputs for inputs, _ in samples])
        return inputs, inputs[:, :3] * 2

    ends = []
    for reduction in ("mean", "none"):
        model = network()
        criterion = nn.MSELoss(reduction=reduction)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = train_with_multi_gpu(
            model,
            loader(collate_fn=padded),
            optimizer,
            criterion,
            num_epochs=2,
            save_dir=str(tmp_path / reduction),
            **QUIET,
        )
        ends.append((pytest.approx(weights(model), abs=1e-6), results["final_loss"]))
    assert ends[0][0].expected == ends[1][0]
    found = evaluate_with_multi_gpu(model, loader(collate_fn=padded), nn.MSELoss(), **QUIET)
    assert found["accuracy"] is None
    assert found["test_loss"] < ends[0][1] * 1.5


def wrong(**more: Any) -> Callable[[Path], Any]:
    """A request that differs from a sound one."""

    def ask(folder: Path) -> Any:
        model = network()
        sound: dict[str, Any] = {"train_loader": loader(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        return train_with_multi_gpu(model, **{**sound, "save_dir": str(folder / "run"), **QUIET, **more})

    return ask


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (wrong(device_ids=[0, 1]), r"device_ids 0,1: there is no GPU 0,1 \(no GPU is visible\)"),
        (wrong(strategy="horovod"), "strategy 'horovod'"),
        (wrong(strategy="fsdp", world_size=2), "your own optimizer can't be used with fsdp"),
        (wrong(criterion=nn.CrossEntropyLoss(reduction="sum")), "reduction='sum'"),
        (wrong(criterion=nn.Linear(3, 1)), "parameters of its own"),
        (wrong(optimizer=torch.optim.SGD(network().parameters(), lr=1)), "optimizer: it does not move 0.weight"),
        (wrong(learning_rate=1.0), "learning_rate can't be used with your own optimizer"),
        (wrong(settings={"label_smoothing": 0.1}), "label_smoothing does not reach the criterion"),
        (wrong(settings={"task.class_weights": "balanced"}), "^task.class_weights does not reach the criterion"),
        (wrong(settings={"schedule": "cosine"}), "schedule can't be used with your own optimizer"),
        (wrong(scheduler=StepLR(torch.optim.SGD(network().parameters(), lr=1), 1)), "scheduler: it belongs to another"),
        (
            wrong(train_loader=DataLoader(Points(), batch_sampler=BatchSampler(SequentialSampler(Points()), 8, False))),
            "batch_sampler",
        ),
        (wrong(train_loader=loader(0)), "train dataset: it is empty"),
        (wrong(criterion=nn.BCELoss()), "the criterion takes"),
        (wrong(world_size=2, rank=1), "the address of the other processes is unknown"),
        (wrong(backend="nccl"), "backend='nccl' needs GPUs"),
        (wrong(train_loader=[(1, 2)]), "train loader: a list is no DataLoader"),
        (
            wrong(lerning_rate=1.0),
            "lerning_rate: MultiGPUConfig has no such field",
        ),
    ],
)
def test_a_wrong_request_says_what_is_wrong(ask: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=said):
        ask(tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_are_started_where_several_are_asked_for(tmp_path: Path) -> None:
    ends = []
    ways: list[dict[str, Any]] = [{}, {"strategy": "ddp", "world_size": 2}]
    for more in ways:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_with_multi_gpu(
            model,
            loader(),
            optimizer,
            nn.CrossEntropyLoss(),
            num_epochs=2,
            global_batch_size=16,
            save_dir=str(tmp_path / str(len(more))),
            **QUIET,
            **more,
        )
        ends.append(weights(model))
    assert ends[1] == pytest.approx(ends[0], abs=1e-6)


@pytest.mark.slow
def test_processes_that_are_started_go_on_from_the_checkpoint_that_was_named(tmp_path: Path) -> None:
    def run(name: str, **more: Any) -> dict[str, Any]:
        place: dict[str, Any] = {"save_dir": str(tmp_path / name), "num_epochs": 2, "global_batch_size": 16}
        return dict(train_with_multi_gpu(network(), loader(), **place, **QUIET, **more)["summary"])

    first = run("first")
    older = str(min((tmp_path / "first" / "checkpoints").iterdir()))
    branched = run("second", strategy="ddp", world_size=2, settings={"resume": older})
    assert (branched["resumed_from"], branched["steps"]) == (older, first["steps"])


@pytest.mark.slow
def test_what_can_not_be_sent_to_another_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="can't be sent to other processes"):
        wrong(strategy="ddp", world_size=2, criterion=lambda outputs, targets: outputs.sum())(tmp_path)
