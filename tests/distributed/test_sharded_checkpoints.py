"""Checkpoints of --multi-gpu fsdp: each rank writes its rows, and any number of ranks reads what it needs."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor

from multigpu_cli.checkpoint import manifest as manifest_module
from multigpu_cli.checkpoint.files import compute_sha256
from multigpu_cli.checkpoint.manifest import read_manifest
from multigpu_cli.checkpoint.store import Checkpoint, Store
from multigpu_cli.checkpoint.weights import fingerprint, load_trained_weights
from multigpu_cli.commands.clean import list_checkpoints
from multigpu_cli.monitor import journal
from multigpu_cli.strategies.fsdp import state as sharded_save
from tests.chaos.mischief import fill
from tests.support.pieces import flip_byte
from tests.support.run_training import Ended, run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {
    "multi_gpu": "fsdp", "model": "tests.support.user_code:Double", "sets": ["model.args.network=own"], "ema": 0.9,
    "global_batch_size": 26, "batch_size": 4, "epochs": 3, "log_interval": 1, "lr": 0.01, "schedule": "constant",
    "warmup_epochs": 0, "save_dir": "run", "checkpoint_every": "2", "keep": "99",
}  # fmt: skip
LAST = 9  # steps of a whole run


def run(workers: int, folder: str = "run", **flags: Any) -> Ended:
    where = {"multi_gpu": "fsdp"} if workers > 1 else {"multi_gpu": "none"}
    return run_training(workers, **RUN | where | {"save_dir": folder} | flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of two ranks, which tests copy."""
    folder = str(tmp_path_factory.mktemp("two") / "whole")
    assert not run(2, folder).error
    return folder


@pytest.fixture(scope="module")
def whole_of_three(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("three") / "whole")
    assert not run(3, folder).error
    return folder


def read_events(folder: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in journal.read_events(f"{folder}/journal.jsonl") if event["event"] == kind]


def read_losses(folder: str) -> list[float]:
    return list({event["step"]: event["loss"] for event in read_events(folder, "train")}.values())


def name(step: int) -> str:
    return f"step_{step:08d}"


def open_checkpoint(folder: str, step: int) -> Checkpoint:
    path = Path(folder, "checkpoints", name(step))
    return Checkpoint(path, read_manifest(path))


def on_rank(rank: int, work: Callable[[], object]) -> Callable[[], object]:
    """What one rank's process does before it trains."""
    return lambda: work() if os.environ.get("RANK", "0") == str(rank) else None


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")


def test_what_three_ranks_write_any_number_goes_on_from_with_any_strategy(whole_of_three: str) -> None:
    """3 → 3, 2, 1 processes and ddp, and from one process's file back to three."""
    whole = whole_of_three
    last = open_checkpoint(whole, LAST)
    files = [
        "best_weights.pt",
        "evaluation.pt",
        "manifest.json",
        *(f"rank_{rank}.safetensors" for rank in range(3)),
        "state.pt",
    ]
    assert sorted(path.name for path in last.folder.iterdir()) == files
    assert set(last.manifest["files"]) == {"evaluation.pt", *files[3:]}
    written = read_events(whole, "checkpoint")
    assert [event["step"] for event in written] == [2, 4, 6, 8, 9]
    assert written[-1]["bytes"] == sum((last.folder / file).stat().st_size for file in files[3:])
    summary = json.loads(Path(whole, "summary.json").read_text())
    assert fingerprint(load_trained_weights(last.folder).state) == summary["fingerprint"]
    assert {entry.state for entry in list_checkpoints(Path(whole))} == {"whole"}

    cases: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("three", 3, {}), ("two", 2, {}), ("one", 1, {}), ("ddp", 2, {"multi_gpu": "ddp"}),
    )  # fmt: skip
    for folder, workers, flags in cases:
        rewind(whole, folder, 6)
        ended = run(workers, folder, **flags)
        assert (ended.error, read_events(folder, "resume")[-1]["step"]) == ("", 6)
        assert read_losses(folder) == pytest.approx(read_losses(whole), rel=1e-12)
        assert open_checkpoint(folder, LAST).in_pieces == (folder in ("three", "two"))
    parts = ("model", "average", "optimizer")
    assert_same(open_checkpoint("three", LAST).state(*parts), last.state(*parts))

    rewind("one", "back", 8)
    assert not open_checkpoint("back", 8).in_pieces
    assert not run(3, "back").error
    assert open_checkpoint("back", LAST).in_pieces
    assert read_losses("back") == pytest.approx(read_losses(whole), rel=1e-12)


