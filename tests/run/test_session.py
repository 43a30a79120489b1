"""What --verbose adds to a run: what was chosen, every number, each checkpoint; and where other ranks speak."""

import re
from pathlib import Path

import pytest
import torch

from tests.trained import trained


def test_verbose_says_what_was_chosen_and_each_checkpoint_and_where_rank_1_speaks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    flags = {"save_dir": str(folder), "batch_size": 10, "epochs": 2, "log_interval": 3, "freeze": ["2.weight"]}
    flags["data"] = "tests.own:wide"
    ended = trained(3, screen="verbose", environ={"OWN_DEED": "1:6:SIGCONT"}, **flags)  # rank 1 says so, and goes on
    assert ended.error == ""
    out = capfd.readouterr().out
    shown = dict(
        re.findall(r"^ (\w[\w ]*?) {2,}(.*)$", out.partition("Details\n")[2].partition("step ")[0], re.MULTILINE)
    )
    assert shown["versions"].startswith(f"torch {torch.__version__}, Python 3.")
    assert shown["model"] == "tests.own:net: 80,083 parameters, 83 trained, 0.3 MiB"
    assert shown["samples"] == "60 training, 21 validation, 22 test; in host memory; evaluated in batches of 20"
    assert shown["optimizer"] == "AdamW, 4 tensors"
    assert shown["checkpoints"] == "every epoch, 3 are kept"
    assert re.fullmatch(r"gloo, buckets of \d+ MiB", shown["gradients"])
    assert shown["other ranks"] == f"print to {folder}/logs/rank_1.log … rank_2.log"
    assert f"\noutput of rank 1: {folder}/logs/rank_1.log\n" in out
    head, *said = (folder / "logs" / "rank_1.log").read_text().splitlines()
    assert (head[:23], said) == ("--- rank 1, attempt 1, ", ["rank 1 does it"])
    assert "does it" not in out
    assert len(re.findall(r"^  loss .* grad norm .* memory \d+ MiB / \d+ MiB ", out, re.MULTILINE)) == 2
    assert re.search(r"^checkpoint of step 2: \d\.\d MiB in [\d.]+ s, ", out, re.MULTILINE)
