import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.checkpoint.manifest import find_manifest_damage
from multigpu_cli.checkpoint.pieces import Pieces
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.weights import load_trained_weights, save_weights
from multigpu_cli.errors import RequestError
from tests.support.malicious_files import poison, poison_and_sign
from tests.support.pieces import save_in_pieces

STATE = {"w": torch.arange(6.0).view(2, 3), "count": torch.tensor(7), "half": torch.ones(3, dtype=torch.bfloat16)}
FACTS = {"settings": {"seed": 1}, "pins": {"model": "mlp"}, "world_size": 1}


def run_in(folder: Path, *, average: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir()
    Store(folder / "checkpoints", 3).save(10, {"model": STATE, "average": average}, FACTS)
    return folder


def test_a_run_folder_means_its_best_weights(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    assert load_trained_weights(run).origin == run / "checkpoints/step_00000010/state.pt", "none are published yet"
    save_weights(run / "best.pt", {"w": torch.ones(1)}, {"seed": 2}, {})
    found = load_trained_weights(run)
    assert (found.origin, list(found.state), found.settings) == (run / "best.pt", ["w"], {"seed": 2})


def test_a_checkpoint_means_its_own_weights_or_their_average(tmp_path: Path) -> None:
    plain = load_trained_weights(run_in(tmp_path / "plain") / "checkpoints/step_00000010")
    assert (list(plain.state), plain.settings, plain.model) == (list(STATE), {"seed": 1}, "mlp")
    average = {"n_averaged": torch.tensor(3), "module.w": torch.full((2, 3), 9.0)}
    found = load_trained_weights(run_in(tmp_path / "averaged", average=average) / "checkpoints/step_00000010")
    assert list(found.state) == ["w"]
    assert bool((found.state["w"] == 9).all())


def test_a_checkpoint_in_pieces_is_read_whole(tmp_path: Path) -> None:
    average = {"n_averaged": torch.tensor(3), "module.w": torch.full((2, 3), 9.0)}
    for name, also in (("plain", None), ("averaged", average)):
        folder = tmp_path / name
        folder.mkdir()
        save_in_pieces(Store(folder / "checkpoints", 3), 10, {"model": STATE, "average": also})
    found = load_trained_weights(tmp_path / "plain").state
    assert {key: value.tolist() for key, value in found.items()} == {key: v.tolist() for key, v in STATE.items()}
    assert load_trained_weights(tmp_path / "averaged").state["w"].tolist() == [[9.0] * 3] * 2
    assert load_trained_weights(tmp_path / "averaged").origin == tmp_path / "averaged/checkpoints/step_00000010"


def test_pieces_are_read_one_tensor_at_a_time_into_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)) for _ in range(2))
    save_in_pieces(Store(tmp_path / "checkpoints", 3), 10, {"model": model.state_dict(), "average": None})
    weights, alive, read = load_trained_weights(tmp_path), [], Pieces.read

    def count(pieces: Pieces, name: str, outline: Tensor, *rows: int) -> Tensor:
        found = read(pieces, name, outline, *rows)
        alive.append(weakref.ref(found))
        assert sum(each() is not None for each in alive) <= 2, "the one before, and this one"
        return found

    monkeypatch.setattr(Pieces, "read", count)
    weights.load_into(other)
    assert len(alive) == 8, "all but the scalar, which is in state.pt"
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    with pytest.raises(RequestError, match="does not fit the model"):
        weights.load_into(model[0])


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"w": torch.ones(2)}, tmp_path / "foreign.pt")
    torch.save({"model": STATE, "epoch": 3}, tmp_path / "another.pt")
    torch.save({"model": {"w": 1}, "config": {}}, tmp_path / "none.pt")
    damaged = run_in(tmp_path / "run") / "checkpoints/step_00000010"
    (damaged / "state.pt").write_bytes(b"torn")
    for path, message in (
        (tmp_path / "empty", "contains no weights"),
        (tmp_path / "run", "contains no weights"),
        (tmp_path / "text.pt", r"text\.pt can't be loaded safely"),
        (tmp_path / "foreign.pt", r"foreign\.pt is not the best\.pt or last\.pt of a run"),
        (tmp_path / "another.pt", r"another\.pt is not the best\.pt or last\.pt of a run"),
        (tmp_path / "none.pt", r"none\.pt is not the best\.pt or last\.pt of a run"),
        (damaged, r"state\.pt has 4 bytes"),
    ):
        with pytest.raises(RequestError, match=message):
            load_trained_weights(path)


def test_a_malicious_one_is_refused_and_not_run(tmp_path: Path) -> None:
    target = tmp_path / "attacked"
    run = run_in(tmp_path / "run")
    checkpoint = poison_and_sign(run / "checkpoints/step_00000010", target)
    best = poison(tmp_path / "best.pt", target, {"model": STATE, "config": {}})
    for path in (run, checkpoint, best):
        with pytest.raises(RequestError, match="can't be loaded safely as weights"):
            load_trained_weights(path)
    assert not target.exists()


def share(levels: int) -> list[object]:
    """A list of ten references to one list of ten references, and so on: 10 ** levels values in a small file."""
    value: list[object] = ["x"]
    for _ in range(levels):
        value = [value] * 10
    return value


@pytest.mark.parametrize(
    ("levels", "problem"), [(9, "more than 1,000,000 values"), (None, "more than 100 levels deep")]
)
def test_weights_with_endless_settings_are_refused(levels: int | None, problem: str, tmp_path: Path) -> None:
    endless: list[object] = []
    endless.append(endless)
    value = endless if levels is None else share(levels)
    content = {"model": {"w": torch.ones(1)}, "config": {"data.args": {"augment": value}}, "metrics": {}}
    torch.save(content, tmp_path / "best.pt")
    with pytest.raises(RequestError, match=rf"best\.pt: its settings are .*{problem}"):
        load_trained_weights(tmp_path)


def test_checkpoint_with_deeply_nested_settings_is_damaged(tmp_path: Path) -> None:
    value: list[object] = []
    for _ in range(200):
        value = [value]
    store = Store(tmp_path / "checkpoints", 3)
    store.save(10, {"model": STATE, "average": None}, FACTS | {"settings": {"data.args": {"augment": value}}})
    assert find_manifest_damage(tmp_path / "checkpoints/step_00000010") == "manifest.json can't be read (ValueError)"
