import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/tiny_language_model.py"
BROKEN = """
def __getattr__(name):
    raise ModuleNotFoundError(f"Could not import module {name!r}") from RuntimeError("torchvision::nms is gone")
"""


def test_a_torchvision_for_another_torch_is_told_in_two_lines(tmp_path: Path) -> None:
    """As transformers raises it where torchvision can't be imported."""
    (tmp_path / "transformers.py").write_text(BROKEN)
    (tmp_path / "tokenizers.py").write_text("ByteLevelBPETokenizer = None")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("transformers can't be loaded: torchvision::nms is gone\n  try: pip install")
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "tiny").exists()
