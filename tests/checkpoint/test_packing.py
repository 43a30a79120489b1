import io
import pickle
from pathlib import Path

import pytest
import torch

from multigpu_cli.checkpoint.packing import packed, unpacked
from multigpu_cli.errors import RequestError
from tests.malicious import Evil


def test_a_state_comes_back() -> None:
    state = {"w": torch.arange(4.0), "n": [1, None, "x", 2.5], "deep": {"flag": True}}
    found = unpacked(packed(state), "state.pt")
    assert torch.equal(found.pop("w"), state.pop("w"))
    assert found == state


def test_the_bytes_do_not_depend_on_where_they_go() -> None:
    assert packed({"w": torch.ones(3)}) == packed({"w": torch.ones(3)})


@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_no_code_runs_from_a_malicious_file(kind: str, tmp_path: Path) -> None:
    target, content = tmp_path / "attacked", io.BytesIO()
    torch.save({"model": Evil(target)}, content) if kind == "torch" else pickle.dump(Evil(target), content)
    with pytest.raises(RequestError, match=r"foreign\.pt is no file of weights that can be loaded safely"):
        unpacked(content.getvalue(), "foreign.pt")
    assert not target.exists()
    torch.load(io.BytesIO(content.getvalue()), weights_only=False) if kind == "torch" else pickle.loads(  # noqa: S301
        content.getvalue()
    )
    assert target.exists(), "the attack works on whoever is careless, so the test could fail"


@pytest.mark.parametrize("content", [b"", b"hello", packed({"w": torch.ones(100)})[:-10]])
def test_a_foreign_or_torn_file_is_named(content: bytes) -> None:
    with pytest.raises(RequestError, match=r"foreign\.pt"):
        unpacked(content, "foreign.pt")