def test_best_weights_by_rows_are_those_that_gathering_has() -> None:
    """No evaluation sends weights to rank 0, only the end of the run; and no file of rows is left over."""
    state, row_saver = sharded_save.ShardedState, sharded_save.RowSaver
    gather = state.gather

    def note_gather(*args: Any) -> Any:
        with open(f"gathered by {os.environ['RANK']}", "a") as file:
            file.write(".")
        return gather(*args)

    def gather_best() -> None:
        row_saver.capture_best = sharded_save.GatheringSaver.capture_best  # type: ignore[method-assign, assignment]

    def count_gathers() -> None:
        state.gather = note_gather  # type: ignore[method-assign, assignment]

    for folder, prepare in (("gathered", gather_best), ("by rows", count_gathers)):
        ended = run(2, folder, prepare=prepare, best="val_loss:max")
        assert (ended.error, ended.summary["best"]["step"]) == ("", 3), "written after the weights have moved"
    weights = [load_trained_weights(Path(folder, "best.pt")).state for folder in ("gathered", "by rows")]
    assert_same(weights[1], weights[0])
    assert fingerprint(weights[1]) != ended.summary["fingerprint"], "of the last ones"
    assert [Path(f"gathered by {rank}").read_text() for rank in (0, 1)] == ["."] * 2
    assert [path.name for path in Path("by rows").rglob("best*")].count("best_0.safetensors") == 0


def rewind(folder: str, to: str, step: int) -> None:
    """A copy of a run that was killed after this step's checkpoint."""
    shutil.copytree(folder, to)
    Path(to, "summary.json").unlink()
    for later in Path(to, "checkpoints").iterdir():
        if later.name > name(step):
            shutil.rmtree(later)


def tear(folder: Path) -> None:
    file = folder / "rank_1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE: dict[Callable[[Path], None], str] = {
    tear: "rank_1.safetensors has",
    lambda folder: (folder / "rank_0.safetensors").unlink(): "rank_0.safetensors is missing",
    lambda folder: flip_byte(folder / "rank_1.safetensors"): "rank_1.safetensors does not match its checksum",
    lambda folder: flip_byte(folder / "state.pt"): "state.pt does not match its checksum",
}


def test_damaged_pieces_are_named_and_kept_and_an_older_checkpoint_is_taken(whole: str) -> None:
    """A torn piece, one that is missing, and flipped bytes, each in another checkpoint; 2 is the last good one."""
    rewind(whole, "run", LAST)
    losses = read_losses("run")
    for damage, step in zip(DAMAGE, (9, 8, 6, 4), strict=True):
        damage(Path("run/checkpoints", name(step)))
    ended = run(2, "run", max_steps=6)
    assert not ended.error
    assert Path(ended.summary["resumed_from"]).name == name(2)
    told = [event["action"] for event in read_events("run", "fault") if event["kind"] == "damaged checkpoint"]
    assert [words in action for words, action in zip(DAMAGE.values(), told, strict=True)] == [True] * 4
    kept = {path.name for path in Path("run/checkpoints").iterdir()}
    assert kept == {name(2), name(4), name(6), name(8), name(9), *(f"damaged_{name(step)}" for step in (4, 6))}
    assert read_losses("run")[:6] == pytest.approx(losses[:6], rel=1e-12)
    for step in (2, 4, 6):
        flip_byte(Path("run/checkpoints", name(step), "rank_0.safetensors"))
    ended = run(2, "run")
    assert ended.kind in ("RequestError", "NoIntactCheckpoint")
    assert "run has 5 checkpoints, and none is intact" in ended.error


