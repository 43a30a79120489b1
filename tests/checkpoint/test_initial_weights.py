"""--init-from: the files that people have, and how their names and shapes fall to a model's."""

import json
import os
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import torch as safetensors
from torch import Tensor, nn

from multigpu_cli.checkpoint.initial_weights import (
    WeightMatch,
    load_initial_weights,
    match_weights,
    read_initial_weights,
)
from multigpu_cli.checkpoint.manifest import BEST, MANIFEST, read_manifest, sign_manifest
from multigpu_cli.checkpoint.pieces import serialize
from multigpu_cli.checkpoint.store import BestWeights, Store
from multigpu_cli.checkpoint.weights import fingerprint, save_weights
from multigpu_cli.commands.export import export_weights
from multigpu_cli.config.paths import find_weight_file
from multigpu_cli.errors import RequestError
from tests.config.test_regular_files import within_seconds
from tests.support.awkward_models import Note
from tests.support.pieces import flip_byte, save_in_pieces

PREFIXES = ["module.", "_orig_mod.", "model.", "network."]


def network(seed: int = 0, classes: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(4, classes)))


def write_parts(folder: Path, state: dict[str, Tensor], ending: str) -> Path:
    """As Hugging Face writes weights that are too large for one file."""
    names = list(state)
    places = {name: f"model-{1 + 2 * place // len(names)}-of-2.{ending}" for place, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: state[name].clone() for name in names if places[name] == file}
        safetensors.save_file(part, folder / file) if ending == "safetensors" else torch.save(part, folder / file)
    index = folder / f"model.{ending}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def write(layout: str, folder: Path, state: dict[str, Tensor]) -> Path:
    """The weights as some program writes them; returns what --init-from is given."""
    file = folder / "file.pt"
    match layout:
        case "exported .safetensors" | "exported .pt":
            file = folder / layout.replace("exported ", "weights")
            export_weights(state, file)
        case "a folder of .safetensors":
            safetensors.save_file(state, folder / "model.safetensors")
            return folder
        case "index.json" | "a folder of parts":
            index = write_parts(folder, state, "safetensors")
            return index if layout == "index.json" else folder
        case "a folder of .bin parts":
            write_parts(folder, state, "bin")
            return folder
        case "an old file":
            torch.save(state, file, _use_new_zipfile_serialization=False)
        case "a run folder":
            save_weights(folder / "best.pt", state, {}, {})
            return folder
        case "a checkpoint":
            Store(folder, 3).save(1, {"model": state, "optimizer": {"state": {}}, "progress": {"step": 1}}, {})
            return folder / "step_00000001"
        case "parameters":
            torch.save({name: nn.Parameter(value) if value.is_floating_point() else value
                        for name, value in state.items()}, file)  # fmt: skip
        case key:
            torch.save({"epoch": 3, "accuracy": torch.tensor(0.5), key: OrderedDict(state)}, file)
    return file


