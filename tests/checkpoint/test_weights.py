import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from multigpu_cli.checkpoint.initial_weights import load_initial_weights
from multigpu_cli.checkpoint.pieces import serialize
from multigpu_cli.checkpoint.weights import (
    broadcast_weights,
    check_extra_state,
    check_fit,
    copy_to_host,
    fingerprint,
    load_trained_weights,
    read_weights,
    save_weights,
)
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from tests.support.awkward_models import Note, Telling
from tests.support.ranks import run_on_each_rank
from tests.support.world import ALONE


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_weights_for_use_load_with_weights_only(tmp_path: Path) -> None:
    model = network()
    save_weights(tmp_path / "best.pt", model.state_dict(), {"data": "digits", "epochs": 3}, {"accuracy": 0.97})
    found = torch.load(tmp_path / "best.pt", weights_only=True)
    assert set(found) == {"model", "config", "metrics"}
    assert (found["config"]["epochs"], found["metrics"]["accuracy"]) == (3, 0.97)
    other = network(seed=1)
    other.load_state_dict(found["model"])
    assert fingerprint(other.state_dict()) == fingerprint(model.state_dict())


def test_the_fingerprint_is_of_names_order_and_bytes() -> None:
    """SHA-256 over the bytes of the tensors in order of names, worked out by hand."""
    from hashlib import sha256

    state = {"b": torch.tensor([1.0, 2.0]), "a": torch.tensor([[3, 4], [5, 6]]).t(), "c": torch.tensor(7.5).double()}
    by_hand = sha256(
        torch.tensor([[3, 5], [4, 6]]).numpy().tobytes()
        + torch.tensor([1.0, 2.0]).numpy().tobytes()
        + torch.tensor(7.5).double().numpy().tobytes()
    )
    assert fingerprint(state) == by_hand.hexdigest()
    assert fingerprint(dict(reversed(state.items()))) == by_hand.hexdigest()


@pytest.mark.parametrize("name", ["0.weight", "1.running_var", "1.num_batches_tracked"])
def test_any_weight_or_buffer_changes_the_fingerprint(name: str) -> None:
    model = network()
    before = fingerprint(model.state_dict())
    value = model.state_dict()[name]
    value.view(-1)[-1] += 1
    assert fingerprint(model.state_dict()) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64])
def test_every_number_format_has_a_fingerprint(dtype: torch.dtype) -> None:
    assert fingerprint({"x": torch.ones(3).to(dtype)}) != fingerprint({"x": torch.zeros(3).to(dtype)})


def test_a_host_copy_stays_when_training_goes_on() -> None:
    model = network()
    copy = copy_to_host(model.state_dict())
    with torch.no_grad():
        model.get_parameter("0.weight").zero_()
    assert copy["0.weight"].abs().sum() > 0


@pytest.mark.parametrize("layout", ["best.pt", "state.pt", "plain"])
def test_weights_are_found_in_each_kind_of_file(layout: str, tmp_path: Path) -> None:
    state = network().state_dict()
    contents = {
        "best.pt": {"model": state, "config": {}, "metrics": {}},
        "state.pt": {"model": state, "optimizer": {"state": {}}, "progress": {"step": 1}},
        "plain": dict(state),
    }
    (tmp_path / "file.pt").write_bytes(serialize(contents[layout]))
    model = network(seed=1)
    load_initial_weights(model, tmp_path / "file.pt", partial=False)
    assert fingerprint(model.state_dict()) == fingerprint(state)


@pytest.mark.parametrize(
    "content", [{"model": {}}, {"model": {"x": 1}}, [torch.ones(1)], {}, {"x": torch.ones(1), 1: torch.ones(1)}, "text"]
)
def test_a_file_without_weights_is_refused(content: object, tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(serialize(content))
    with pytest.raises(RequestError, match=r"file\.pt holds no weights"):
        read_weights(tmp_path / "file.pt")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere\.pt: there is no such file"):
        read_weights(tmp_path / "nowhere.pt")


def test_a_malicious_file_is_refused_unrun(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "attacked"),)

    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(RequestError, match=r"evil\.pt"):
        load_initial_weights(network(), tmp_path / "evil.pt", partial=False)
    assert not (tmp_path / "attacked").exists()