def test_each_rank_reads_a_share_of_the_pieces_to_verify_them(whole_of_three: str) -> None:
    rewind(whole_of_three, "run", 4)

    def note() -> None:
        def compute(file: Path, moved: Any = lambda: None) -> str:
            with open("hashed.txt", "a") as log:
                log.write(f"{os.environ['RANK']} {file.name}\n")
            return compute_sha256(file, moved)

        manifest_module.compute_sha256 = compute  # type: ignore[attr-defined]

    assert not run(2, "run", max_steps=5, prepare=note).error
    hashed = [line.split() for line in Path("hashed.txt").read_text().splitlines()]
    pieces = sorted((file, rank) for rank, file in hashed if file != "state.pt")
    assert pieces == [("rank_0.safetensors", "0"), ("rank_1.safetensors", "1"), ("rank_2.safetensors", "0")]


def test_full_disk_on_one_rank_costs_the_checkpoints_of_that_time() -> None:
    """As for rank 0: said in words, nothing is left over, training continues, and a later checkpoint is written."""
    deeds = on_rank(1, lambda: os.environ.update(FAULTS="6:full,10:room"))
    case = {"model": "tests.support.disk_fault_model:net", "sets": [], "batch_size": 13, "log_interval": 1}
    ended = run(2, "run", prepare=deeds, **case)
    assert (ended.error, ended.summary["status"]) == ("", "completed")
    faults = [event["action"] for event in read_events("run", "fault")]
    assert faults, "nobody says so"
    assert all(words.startswith("a checkpoint was not written (rank 1: [Errno 27]") for words in faults), faults
    assert [path for path in Path("run").rglob("*") if "draft" in path.name] == []
    written = [event["step"] for event in read_events("run", "checkpoint")]
    # rank 1 has no room for its files 6 to 9: those of two checkpoints, and of the best weights after them
    assert written == [2, 8, LAST]
    assert {entry.state for entry in list_checkpoints(Path("run"))} == {"whole"}


def fill_before_own_rows(step: int) -> None:
    """Patch this process: the disk is full while it writes its rows for that step, after rank 0 has written its own."""

    write_piece: Callable[..., Any] = sharded_save.write_piece  # type: ignore[attr-defined]

    def write(path: Path, *rest: Any) -> Any:
        if path.parent.name != f".draft_step_{step:08d}":
            return write_piece(path, *rest)
        while not [*path.parent.glob("*_0.safetensors")]:  # of its state or, which come first, of the best weights
            time.sleep(0.01)
        fill(Path("disk"))
        try:
            return write_piece(path, *rest)
        finally:
            Path("disk/filler").unlink()

    sharded_save.write_piece = write  # type: ignore[attr-defined, assignment]


@pytest.mark.root
def test_where_the_rows_of_one_rank_do_not_fit_on_a_real_disk_one_checkpoint_is_lost() -> None:
    Path("disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", "disk"], check=True)
    try:
        ended = run(2, "disk/run", prepare=on_rank(1, lambda: fill_before_own_rows(4)))
        assert (ended.error, ended.summary["status"]) == ("", "completed")
        [fault] = [event["action"] for event in read_events("disk/run", "fault")]
        assert fault.startswith("a checkpoint was not written (rank 1: [Errno 28] No space left on device"), fault
        assert [path for path in Path("disk/run").rglob("*") if "draft" in path.name] == []
        assert [event["step"] for event in read_events("disk/run", "checkpoint")] == [2, 6, 8, 9]
        assert {entry.state for entry in list_checkpoints(Path("disk/run"))} == {"whole"}
    finally:
        subprocess.run(["umount", "--lazy", "disk"], check=True)