LAYOUTS = [
    *("exported .safetensors", "exported .pt", "a folder of .safetensors", "index.json", "a folder of parts"),
    *("a folder of .bin parts", "an old file", "a run folder", "a checkpoint", "parameters"),
    *("state_dict", "model", "model_state_dict", "module"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_come_from_whatever_file_people_have(layout: str, tmp_path: Path) -> None:
    state, model = network().state_dict(), network(seed=1)
    match = load_initial_weights(model, write(layout, tmp_path, state), partial=False)
    assert fingerprint(model.state_dict()) == fingerprint(state)
    assert (list(match.loaded), match.differences) == (list(state), [])


@pytest.mark.parametrize("prefix", [*PREFIXES, "module._orig_mod.", "model.module."])
@pytest.mark.parametrize("wrapped", ["file", "model"])
def test_a_wrappers_prefix_makes_no_difference(prefix: str, wrapped: str, tmp_path: Path) -> None:
    plain, model = network().state_dict(), network(seed=1)
    named = {prefix + name: value for name, value in plain.items()}
    if wrapped == "model":
        for word in reversed(prefix.rstrip(".").split(".")):
            model = nn.Sequential(OrderedDict({word: model}))
    torch.save(named if wrapped == "file" else plain, tmp_path / "file.pt")
    load_initial_weights(model, tmp_path / "file.pt", partial=False)
    assert fingerprint(model.state_dict()) == fingerprint(named if wrapped == "model" else plain)


NAMES = st.lists(st.sampled_from(["a", "b.c", "model.a", "module.b.c", "head", "model.model.a", "module"]), unique=True)


@given(NAMES, NAMES)
def test_each_name_of_the_model_has_one_of_the_file_or_none(own: list[str], found: list[str]) -> None:
    match = match_weights({name: torch.ones(1) for name in own}, {name: torch.ones(1) for name in found})
    sources = list(match.loaded.values())
    assert sorted([*match.loaded, *match.initialised]) == sorted(own)
    assert sorted([*sources, *match.unused]) == sorted(found), "nothing is taken twice or forgotten"
    assert all(match.loaded[name] == name for name in set(own) & set(found)), "an equal name comes first"
    assert all(name.endswith(source.split("model.")[-1].split("module.")[-1]) for name, source in match.loaded.items())


def test_a_name_that_could_be_either_is_left_out() -> None:
    match = match_weights({"a": torch.ones(1)}, {"model.a": torch.ones(1), "module.a": torch.ones(1)})
    assert (match.loaded, match.unused) == ({}, ["model.a", "module.a"])


def test_a_head_of_another_shape_names_the_flag_and_the_tensors(tmp_path: Path) -> None:
    torch.save(network(classes=9).state_dict(), tmp_path / "file.pt")
    model = network(seed=1)
    before = fingerprint(model.state_dict())
    with pytest.raises(RequestError) as refused:
        load_initial_weights(model, tmp_path / "file.pt", partial=False)
    assert "head.weight is (9, 4), the model has (2, 4)" in refused.value.problem
    assert "head.bias is (9,), the model has (2,)" in refused.value.problem
    assert refused.value.remedy.startswith("--init-partial")
    assert fingerprint(model.state_dict()) == before, "nothing was loaded"


def test_partial_leaves_what_does_not_fit_and_tells_it(tmp_path: Path) -> None:
    state = network(classes=9).state_dict() | {"extra": torch.ones(1)}
    del state["head.bias"]
    torch.save(state, tmp_path / "file.pt")
    model, untouched = network(seed=1), network(seed=1)
    match = load_initial_weights(model, tmp_path / "file.pt", partial=True)
    assert torch.equal(model.body[0].weight, state["body.0.weight"])  # type: ignore[union-attr, index]
    assert torch.equal(model.head.weight, untouched.head.weight)  # type: ignore[union-attr, arg-type]
    assert list(match.initialised) == ["head.weight", "head.bias"]
    assert dict(match.rows()) == {
        "loaded": "7 tensors: body.0.weight, body.0.bias, body.1.weight, body.1.bias, …",
        "as initialised": "2 tensors: head.weight is (9, 4), the model has (2, 4); head.bias is missing",
        "not used": "1 tensor: extra",
    }


def test_a_list_is_cut_where_there_is_more() -> None:
    match = WeightMatch(dict.fromkeys("abcd", ""), {}, [*"abcde"])
    assert [text for _, text in match.rows()] == ["4 tensors: a, b, c, d", "none", "5 tensors: a, b, c, d, …"]


def test_partial_is_no_way_to_load_nothing(tmp_path: Path) -> None:
    torch.save({"other": torch.ones(1)}, tmp_path / "file.pt")
    for partial in (True, False):
        with pytest.raises(RequestError, match=r"does not fit the model(?s:.)*more") as refused:
            load_initial_weights(network(), tmp_path / "file.pt", partial=partial)
        assert "--init-partial" not in refused.value.remedy


def test_of_tied_weights_one_is_enough(tmp_path: Path) -> None:
    """Hugging Face leaves the second name out of its files."""
    model, other = (nn.ModuleDict({"embed": nn.Embedding(5, 3), "out": nn.Linear(3, 5, bias=False)}) for _ in range(2))
    for each in (model, other):
        each.out.weight = each.embed.weight  # type: ignore[union-attr]
    torch.save({"embed.weight": other.embed.weight.detach()}, tmp_path / "file.pt")  # type: ignore[union-attr, operator]
    match = load_initial_weights(model, tmp_path / "file.pt", partial=False)
    assert match.loaded == {"embed.weight": "embed.weight", "out.weight": "embed.weight"}
    assert torch.equal(model.out.weight, other.embed.weight)  # type: ignore[union-attr, arg-type]


def test_weights_that_keep_what_others_begin_with_are_not_looked_for(tmp_path: Path) -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 2), "second": nn.Linear(3, 2)})
    model.initial_copies = {"second.": "first."}  # type: ignore[assignment]
    state = {"first.weight": torch.ones(2, 3), "first.bias": torch.ones(2), "second.bias": torch.zeros(2)}
    torch.save(state, tmp_path / "file.pt")
    match = load_initial_weights(model, tmp_path / "file.pt", partial=False)
    assert match == ({name: name for name in ("first.weight", "first.bias")}, {}, [])
    assert all(bool((value == 1).all()) for value in model.state_dict().values())


