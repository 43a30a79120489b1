"""What people bring from other programs runs at the first try, on one worker and on two with one curve.

The code of a style is in tests/support/styles, written here as such programs have it. A style takes two launches.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.monitor.journal import read_events
from tests.distributed.launcher import ROOT, run_command, torchrun
from tests.support.sample_files import write_samples
from tests.support.styles.nanogpt import write_tokens
from tests.support.styles.webdataset_shards import write_shards

SCRIPT = str(ROOT / "tests/support/train_several.py")
HERE = "tests.support.styles."
RUN: dict[str, Any] = {
    "global_batch_size": 8, "batch_size": 2, "max_steps": 6, "log_interval": 1, "optimizer": "sgd", "lr": 0.05,
    "schedule": "constant", "warmup_epochs": 0, "hang_timeout": 60,
}  # fmt: skip


def own(style: str, data: str, model: str, task: str = "classification", **more: Any) -> dict[str, Any]:
    """The flags for a dataset, a network and perhaps a task of a style; names without a dot are of its file."""
    named = {"data": data, "model": model, "task": task}
    return {key: f"{HERE}{style}:{name[1:]}" if name[0] == ":" else name for key, name in named.items()} | more


def example(data: str, model: str, task: str = "classification", **more: Any) -> dict[str, Any]:
    return own("pytorch_examples", data, model, task, **more)


def script(data: str, model: str, task: str = "classification", **more: Any) -> dict[str, Any]:
    return own("own_scripts", data, model, task, **more)


def calls(name: str) -> dict[str, Any]:
    return {"calls": f"{HERE}python_calls:{name}"}


TOKENS: dict[str, Any] = {"data_dir": "tokens", "sets": ["data.block=15"]}
STYLES: dict[str, dict[str, dict[str, Any]]] = {
    "pytorch_examples": {
        "mnist": example("digits", ":Net"),
        "mnist, its own schedule": example("digits", ":Net", schedule=f"{HERE}pytorch_examples:step_lr"),
        "mnist_rnn": example("digits", ":Rnn"),
        "vae": example(":Faces", ":VAE", ":VaeLoss"),
        "word_language_model, transformer": example(":Following", ":TransformerModel", "language-model"),
        "word_language_model, LSTM": example(":Following", ":RNNModel", "language-model"),
        "time_sequence_prediction": example(":Waves", ":Sequence", "regression"),
        "super_resolution": example(
            ":Crops", ":SuperResolution", "regression", metric=[f"{HERE}pytorch_examples:psnr"]
        ),
        "imagenet": example(":Photos", "torchvision/squeezenet1_1", data_dir="files/photos", lr=0.001),
        "gcn": example(":Nodes", ":GCN"),
        "regression": example(":Polynomial", ":LinearRegression", "regression", lr=0.001),
    },
    "mingpt": {"its dataset and GPT": own("mingpt", ":SortDataset", ":GPT", "from-model")},
    "nanogpt": {
        "model.py and .bin files": TOKENS | own("nanogpt", "text", ":gpt", "from-model"),
        "logits alone, muon": TOKENS | own("nanogpt", "text", ":logits_only", "language-model", optimizer="muon"),
    },
    "timm": {"network and transforms": own("timm_images", ":Images", "timm/test_vit", lr=0.001)},
    "lightning": {
        "forward": own("lightning_modules", ":Numbers", ":LitClassifier", sets=["model.args.hidden=8"]),
        "training_step as a task": own("lightning_modules", ":Numbers", ":LitClassifier", ":TrainingStep"),
        "training_step as forward": own("lightning_modules", ":Alone", ":LitAutoencoder", "from-model"),
    },
    "hugging_face": {
        "BERT, padded": own("hugging_face", ":Reviews", ":bert"),
        "BERT, collated": own("hugging_face", ":Collated", ":bert"),
        "BERT, an iterable dataset": own("hugging_face", ":stream", ":bert"),
        "GPT-2 with labels": own("hugging_face", ":Texts", ":gpt2", "from-model"),
    },
    "webdataset": {
        "a pipeline": own("webdataset_shards", ":Pipeline", ":Net", data_dir="shards"),
        "the shards": own("webdataset_shards", "tar", ":Net", data_dir="shards", sets=["data.target=cls"]),
    },
    "own_scripts": {
        "segmentation": script(":Scenes", ":Fcn", "segmentation"),
        "multi-label of whole numbers": script(":Tags", ":Linear", "multi-label", sets=["model.args.num_classes=3"]),
        "a dict of targets": script(":Two", ":Heads", ":KindAndSize"),
        "SimCLR": script(":Views", ":SimCLR", "from-model"),
        "distillation": script(":Pairs", ":Distilled", "from-model"),
        "detection": script(":Boxes", ":Detector", "from-model"),
        "pack_padded_sequence": script(":Ragged", ":Packed"),
        "a head that learns faster": script(":Pairs", ":Linear", sets=['optimizer.rates={"net.2.*": 10}']),
    },
    "python": {
        name.replace("_", " "): calls(name)
        for name in ("siamese", "one_cycle", "parameter_groups", "weighted_sampler", "data_collator", "segmentation")
    },
}


def read_curve(folder: Path) -> dict[tuple[str, int], float]:
    """The loss of each step, and of the evaluations."""
    events = [line for line in read_events(folder / "journal.jsonl") if line["event"] in ("train", "eval")]
    return {(line.get("split", "train"), line["step"]): line["loss"] for line in events}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # one of the files is made by torch.jit
@pytest.mark.parametrize("style", STYLES)
def test_one_and_two_workers_have_one_curve(style: str, tmp_path: Path) -> None:
    write_samples(tmp_path / "files")
    write_tokens(tmp_path / "tokens")
    write_shards(tmp_path / "shards")
    names = list(STYLES[style])
    for workers, launch in ((1, [sys.executable, SCRIPT]), (2, torchrun(2, script=SCRIPT))):
        requests = [STYLES[style][name] for name in names]
        flags = [each if "calls" in each else RUN | each for each in requests]
        words = [json.dumps(each | {"save_dir": f"{workers}/{number}"}) for number, each in enumerate(flags)]
        ended = run_command([*launch, *words], tmp_path)
        assert ended.returncode == 0, ended.stderr
    for number, name in enumerate(names):
        one, two = (read_curve(tmp_path / str(workers) / str(number)) for workers in (1, 2))
        assert len(one) >= 6, name
        assert two == pytest.approx(one, rel=2e-5, abs=2e-6), name


def test_there_are_thirty_cases() -> None:
    assert sum(map(len, STYLES.values())) >= 30
