"""The guard finds what is wrong with models, tasks and collate functions of others, and is quiet about right ones.

The code is that of reviewers, which may not be here.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

from multigpu_cli.data.loader import Batch
from multigpu_cli.tasks.base import BatchMetrics, Task
from tests.support.run_training import run_training

INPUTS = Path(__file__).resolve().parents[4] / "shared" / "review" / "inputs"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not INPUTS.is_dir(), reason="no code of reviewers")]


def two_classes(split: str, seed: int) -> TensorDataset:
    inputs = torch.randn(96 if split == "train" else 32, 8, generator=torch.Generator().manual_seed(seed + len(split)))
    return TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())


class TeacherTask(Task):
    """The criterion of the reviewers' mean teacher."""

    def loss_sum(self, model: Any, batch: Batch) -> Tensor:
        student, teacher = model(batch.inputs)
        distance = mse_loss(student.softmax(1), teacher.softmax(1))
        return (cross_entropy(student, batch.targets) + distance) * len(batch)

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        return BatchMetrics(self.loss_sum(model, batch).double(), torch.zeros(0, dtype=torch.int64))


class Case(NamedTuple):
    """A model of a file of reviewers, with its data and task."""

    model: str
    data: str
    refused: str = ""  # words of the error; "": none
    warned: str = ""  # words of a warning; "": none
    task: str = "from-model"
    workers: int = 1
    needs: str = ""  # package


WRITES, NO_SUM = "forward writes the parameters", "that of their halves together"
SPOKEN: tuple[str, ...] = (
    WRITES,
    NO_SUM,
    "forward changes",
    "forward keeps",
    "forward overwrites",
    "forward draws",
    "communicate",
)
SPOKEN += ("an evaluation changes", "the loss depends on", "the task uses", "the guard examined no further")
FOREIGN = [
    Case("f01_moco:MoCo", "f01_moco:data", WRITES),
    Case("f03_qat:qat", "f03_qat:data", warned="an evaluation changes", task="classification"),
    Case("f05_filtered:net", "f05_filtered:data", "collate_fn returned", task="classification"),
    Case("f05_filtered:net", "f05_filtered:data2", "collate_fn returned", task="classification"),
    Case("f14_simclr:SimCLR", "f14_simclr:data", warned=NO_SUM),
    Case("f14_simclr:SimCLR", "f14_simclr:data", "communicates by itself: allgather", workers=2),
    Case("f14_simclr:Local", "f14_simclr:data", warned=NO_SUM),
    Case("f16_python:MeanTeacher", f"{__name__}:two_classes", WRITES, task=f"{__name__}:TeacherTask"),
    Case(
        *("f17_lightning:Lit", "f17_lightning:data"),
        warned="the task uses model.training_step",
        task="f17_lightning:Step2",
        needs="lightning",
    ),
    Case("f19_ddpm:DDPM", "f19_ddpm:data", needs="diffusers"),
    Case("f23_anneal:VAE", "f23_anneal:data", "(VAE) .num_iter, and the loss depends on it"),
    Case("f10_hf:clip", "f10_hf:captions", warned=NO_SUM, needs="transformers"),
]
EXACT = [
    Case(f"u:m_{name}", "u:data", refused, warned, "classification")
    for name, refused, warned in (
        ("PyCounter", "(PyCounter) .n, and the loss depends on it", ""),
        ("PyAnneal", "", "(PyAnneal) .n"),
        ("OwnGen", "", "draws from a random generator of its own"),
        ("RankScale", "", "the loss depends on the rank"),
        ("EvalBuffer", "", "an evaluation changes mom"),
        ("EvalBufferOnly", "", "an evaluation changes mom"),
        ("PyCache", "(PyCache) .run, and the loss depends on it", ""),
        ("SeenParam", WRITES, ""),
        ("Moco", WRITES, ""),
        ("BigNorm", "", "the loss depends on the rank or the number of workers"),
    )
]
EXACT += [
    Case("u:lin", "u:data", warned=NO_SUM, task="u:LocalCount"),
    Case("u:lin", "u:data", "(StepCount) .n, and the loss depends on it", task="u:StepCount"),
    Case("u:lin", "u:data", warned="the number of workers", task="u:ByWorld"),
    Case("u:m_RankScale", "u:data", "a different loss on each rank", task="classification", workers=2),
]
RIGHT = [
    Case(f"d:{name}", "u:data", task="classification") for name in ("growing", "lazy", "moe", "vae", "cplx", "bf16")
]
RIGHT += [Case(f"zoo:{name}", "zoo:data", task="classification") for name in ("tied", "lstm", "emb", "conv", "blocks")]
RIGHT += [Case(f"u:m_{name}", "u:data", task="classification") for name in ("HalfBuf", "Spec", "Cum")]
RIGHT += [
    Case("f08_fno:FNO", "f08_fno:data", task="regression"),
    Case("f07_forces:PotentialGrad", "f07_forces:data"),
    Case("f04_ctc:WithLoss", "f04_ctc:data"),
]


@pytest.mark.filterwarnings("ignore")  # code of reviewers uses what torch has deprecated
@pytest.mark.parametrize(
    "case", [*FOREIGN, *EXACT, *RIGHT], ids=lambda case: f"{case.model}-{case.task}-{case.workers}"
)
def test_guard_says_what_is_wrong_with_code_of_others(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if case.needs:
        pytest.importorskip(case.needs)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for folder in ("foreign", "exact"):
        monkeypatch.syspath_prepend(INPUTS / folder)
    sizes: dict[str, Any] = {"batch_size": 8, "global_batch_size": 32, "max_steps": 2, "save_dir": "run"}
    ended = run_training(case.workers, data=case.data, model=case.model, task=case.task, screen="normal", **sizes)
    output = capfd.readouterr()
    said = " ".join((output.out + output.err).split())
    if case.refused:
        assert case.refused in ended.error
        assert not Path("run").exists()
    else:
        assert not ended.error
    if case.warned:
        assert case.warned in said
    elif not case.refused:
        assert not [words for words in SPOKEN if words in said]
