"""What rank 0's writer does while it waits for the others: these are played by hand, on a store of this process."""

import json
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multigpu_cli.checkpoint.pieces import Rows
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.distributed.world import World
from multigpu_cli.strategies.fsdp import state as sharded_save
from multigpu_cli.strategies.fsdp.state import ShardedSave
from tests.support.pieces import FACTS, flip_byte, save_in_pieces

STATE = {"model": {"weight": torch.arange(12.0).reshape(6, 2)}}
ROWS = [{"model.weight": Rows(STATE["model"]["weight"][rank * 2 : rank * 2 + 2], rank * 2)} for rank in range(3)]
OUTLINE = {"model": {"weight": torch.empty((6, 2), device="meta")}}


class Gone:
    """A store whose connection is lost."""

    def check(self, keys: Any) -> bool:
        raise RuntimeError("gone")


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody else is to come; a busy machine may stop the process for as long as that."""
    monkeypatch.setattr(sharded_save, "_GRACE", 0.3)


@pytest.fixture
def run(tmp_path: Path) -> "Run":
    (tmp_path / ".lock").write_text("rank 0")
    return Run(tmp_path)


class Run:
    """Three ranks in one folder."""

    def __init__(self, folder: Path, table: Any = None) -> None:
        self.table = table or dist.PrefixStore("attempt", dist.HashStore())
        self.store = Store(folder / "checkpoints", 2)

    def rank(self, rank: int, step: int = 10) -> ShardedSave:
        world = World(torch.device("cpu"), rank, 3, store=self.table)
        return ShardedSave(world, self.store, "rank 0", step, ROWS[rank], number=step)

    def save(self, step: int = 10) -> None:
        self.store.save(step, OUTLINE, FACTS, peers=self.rank(0, step))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.store.folder.iterdir())


def test_it_publishes_when_the_last_one_is_done(run: Run) -> None:
    Timer(0.2, run.rank(1).take_part).start()
    Timer(0.5, run.rank(2).take_part).start()
    run.save()
    found, _ = run.store.find_newest()
    assert found is not None
    assert torch.equal(found.state()["model"]["weight"], STATE["model"]["weight"])


def test_the_error_of_another_rank_is_its_own(run: Run) -> None:
    run.rank(1).take_part()
    (run.store.folder / ".draft_step_00000010" / "rank_2.safetensors").mkdir()  # in the way of the file
    with pytest.raises(OSError, match="rank_2"):
        run.rank(2).take_part()
    with pytest.raises(OSError, match=r"rank 2: \[Errno"):
        run.save()
    run.rank(0).abandon()
    assert run.names() == []


def test_best_weights_are_completed_from_the_rows_of_all_ranks(run: Run) -> None:
    saves = [run.rank(rank) for rank in range(3)]
    for rank, save in enumerate(saves):
        save.best = {"model.weight": Rows(-STATE["model"]["weight"][rank * 2 : rank * 2 + 2], rank * 2)}
    for save in saves[1:]:
        save.take_part()
    whole = saves[0].complete_best({**OUTLINE["model"], "seen": torch.ones(3)})
    assert list(whole) == ["weight", "seen"]
    assert torch.equal(whole["weight"], -STATE["model"]["weight"])
    assert torch.equal(whole["seen"], torch.ones(3))
    run.store.save(10, OUTLINE, FACTS, peers=saves[0])
    files = sorted(path.name for path in (run.store.folder / "step_00000010").iterdir())
    assert files == ["manifest.json", *(f"rank_{rank}.safetensors" for rank in range(3)), "state.pt"]


def test_best_weights_of_a_rank_that_cannot_write_stay_pending(run: Run) -> None:
    run.rank(2).take_part()
    (run.store.folder / ".draft_best_00000010" / "best_1.safetensors").mkdir(parents=True)  # in the way of the file
    save = run.rank(1)
    save.best = ROWS[1]
    with pytest.raises(OSError, match="best_1"):
        save.take_part()
    with pytest.raises(OSError, match=r"rank 1: \[Errno"):
        run.rank(0).complete_best(OUTLINE["model"])
    run.rank(0).abandon()
    assert run.names() == []


def test_a_draft_is_given_up_once_nobody_writes_to_it(run: Run) -> None:
    others = [Timer(0.2, run.rank(rank).take_part) for rank in (1, 2)]
    for other in others:
        other.start()
    run.rank(0).abandon()
    for other in others:
        other.join()
    assert run.names() == []


def test_any_other_error_is_told_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as faulty:
        faulty.setattr(sharded_save, "write_piece", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.rank(1).take_part()
    run.rank(2).take_part()
    with pytest.raises(OSError, match="rank 1: its writer failed"):
        run.save()


@pytest.mark.usefixtures("short_grace")
def test_a_rank_that_has_ended_is_not_waited_for(run: Run) -> None:
    run.rank(1).take_part()
    run.table.set("end-1", json.dumps({}))
    with pytest.raises(OSError, match="a rank has ended before its rows were written"):
        run.save()
    assert run.names() == []


@pytest.mark.usefixtures("short_grace")
def test_without_the_store_it_gives_up(run: Run) -> None:
    with pytest.raises(OSError, match="a rank has ended before its rows were written"):
        Run(run.store.folder.parent, Gone()).save()


def test_a_file_on_another_disk_is_not_published(run: Run, tmp_path: Path) -> None:
    """The same lock may lie there too, as a copy."""
    run.rank(1).take_part()
    (tmp_path / "other").mkdir()
    Run(tmp_path / "other", run.table).rank(2).take_part()
    with pytest.raises(FileNotFoundError, match=r"rank_2\.safetensors"):
        run.save()
    assert run.names() == []


def test_a_folder_that_now_belongs_to_another_run_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("somebody else")
    with pytest.raises(OSError, match="now belongs to another run"):
        run.rank(1).take_part()
    assert not run.store.folder.exists()


def test_ranks_share_the_look_at_old_checkpoints(run: Run) -> None:
    run.store.keep = 3
    for step in (1, 2, 3):
        save_in_pieces(run.store, step, STATE)
    run.store.keep = 2
    for step in (1, 2):
        flip_byte(run.store.folder / f"step_0000000{step}" / "rank_1.safetensors")
    for rank in (1, 2):
        run.rank(rank).take_part()
    run.save()
    assert run.names() == ["damaged_step_00000001", "damaged_step_00000002", "step_00000003", "step_00000010"]
    shares = [json.loads(run.table.get(f"checkpoint-10-checked-{rank}")) for rank in (1, 2)]
    damage = "rank_1.safetensors does not match its checksum"
    assert shares == [{"step_00000002": damage, "step_00000001": damage}, {}]
    for step in (11, 12):
        for rank in (1, 2):
            run.rank(rank, step).take_part()
        run.save(step)
    assert run.table.num_keys() == 8, "what each of two ranks has told twice, of the newest two"
