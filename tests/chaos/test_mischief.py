import random
from pathlib import Path

import pytest
import torch

from multigpu_cli.checkpoint.manifest import find_damage
from multigpu_cli.checkpoint.store import Store
from tests.chaos.mischief import Harm, some_harm


@pytest.mark.parametrize("number", range(12))
def test_harm_does_harm(number: int, tmp_path: Path) -> None:
    """The product's own look at a checkpoint finds what was done to it."""
    store = Store(tmp_path / "checkpoints", 3)
    for step in (10, 20):
        store.save(step, {"w": torch.ones(20)}, {"lr": 1e-05})
    harm = some_harm(random.Random(number))
    possible, victim = harm.done(tmp_path)
    assert possible
    folders = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert [folder.name for folder in folders if find_damage(folder)] == ([victim] if victim else [])
    assert len(folders) == 2 - (harm.what == "delete")
    assert bool(list(tmp_path.rglob("*draft*"))) == (harm.what == "leave a draft beside")


@pytest.mark.parametrize("what", ["truncate", "delete", "delete manifest.json of"])
def test_the_last_whole_checkpoint_is_spared(what: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints", 3)
    for step in (10, 20):
        store.save(step, {"w": torch.ones(20)}, {})
    (tmp_path / "checkpoints/step_00000010/state.pt").unlink()
    assert Harm(what).done(tmp_path) == (True, None)
    found, _ = store.find_newest()
    assert found
    assert found.step == 20


def test_where_no_checkpoint_is_harm_is_not_done(tmp_path: Path) -> None:
    assert Harm("truncate").done(tmp_path) == (False, None)