def test_what_does_not_fit_is_listed_before_anything_is_loaded(tmp_path: Path) -> None:
    model = network()
    before = fingerprint(model.state_dict())
    state = model.state_dict() | {"0.weight": torch.zeros(9, 9), "extra": torch.zeros(1)}
    del state["2.bias"]
    (tmp_path / "file.pt").write_bytes(serialize({name: value + 1 for name, value in state.items()}))
    with pytest.raises(RequestError) as refused:
        load_initial_weights(model, tmp_path / "file.pt", partial=False)
    assert "--init-from" in refused.value.problem
    assert "2.bias is missing" in refused.value.problem
    assert "extra is not in the model" in refused.value.problem
    assert "0.weight is (9, 9), the model has (4, 3)" in refused.value.problem
    assert fingerprint(model.state_dict()) == before


def test_a_long_list_is_cut() -> None:
    with pytest.raises(RequestError) as refused:
        check_fit(network(), {}, "it")
    assert refused.value.problem.count(" is missing") == 6
    assert "… 3 more" in refused.value.problem
    for known, more in ((2, ["    … 1 more"]), (3, [])):
        with pytest.raises(RequestError) as refused:
            check_fit(network(), dict(list(network().state_dict().items())[:known]), "it")
        assert refused.value.problem.count(" is missing") == 6
        assert refused.value.problem.splitlines()[7:] == more


def test_state_beside_tensors_is_kept_as_it_is_and_has_no_part_in_the_fingerprint(tmp_path: Path) -> None:
    model = Telling(3, 2, ["a"])
    before, copied = fingerprint(model.state_dict()), copy_to_host(model.state_dict())
    model.kept.append("b")
    model.passes = 7
    assert fingerprint(model.state_dict()) == before
    assert copied["_extra_state"]["kept"] == ["a"]
    save_weights(tmp_path / "best.pt", model.state_dict(), {}, {})
    other, third = Telling(3, 2, None), Telling(3, 2, None)
    load_initial_weights(other, tmp_path / "best.pt", partial=False)
    load_trained_weights(tmp_path / "best.pt").load_into(third)
    assert (other.kept, other.passes) == (third.kept, third.passes) == (["a", "b"], 7)
    with pytest.raises(RequestError, match="_extra_state is not in the model"):
        check_fit(nn.Module(), model.state_dict(), "it")
    with pytest.raises(RequestError, match=r"_extra_state is \(1,\), the model has no tensor"):
        check_fit(model, model.state_dict() | {"_extra_state": torch.ones(1)}, "it")


class Forgetful(Telling):
    """Has nothing that takes its state back."""

    set_extra_state = nn.Module.set_extra_state


class Picky(Telling):
    def set_extra_state(self, state: object) -> None:
        raise ValueError("too old")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Telling(3, 2, Note()), "get_extra_state of the model returns what could not be read back"),
        (nn.Sequential(nn.ReLU(), Telling(3, 2, lambda: 1)), "get_extra_state of 1 returns what could not be"),
        (Forgetful(3, 2, "a"), 'cannot load its own state: RuntimeError: .*Unexpected key.*"_extra_state"'),
        (Picky(3, 2, "a"), "cannot load its own state: ValueError: too old"),
    ],
)
def test_state_that_would_not_come_back_is_found_before_it_is_written(model: nn.Module, said: str) -> None:
    with pytest.raises(RequestError, match=f"(?s)--model own:net:? {said}"):
        check_extra_state(model, "own:net")


def test_a_model_that_takes_its_state_back_is_left_as_it_was() -> None:
    model = Telling(3, 2, {"a": (1, {2}), "b": torch.ones(2)})
    before = serialize(model.state_dict())
    check_extra_state(model, "own:net")
    assert serialize(model.state_dict()) == before


def test_every_rank_gets_the_weights_of_rank_0_and_what_they_come_with() -> None:
    def work(world: World) -> Any:
        torch.manual_seed(world.rank)
        model = Telling(3, 2, ["of rank", world.rank])
        own = model.layer.weight.tolist()
        broadcast_weights(model, ALONE)
        assert model.layer.weight.tolist() == own
        broadcast_weights(model, world)
        return [own, model.kept, model.layer.weight.tolist()]

    first, second = run_on_each_rank(2, work)
    assert first[1:] == second[1:] == [["of rank", 0], first[0]]
