import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/tiny_language_model.py"
BROKEN = """
def __getattr__(name):
    raise ModuleNotFoundError(f"Could not import module {name!r}") from RuntimeError("torchvision::nms is gone")
"""


@pytest.mark.usefixtures("in_tmp_path")
def test_a_torchvision_for_another_torch_is_told_in_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers raises it where torchvision can't be imported."""
    broken = ModuleType("transformers")
    exec(BROKEN, vars(broken))
    monkeypatch.setitem(sys.modules, "transformers", broken)
    monkeypatch.setitem(sys.modules, "tokenizers", ModuleType("tokenizers"))
    monkeypatch.setattr("tokenizers.ByteLevelBPETokenizer", None, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    told = str(ended.value.code).splitlines()
    assert told[0] == "transformers can't be loaded: torchvision::nms is gone"
    assert (len(told), told[1].startswith("  try: pip install")) == (2, True)
    assert not Path("tiny").exists()