def test_layers_without_weights_yet_take_those_of_a_file(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.ones(4, 3), "0.bias": torch.ones(4)}, tmp_path / "file.pt")
    layer = nn.LazyLinear(4)
    load_initial_weights(nn.Sequential(layer), tmp_path / "file.pt", partial=False)
    assert float(layer.weight.detach().sum()) == 12


def test_a_checkpoint_is_compared_with_its_checksum(tmp_path: Path) -> None:
    folder = write("a checkpoint", tmp_path, network().state_dict())
    content = bytearray((folder / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "state.pt").write_bytes(content)
    for named in (folder, folder / "state.pt"):
        with pytest.raises(RequestError, match=r"state\.pt does not match its checksum"):
            read_initial_weights(named)


def test_the_best_weights_of_a_checkpoint_are_compared_with_theirs(tmp_path: Path) -> None:
    best = network(1).state_dict()
    sha256 = save_weights(tmp_path / "best.pt", best, {}, {})
    Store(tmp_path, 3).save(1, {"model": network().state_dict()}, {}, BestWeights(tmp_path / "best.pt", sha256))
    found = read_initial_weights(tmp_path / "step_00000001" / "best_weights.pt")
    assert all(torch.equal(found[name], value) for name, value in best.items())
    flip_byte(tmp_path / "step_00000001" / "best_weights.pt")
    with pytest.raises(RequestError, match=r"best_weights\.pt: does not match its checksum"):
        read_initial_weights(tmp_path / "step_00000001" / "best_weights.pt")


def test_any_file_of_a_checkpoint_in_pieces_means_all_of_its_weights(tmp_path: Path) -> None:
    state = network().state_dict()
    folder = save_in_pieces(
        Store(tmp_path / "checkpoints", 3), 10, {"model": state, "optimizer": {"other": torch.ones(3)}}
    )
    for named in (folder, folder / "state.pt", folder / "rank_1.safetensors"):
        found = read_initial_weights(named)
        assert list(found) == list(state)
        assert all(torch.equal(found[name], value) for name, value in state.items())
    best, manifest = network(1).state_dict(), read_manifest(folder)
    del manifest["sha256"]
    manifest["best"] = {"file": BEST, "sha256": save_weights(folder / BEST, best, {}, {})}
    (folder / MANIFEST).write_bytes(sign_manifest(manifest))
    assert fingerprint(read_initial_weights(folder / BEST)) == fingerprint(best), "but for its best ones"
    flip_byte(folder / "rank_0.safetensors")
    with pytest.raises(RequestError, match=r"rank_0\.safetensors does not match its checksum"):
        read_initial_weights(folder / "rank_1.safetensors")


def test_state_pt_without_its_pieces_is_refused(tmp_path: Path) -> None:
    folder = save_in_pieces(Store(tmp_path / "checkpoints", 3), 10, {"model": network().state_dict()})
    (folder / "state.pt").rename(tmp_path / "state.pt")
    with pytest.raises(RequestError, match="is only one part of a sharded checkpoint"):
        read_initial_weights(tmp_path / "state.pt")


def spoil(kind: str, folder: Path) -> str:
    """A file that is not what it says; returns what the message should say."""
    file = folder / "file.safetensors"
    safetensors.save_file(network().state_dict(), file)
    match kind:
        case "torn":
            file.write_bytes(file.read_bytes()[:-10])
            return r"is not a valid \.safetensors file"
        case "no safetensors":
            file.write_text("nonsense" * 100)
            return r"is not a valid \.safetensors file"
        case "a Python object":
            file = folder / "file.pt"
            torch.save({"state_dict": network().state_dict(), "args": Note()}, file)
            return r"loaded safely as weights \(tests\.support\.awkward_models\.Note\): it is a pickle"
        case "a pickle":
            (folder / "file.pkl").write_bytes(pickle.dumps(network()))
            return "as weights: it is a pickle of Python objects, such as a whole model\n"
        case "TorchScript":
            torch.jit.save(torch.jit.trace(network().eval(), torch.zeros(1, 3)), folder / "file.pt")
            return "as weights: it is a TorchScript archive\n"
    return spoil_parts(kind, folder)


def spoil_parts(kind: str, folder: Path) -> str:
    """Weights in several files, or their index, that are not what they say; returns what the message should say."""
    file = write_parts(folder, network().state_dict(), "safetensors")
    index: dict[str, Any] = json.loads(file.read_text())
    part = folder / "model-1-of-2.safetensors"
    match kind:
        case "a part is gone":
            part.unlink()
            expected = "model-1-of-2.safetensors is missing"
        case "a name is gone":
            safetensors.save_file({"other": torch.ones(1)}, part)
            expected = "is not in model-1-of-2.safetensors"
        case "a file elsewhere":
            index["weight_map"]["head.bias"] = "../file.safetensors"
            expected = "not a file in the same folder"
        case "no map":
            del index["weight_map"]
            expected = "not a list of weights"
        case "deep map":
            file.write_text('{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}")
            file.replace(folder / "file.index.json")
            return "not a list of weights"
    file.write_text(json.dumps(index))
    file.replace(folder / "file.index.json")
    return expected


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "kind",
    ["torn", "no safetensors", "a Python object", "a pickle", "TorchScript", "a part is gone", "a name is gone",
     "a file elsewhere", "no map", "deep map"],
)  # fmt: skip
def test_what_is_broken_is_refused_in_one_message(kind: str, tmp_path: Path) -> None:
    expected = spoil(kind, tmp_path)
    names = {"a Python object": "file.pt", "torn": "file.safetensors", "no safetensors": "file.safetensors"}
    names |= {"a pickle": "file.pkl", "TorchScript": "file.pt"}
    with warnings.catch_warnings(record=True) as warned, pytest.raises(RequestError, match=expected) as refused:
        read_initial_weights(tmp_path / names.get(kind, "file.index.json"))
    assert not warned, "torch's would stand above the message"
    assert refused.value.problem.startswith("--init-from ")
    assert "\n" not in refused.value.problem
    if kind in ("a Python object", "a pickle", "TorchScript"):
        assert "torch.save(model.state_dict(), 'weights.pt')" in refused.value.remedy


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["best.pt", "last.pt", "model.safetensors"], "best.pt"),
        (["model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json"],
         "model.safetensors.index.json"),
        (["config.json", "model.safetensors", "pytorch_model.bin"], "model.safetensors"),
        (["adapter.safetensors", "model.safetensors"], "model.safetensors"),
        (["net.safetensors"], "net.safetensors"),
        (["a.safetensors", "b.safetensors"], None),
        (["last.pt", "notes.txt"], None),
    ],
)  # fmt: skip
def test_a_folder_has_one_file_of_weights_or_is_refused(files: list[str], chosen: str | None, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(serialize({}))
    assert find_weight_file(tmp_path) == (tmp_path / chosen if chosen else None)


@pytest.mark.parametrize("name", ["a.safetensors.index.json", "a.safetensors", "a.pt"])
def test_fifo_in_place_of_weights_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with within_seconds(20), pytest.raises(RequestError, match=f"--init-from: .*{name} is a FIFO"):
        read_initial_weights(tmp_path / name)