def test_a_full_disk_at_the_end_is_an_error_on_all_ranks() -> None:
    deeds = on_rank(1, lambda: os.environ.update(FAULTS="10:full"))
    case = {"model": "tests.support.disk_fault_model:net", "sets": [], "batch_size": 13}
    ended = run(2, "run", prepare=deeds, **case)
    assert "the last checkpoint could not be written to run: [Errno 27] File too large" in ended.error
    assert [path for path in Path("run").rglob("*") if "draft" in path.name] == []
    assert not run(2, "run", **case).error


def test_where_not_all_ranks_see_the_folder_rank_0_writes_everything(
    whole: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two machines with disks of their own, on which a copy of a checkpoint in pieces lies, or not."""
    for node in ("node0", "node1"):
        Path(node).mkdir()
    first = run(2, "run", apart=True, max_steps=2, screen="normal")
    assert not first.error
    assert "not all workers see run: worker 0 gathers" in capfd.readouterr().out
    assert not open_checkpoint("node0/run", 2).in_pieces
    assert not Path("node1/run/checkpoints").exists()
    rewind(whole, "node1/run2", 6)
    assert not run(2, "run2", apart=True).error, "rank 0 has no checkpoint: rank 1 reads it and sends it"
    assert read_losses("node0/run2") == pytest.approx(read_losses(whole)[6:], rel=1e-12)
    for node in ("node0", "node1"):
        rewind(whole, f"{node}/run3", 6)
    flip_byte(Path("node1/run3/checkpoints", name(6), "rank_1.safetensors"))
    ended = run(2, "run3", apart=True, max_steps=5)
    assert (ended.error, Path(ended.summary["resumed_from"]).name) == ("", name(4)), "whoever has a piece looks at it"


def die_at(moment: str, step: int) -> None:
    """Patch this process so that it is killed in the background, at this moment of that step's checkpoint."""

    def kill_at(step_of: Callable[..., int], original: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            found = original(*args, **named) if after else None
            if step_of(*args) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return found if after else original(*args, **named)

        return call

    def get_step_of_file(file: Path, *_: Any) -> int:
        return int(file.parent.name[-8:])

    def get_step_of_save(save: Any, *_: Any) -> int:
        return int(save._step)

    kind = sharded_save.ShardedSave
    match moment:
        case "before its rows":
            sharded_save.write_piece = kill_at(get_step_of_file, sharded_save.write_piece, after=False)  # type: ignore[attr-defined]
        case "after its rows":
            sharded_save.write_piece = kill_at(get_step_of_file, sharded_save.write_piece, after=True)  # type: ignore[attr-defined]
        case "after all rows":
            kind.add_pieces = kill_at(get_step_of_save, kind.add_pieces, after=True)  # type: ignore[method-assign]
        case _:
            kind.find_damaged_pieces = kill_at(  # type: ignore[method-assign]
                get_step_of_save, kind.find_damaged_pieces, after=False
            )


@pytest.mark.parametrize(
    ("rank", "moment", "left"),
    [
        (1, "before its rows", 2),
        pytest.param(1, "after its rows", 2, marks=pytest.mark.slow),
        pytest.param(0, "before its rows", 2, marks=pytest.mark.slow),
        pytest.param(0, "after all rows", 2, marks=pytest.mark.slow),
        pytest.param(0, "before old ones are removed", 4, marks=pytest.mark.slow),
    ],
)
def test_whenever_a_writer_is_killed_a_whole_checkpoint_is_left(rank: int, moment: str, left: int, whole: str) -> None:
    killed = run(2, "run", prepare=on_rank(rank, lambda: die_at(moment, 4)), environ={"OWN_PAUSE": "0.05"})
    assert rank in killed.killed
    newest, skipped = Store(Path("run/checkpoints"), 9).find_newest()
    assert newest is not None
    assert (newest.step, skipped) == (left, [])
    assert not run(2, "run", max_steps=7).error
    assert [path for path in Path("run").rglob("*") if "draft" in path.name] == []
    assert read_losses("run")[:7] == pytest.approx(read_losses(whole)[:7], rel=1e-12)
