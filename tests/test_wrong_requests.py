"""Wrong requests: exit code 2, one short message on stderr that names what is wrong, no traceback, nothing touched."""

import socket
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import main_multi_gpu
from tests.distributed.forked import run_forked
from tests.distributed.launcher import torchrun

TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


class Row(NamedTuple):
    """One wrong request.

    Attributes:
        argv: the command line, as one would type it.
        words: what the message must contain.
        files: name → content of what lies in the current folder; None makes a folder.
        environ: what a launcher has set.
    """

    argv: str
    words: Sequence[str]
    files: Mapping[str, bytes | None] = {}
    environ: Mapping[str, str] = {}


def yaml(content: str | bytes, *words: str) -> Row:
    """A broken recipe."""
    content = content if isinstance(content, bytes) else content.encode()
    return Row("--config mine.yaml", ["mine.yaml", *words], {"mine.yaml": content})


DOOR = [
    # numbers
    *(Row(f"--batch-size={value}", ["--batch-size", "from 1"]) for value in ("0", "-4", "many", "1.5", "nan", "")),
    *(Row(f"--epochs={value}", ["--epochs", "from 1"]) for value in ("0", "-1", "inf", "1e99")),
    *(Row(f"--lr={value}", ["--lr", "above 0"]) for value in ("nan", "inf", "-1", "0", "-inf", "fast")),
    *(Row(f"--base-lr={value}", ["--base-lr", "above 0"]) for value in ("nan", "-0.1")),
    Row("--weight-decay=-1", ["--weight-decay", "at least 0"]),
    Row("--weight-decay=nan", ["--weight-decay"]),
    Row("--warmup-epochs=-1", ["--warmup-epochs"]),
    Row("--warmup-epochs=nan", ["--warmup-epochs"]),
    Row("--warmup-epochs=30", ["--warmup-epochs 30", "--epochs 20"]),
    Row("--max-grad-norm=0", ["--max-grad-norm", "off"]),
    Row("--label-smoothing=1", ["--label-smoothing", "below 1"]),
    Row("--ema=1", ["--ema", "off"]),
    Row("--seed=-1", ["--seed"]),
    Row("--max-steps=0", ["--max-steps"]),
    Row("--grad-accum-steps=0", ["--grad-accum-steps"]),
    Row("--global-batch-size=0", ["--global-batch-size"]),
    Row("--num-workers=-1", ["--num-workers", "auto"]),
    Row("--checkpoint-every=10s", ["--checkpoint-every", "10m"]),
    Row("--hang-timeout=0", ["--hang-timeout"]),
    Row("--keep=0", ["--keep"]),
    # words
    Row("--data digitz", ["--data digitz", "did you mean 'digits'?"]),
    Row("--model convnett", ["--model convnett", "did you mean 'convnet'?"]),
    Row("--task clasification", ["--task", "did you mean 'classification'?"]),
    Row("--optimizer adamv", ["--optimizer", "did you mean 'adam"]),
    Row("--mode flaten", ["--mode", "did you mean 'flatten'?"]),
    Row("--amp fp8", ["--amp", "bf16"]),
    Row("--multi-gpu dpp", ["--multi-gpu", "did you mean"]),
    Row("--schedule cos", ["--schedule", "cosine"]),
    Row("--optimizer lbfgs", ["--optimizer", "lbfgs is not supported", "closure"]),
    Row("--optimizer my-code:Lion", ["--optimizer", "module:Class", "my_file:NAME"]),
    Row("--optimizer muon --multi-gpu fsdp", ["--optimizer muon", "all rows of a weight", "--multi-gpu ddp"]),
    Row("--schedule my_code:f --warmup-epochs 1", ["--warmup-epochs", "own warm-up"]),
    Row('--set optimizer.groups=[{"match":"a","lr":1}]', ["optimizer.groups", "'lr'", "lr_factor"]),
    Row('--set optimizer.groups=[{"match":"a"}]', ["optimizer.groups", "neither weight_decay nor lr_factor"]),
    Row("--model net.py:Net", ["--model net.py:Net", "module:factory"]),
    Row("--logger mlfow", ["--logger mlfow", "did you mean 'mlflow'?"]),
    Row("--logger mlflow --logger mlflow", ["--logger", "different loggers"]),
    Row("--logger https://me:geheim@host", ["--logger must be a name, not an address", "MLFLOW_TRACKING_URI"]),
    Row("--logger wandb --set data.args.url=http://me:geheim@host/x", ["data.args", "password", "environment"]),
    Row("--model nets/net:Net", ["--model nets/net:Net", "module:factory"]),
    # metrics and hooks
    Row("--metric macro-f1", ["--metric macro-f1: unknown name", "did you mean 'macro_f1'?"]),
    Row("--metric loss=my:f1", ["'loss' is already in use", "--metric NAME=my:f1"]),
    Row("--metric my:f1 --metric other:f1", ["--metric other:f1", "'f1' is given twice"]),
    Row(
        "--metric macro_f1 --set metric.args.f1={a:1}",
        ["metric.args.f1: there is no --metric of that name"],
    ),
    Row("--metric macro_f1 --set metric.args.macro_f1=3", ["metric.args.macro_f1: must be a mapping"]),
    Row("--best val_loss", ["--best must be NAME:max or NAME:min", "'val_loss'"]),
    Row("--hook Recorder", ["--hook Recorder: must be module:Class", "--hook my_file:Recorder"]),
    Row("--hook my.py:Recorder", ["--hook my.py:Recorder: must be module:Class"]),
    Row("--hook =my:Recorder", ["'' is not a valid name"]),
    # the command line itself
    Row("--epoch 3", ["no such option: --epoch", "--epochs"]),
    Row("--batchsize 3", ["no such option: --batchsize", "--batch-size"]),
    Row("--lr", ["'--lr' requires an argument"]),
    Row("--json=yes", ["--json"]),
    Row("trian", ["'trian' is not a command"]),
    Row("recipe", ["'recipe' is not a command", "recipes"]),
    Row("--epochs 3 recipes", ["--epochs stands before the command 'recipes'"]),
    Row("--local-rank=0", ["no such option: --local-rank", "torchrun in the place of torch.distributed.launch"]),
    Row("recipes --epochs 3", ["no such option: --epochs"]),
    Row("--quiet --verbose", ["--verbose can't be used with --quiet"]),
    Row("--no-amp --amp bf16", ["--no-amp can't be used with --amp bf16"]),
    # --set
    Row("--set epochs", ["--set epochs", "KEY=VALUE"]),
    Row("--set =3", ["--set =3", "KEY=VALUE"]),
    Row("--set epoch=3", ["--set epoch", "did you mean 'epochs'?"]),
    Row("--set epochs=", ["--set epochs", "has no value"]),
    Row("--set epochs=[1", ["--set epochs", "malformed"]),
    Row("--set lr=!!python/name:os.system", ["--set lr", "tag"]),
    Row("--set model.args.1=2", ["--set model.args.1"]),
    Row("--set save-dir=x", ["--set save-dir", "did you mean 'save_dir'?"]),
    Row("--set data.dir=x", ["--set data.dir", "data_dir"]),
    # recipes
    Row("--config none.yaml", ["--config none.yaml", "no such file"]),
    Row("--config mine", ["--config mine", "is a directory"], {"mine": None}),
    Row("--config mine.yam", ["mine.yam", "did you mean 'mine'?"], {"configs": None, "configs/mine.yaml": b"seed: 1"}),
    yaml("epochs: 3\nmodel: mlp\nlearning-rate: 3\n", ":3: learning-rate", "no such setting"),
    yaml("seed: 1\nbatch_sise: 3\n", ":2: batch_sise", "did you mean 'batch_size'?"),
    yaml("model:\n  name: mlp\n  arg: {a: 1}\n", ":3: model.arg", "did you mean 'model.args'?"),
    yaml("epochs: twenty\n", ":1: epochs must be a whole number"),
    yaml("lr: .nan\n", ":1: lr must be a number"),
    yaml("sync_bn: 3\n", ":1: sync_bn must be true or false"),
    yaml("model: [mlp]\n", ":1: model must be a word"),
    yaml("data:\n  args: 3\n", ":2: data.args must be a mapping"),
    yaml("epochs:\n", ":1: epochs has no value"),
    yaml("seed: 1\nseed: 2\n", ":2: 'seed' is repeated"),
    yaml("seed: [1\n", "malformed"),
    yaml("", ":1: the file is empty"),
    yaml("- seed\n", ":1: the file is a list"),
    yaml("seed\n", ":1: the file is a single value"),
    yaml(b"seed: 1\nmode: \xff\n", ":2: not UTF-8"),
    yaml("#" * 2**21, "too large"),
    yaml("seed: !!python/object/apply:os.system [ls]\n", ":1: the tag"),
    yaml("seed: !mine 3\n", ":1: the tag !mine"),
    yaml("a: &a [1]\nseed: *a\n", ":2: anchors"),
    yaml("seed: " + "9" * 5000, ":1: seed must be"),
    Row("--set optimizer.rates=10", ["--set optimizer.rates must be a mapping of patterns to factors"]),
    Row("--set optimizer.rates.head.*=10", ["""use --set 'optimizer.rates={"head.*": 10}'"""]),
    Row("--set optimizer.layer_decay.head=1", ["'layer_decay.head' is not", "use --set optimizer.args.NAME=VALUE"]),
    Row("--set optimizer.rates={a:-1}", ["--set optimizer.rates"]),
    Row('--set optimizer.rates={"a":-1}', ["--set optimizer.rates must be a number above 0, not -1"]),
    Row("--set optimizer.layer_decay=2", ["--set optimizer.layer_decay must be a number above 0 and at most 1"]),
    # settings that exclude each other
    Row("--lr 1 --base-lr 2", ["--lr can't be used with --base-lr"]),
    Row("--lr 1 --set base_lr=2", ["--lr can't be used with --set base_lr"]),
    Row("--lr 1 --lr-scaling sqrt", ["--lr can't be used with --lr-scaling"]),
    Row("--grad-accum-steps 3 --global-batch-size 128", ["--grad-accum-steps 3", "--global-batch-size 128"]),
    Row("--exact --multi-gpu dp", ["--exact can't be used with --multi-gpu dp"]),
    Row("--exact --sync-bn", ["--exact can't be used with --sync-bn"]),
    Row("--multi-gpu dp --sync-bn", ["--sync-bn can't be used with --multi-gpu dp"]),
    Row("--num-envs 4", ["--num-envs", "--task ppo"]),
    # devices and launchers
    *(Row(f"--gpu-ids={value}", ["--gpu-ids"]) for value in ("0,0", "-1", "a", "0,", "0;1", "")),
    Row("--multi-gpu none --gpu-ids 0,1", ["--gpu-ids 0,1 can't be used with --multi-gpu none"]),
    Row("--multi-gpu dp --nproc-per-node 2", ["--nproc-per-node can't be used with --multi-gpu dp"]),
    Row("--nproc-per-node 3 --gpu-ids 0,1", ["--nproc-per-node 3", "--gpu-ids 0,1"]),
    Row("--multi-gpu fsdp --nproc-per-node 4 --shard-size 3", ["4 workers can't be divided", "--shard-size 2 or 4"]),
    Row("--multi-gpu dp", ["--multi-gpu dp under torchrun"], environ=TORCHRUN),
    Row("--multi-gpu ddp --gpu-ids 0,1", ["--gpu-ids 0,1 under torchrun", "CUDA_VISIBLE_DEVICES"], environ=TORCHRUN),
    Row("--nproc-per-node 4", ["--nproc-per-node 4", "torchrun"], environ=TORCHRUN),
    Row("--max-restarts 4", ["--max-restarts 4 under torchrun"], environ=TORCHRUN),
    Row("", ["incomplete", "RANK", "MASTER_ADDR"], environ={"RANK": "0"}),
    Row("", ["incomplete", "MASTER_PORT"], environ={key: TORCHRUN[key] for key in TORCHRUN if key != "MASTER_PORT"}),
    Row("", ["WORLD_SIZE=two"], environ=TORCHRUN | {"WORLD_SIZE": "two"}),
    # places
    Row("--data-dir none", ["--data-dir none"]),
    Row("--data-dir file", ["--data-dir file", "not a file of a known dataset", ".csv"], {"file": b""}),
    Row("--data-dir empty", ["--data-dir empty", "no dataset is recognized", "--data NAME"], {"empty": None}),
    Row("--data-dir a.csv --data har", ["--data-dir a.csv", "--data har needs a folder", "--data csv"], {"a.csv": b""}),
    Row("--data a.jsonl", ["--data-dir a.jsonl", "--model-dir", "records --data jsonl"], {"a.jsonl": b'{"size": 1}'}),
    Row("--data a.zip", ["--data a.zip", "not a file of a known dataset", "module:factory"], {"a.zip": b""}),
    Row("--data a.parquet", ["--model-dir", "multigpu data convert a.parquet --to a and"], {"a.parquet": b""}),
    Row("--data a.json", ["--data-dir a.json", "--model-dir", "jq -c '.[]' a.json > a.jsonl"], {"a.json": b"[]"}),
    Row("--data b.csv", ["--data b.csv", "no such file", "did you mean 'a.csv'?"], {"a.csv": b""}),
    Row("--data a.csv --data-dir .", ["--data a.csv can't be used with --data-dir ."], {"a.csv": b""}),
    Row("--data-dir .", ["could be several datasets", "add --data csv or --data npz"], {"a.csv": b"", "a.npz": b""}),
    Row("--data ./", ["could be several", "add --data csv --data-dir . or --data npz"], {"a.csv": b"", "a.npz": b""}),
    Row("--init-from none.pt", ["--init-from none.pt", "no such file"]),
    Row("--init-from run", ["--init-from run", "is a folder with no weights file"], {"run": None}),
    Row("--set model.unfreeze_at=3", ["model.unfreeze_at without --freeze"]),
    Row("--freeze *.bias --set model.unfreeze_at=21", ["model.unfreeze_at 21", "after the last epoch (--epochs 20)"]),
    Row("--freeze *.bias --set model.unfreeze_at=1", ["--set model.unfreeze_at must be a whole number from 2"]),
    Row("--init-partial", ["--init-partial without --init-from"]),
    Row("--save-dir file", ["--save-dir file", "not a folder"], {"file": b""}),
    Row("--save-dir file/run", ["--save-dir file/run", "not a folder"], {"file": b""}),
    Row("--resume none", ["--resume none"]),
    Row("--resume Auto", ["--resume Auto", "did you mean 'auto'?"]),
    Row("--resume rum", ["--resume rum", "did you mean 'run'?"], {"run": None}),
    Row("--init-from bets.pt", ["--init-from bets.pt", "did you mean 'best.pt'?"], {"best.pt": b"", "bets": None}),
    Row("--init-from /dev/zero", ["--init-from /dev/zero", "not a regular file"]),
    Row("--data-dir ~nobody-here/x", ["--data-dir", "'~nobody-here/x'", "unknown user"]),
    Row("--config ~nobody-here/x.yaml", ["--config", "unknown user"]),
    *(
        Row(f"{flag} {'x' * 300}", [flag, "too long for any file"])
        for flag in ("--save-dir", "--data-dir", "--init-from")
    ),
    Row(f"--config {'x' * 300}", ["--config", "too long for any file"]),
    Row(f"--resume {'x/' * 2100}", ["--resume", "too long for any file"]),
    # a file says where it runs, and the command something else that cannot be
    Row(
        "--config two.yaml --multi-gpu dp --sync-bn",
        ["--sync-bn can't be used with"],
        {"two.yaml": b"nproc_per_node: 2"},
    ),
    Row(
        "--config both.yaml",
        ["--nproc-per-node can't be used with"],
        {"both.yaml": b"nproc_per_node: 2\nmulti_gpu: dp"},
    ),
    # several at once
    Row(
        "--epochs 0 --lr nan --data digitz --multi-gpu dp --sync-bn --data-dir none --set keep=0 --set word",
        ["--epochs", "--lr", "'digits'", "--sync-bn", "--data-dir none", "--set keep", "KEY=VALUE"],
    ),
]
LINEAR = b"""from torch import nn
def net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
HOOKS = b"""class Misspelt:
    def on_step_end(self, numbers, tensors): pass
class Empty:
    def run(self): pass
class Short:
    def step_end(self, numbers): pass
class Half:
    def start(self, numbers): pass
    def state_dict(self): return {}
class Anywhere(Short):
    step_end, start, ranks = None, Half.start, "main"
class Later:
    async def start(self, numbers): pass
function = len
"""
METRICS = b"""class Neither:
    def compute(self): return 1.0
class Late:
    def update(self, outputs, targets): pass
class Wide:
    def sums(self, outputs, targets): return outputs
    def compute(self, sums): return 1.0
def mean(outputs, targets): return (outputs.argmax(1) == targets).float().mean()
def lonely(outputs): return outputs
def failing(outputs, targets): return outputs.nothing
def spoiling(outputs, targets): return outputs.mul_(2).sum(1)
"""
ENGINE = [
    *(
        Row(command, ["srun started 2 tasks", "deploy/slurm.sbatch"], environ={"SLURM_STEP_NUM_TASKS": "2"})
        for command in ("--epochs 1", "--epochs 1 --dry-run", "evaluate .")
    ),
    *(
        Row(f"--hook my_hooks:{name}", [f"--hook my_hooks:{name}", *words], {"my_hooks.py": HOOKS})
        for name, *words in (
            ("Missing", "no 'Missing'"),
            ("function", "not a class"),
            ("Misspelt", "'on_step_end', which is never called", "did you mean 'step_end'?"),
            ("Empty", "none of the methods of a hook; it has run", "one of: start, after_backward"),
            ("Short", "step_end does not take 2 arguments", "def step_end(self, numbers, tensors)"),
            ("Half", "state_dict, and no load_state_dict"),
            ("Anywhere", "its ranks are 'main'"),
            ("Later", "calling start would not run its body", "without async"),
        )
    ),
    *(
        Row(f"--metric my_metrics:{name}", [f"--metric my_metrics:{name}", *words], {"my_metrics.py": METRICS})
        for name, *words in (
            ("Missing", "no 'Missing'"),
            ("Neither", "neither a method update nor sums"),
            ("Late", "no method compute"),
            ("Wide", "sums returned float32 (2, 10)"),
            ("mean", "it returned float32 () for 2 samples", "update and compute"),
            ("lonely", "can't be called with outputs, targets"),
            ("failing", "raised AttributeError in my_metrics.py:10"),
            ("spoiling", "it changed its outputs", "clone()"),
        )
    ),
    Row("--metric torchmetrics:F1", ["module 'torchmetrics' has no 'F1'", "F1Score"]),
    Row("--metric r2", ["--metric r2: update raised ValueError in builtin.py"]),
    Row("--metric accuracy=macro_f1", ["--task classification gives 'accuracy' already"]),
    Row("--metric macro_f1 --best val_f1:max", ["no 'val_f1'", "val_accuracy, val_loss, val_macro_f1"]),
    Row("--best loss:min", ["--best loss:min", "did you mean 'val_loss'?"]),
    Row("--multi-gpu dp --gpu-ids 900,901", ["--gpu-ids 900,901", "no GPU"]),
    Row("--multi-gpu ddp --gpu-ids 900", ["--gpu-ids 900", "no GPU"]),
    Row("--data arrow --data-dir a.csv", ["--data arrow: ", "a.csv", "data convert"], {"a.csv": b"x,y\n1,2\n"}),
    Row("--data har", ["--data har", "--data-dir", "archive.ics.uci.edu"]),
    Row("--data har --data-dir empty", ["--data-dir empty", "archive.ics.uci.edu"], {"empty": None}),
    Row("--data nowhere:load", ["--data nowhere:load", "no module 'nowhere'"]),
    Row("--data json:nothing", ["--data json:nothing", "no 'nothing'"]),
    Row("--model har-convnet", ["--model har-convnet", "(1, 8, 8)"]),
    Row("--set model.args.widht=3", ["model.args.widht", "did you mean 'width'?"]),
    Row("--set data.args.agment=3", ["data.args.agment", "did you mean 'augment'?"]),
    Row("--grad-accum-steps 2 --global-batch-size 128", ["--global-batch-size 128", "--grad-accum-steps 2"]),
    Row("--drop-last --batch-size 100000", ["--drop-last", "--batch-size"]),
    Row("--init-from junk.pt", ["--init-from junk.pt", "can't be loaded safely"], {"junk.pt": b"junk"}),
    Row(
        "--init-from evil.pt",
        ["--init-from evil.pt", "can't be loaded safely"],
        {"evil.pt": b"cposix\nsystem\n(S'touch pwned'\ntR."},
    ),
    Row("--compile default --multi-gpu none", ["--compile default", "compiler", "--compile off"], {}, {"PATH": ""}),
    Row(
        "--multi-gpu ddp --nproc-per-node 4 --global-batch-size 2 --dry-run",
        ["--global-batch-size 2", "below the number of workers (4)"],
    ),
    Row("--resume empty", ["--resume empty", "no checkpoint"], {"empty": None}),
    Row("--freeze nothing.*", ["--freeze", "nothing.*"]),
    Row('--set optimizer.rates={"claissfy.*":2}', ["optimizer.rates 'claissfy.*'", "classify.1.weight"]),
    Row("--model my:net --set optimizer.layer_decay=0.9", ["no repeated blocks"], {"my.py": LINEAR}),
    Row("--save-dir /proc/none", ["--save-dir /proc/none"]),
    Row("--config configs-like.yaml", ["--gpu-ids 900", "no GPU"], {"configs-like.yaml": b"gpu_ids: [900]"}),
    *(
        Row(f"--data tests.support.bad_datasets:{name} --model mlp --num-workers 0", ["--data", *words])
        for name, *words in (
            ("nothing", "is empty"),
            ("one", "1 sample can't be divided into 3 parts"),
            ("no_training", "None for split='train'"),
            ("with_nan", "split train", "input of sample 3", "NaN"),
            ("with_negative", "labels range from -1 to 2"),
            ("with_labels_beyond", "has the label 3", "3 classes"),
            ("with_a_bad_sample", "sample 0 raised ValueError", "no such image"),
            ("raising", "tests.support.bad_datasets:raising raised ValueError", "split = 'train'"),
            ("a_number", "an object of type int"),
        )
    ),
    *(
        Row(f"--data {name} --data-dir data", [f"data/{file}", *words], {"data": None, f"data/{file}": content})
        for name, file, content, *words in (
            ("cifar10", "data_batch_1.bin", b"0" * 3072, "3,072 bytes, not a whole number"),
            ("npz", "mine.npz", b"PK\3\4 and no more", "np.savez"),
            ("csv", "mine.csv", b"a,b\n1,2\n3\n", ":3: 1 cells for 2 columns"),
            ("csv", "mine.csv", b'a,b\n1,"2\n3,4\n', ":2: unexpected end of data"),
            ("csv", "mine.csv", b"a,b\n1,caf\xe9\n", ":2: not UTF-8", "iconv"),
            ("csv", "mine.csv.gz", b"\x1f\x8b and no more", "gzipped or not"),
            ("text", "mine.txt", b"\xff\xfe\0", "UTF-8"),
        )
    ),
    *(
        Row(f"--data {name} --data-dir data", ["data", kind, "archive" if name == "har" else kind], {"data": None})
        for name, kind in (
            ("fashion-mnist", "holds no fashion-mnist"),
            ("har", "holds no har"),
            ("cifar10", "holds no cifar10"),
            ("text", "none at all"),
            ("npz", "none at all"),
            ("csv", "none at all"),
            ("image-folder", "images of no class"),
        )
    ),
]
ON_CPU = [
    Row("--sync-bn", ["--sync-bn"]),
    Row("--amp fp16", ["--amp fp16", "--amp bf16"]),
]
"""Those that only torch, the devices, the dataset or a run folder can show."""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Act on a row in an empty folder; exit code, stdout, stderr, and the files that it should have left alone."""

    def act(row: Row) -> tuple[int, str, str]:
        for name, content in row.files.items():
            (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_bytes(content)
        for name, value in row.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of the files here, Python's own trace
        code = main_multi_gpu.run(row.argv.split())
        assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == sorted(row.files)
        return code, *capsys.readouterr()

    return act


def check(row: Row, code: int, err: str) -> None:
    assert code == 2
    assert err.startswith("error: ")
    assert len(err.splitlines()) < 15
    assert "Traceback" not in err
    assert all(word in err for word in row.words), err


def name(row: Row) -> str:
    """How pytest lists a row."""
    content = row.files.get("mine.yaml", b"")
    return f"{row.argv} {content[:20]!r}" if content else row.argv or " ".join(row.words)


@pytest.mark.parametrize("row", DOOR, ids=name)
def test_the_door_refuses(row: Row, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = types.ModuleType("train_multi_gpu")
    closed.train = lambda *_, **__: pytest.fail("it came to training")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "train_multi_gpu", closed)
    code, out, err = call(row)
    check(row, code, err)
    assert out == ""


@pytest.mark.parametrize("row", ENGINE, ids=name)
def test_the_engine_refuses(row: Row, call: Any) -> None:
    code, _, err = call(row)  # the plan may stand on stdout by then
    check(row, code, err)


@pytest.mark.parametrize("row", ON_CPU, ids=name)
def test_what_needs_a_gpu_is_refused_without_one(row: Row, call: Any) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, err = call(row)
    check(row, code, err)


STARTED = "--data tests.support.user_code:tensors --model tests.support.user_code:net --batch-size 30"
AGAINST_A_RUN = [
    Row("--save-dir run --resume never --epochs 2", ["--resume never", "already holds a run", "--resume auto"]),
    Row(
        f"--save-dir run {STARTED} --epochs 2 --lr 0.5 --seed 3 --exact --set model.args.norm=false",
        [
            "--lr 0.5 differs from",
            "--seed 3 differs from 42",
            "--exact is on",
            "model.args norm=False",
            "run was started",
        ],
    ),
    Row("--save-dir run --model mlp", ["--model mlp differs from tests.support.user_code:net", "another --save-dir"]),
    Row("--save-dir run --task regression", ["--task regression differs from classification"]),
    Row(
        "--save-dir new --resume run --data digits",
        ["--data digits differs from tests.support.user_code:tensors", "run was started"],
    ),
    Row("--save-dir new --resume run/best.pt", ["--resume run/best.pt: contains no checkpoint", "--resume run"]),
    Row("--save-dir new --resume run/checkpoints/step_00000009", ["did you mean 'run/checkpoints/step_00000002'?"]),
    Row("--save-dir run/checkpoints", ["--save-dir run/checkpoints", "the folder of another run"]),
    Row("--save-dir run/best.pt", ["--save-dir run/best.pt", "not a folder"]),
    Row("--save-dir new --init-from run/best.pt", ["--init-from run/best.pt does not fit", "is missing"]),
    Row("--save-dir new --init-from run/config.yaml", ["--init-from run/config.yaml", "can't be loaded safely"]),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a run of two steps."""
    from tests.support.run_training import run_training

    folder = tmp_path_factory.mktemp("somebody")
    assert run_training(batch_size=30, epochs=1, save_dir=str(folder / "run")).error == ""
    return folder


@pytest.mark.parametrize("row", AGAINST_A_RUN, ids=name)
def test_a_run_that_is_there_is_left_alone(
    row: Row, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def there() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.rglob("*")}

    monkeypatch.chdir(run)
    before = there()
    code = main_multi_gpu.run(row.argv.split())
    check(row, code, capsys.readouterr().err)
    assert there() == before


def test_more_processes_than_gpus_on_a_node(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import train_multi_gpu

    monkeypatch.setattr(train_multi_gpu, "count_visible_gpus", lambda: 2)
    three = TORCHRUN | {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    row = Row("", ["3 processes on a machine with 2 visible GPUs", "--nproc_per_node=2"], {}, three)
    code, _, err = call(row)
    check(row, code, err)


def test_a_port_that_is_taken_is_named(call: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        row = Row("", [f"MASTER_PORT={port}", "--standalone"], {}, TORCHRUN | {"MASTER_PORT": port})
        code, _, err = call(row)
    check(row, code, err)


def test_under_torchrun_one_rank_speaks_and_no_attempt_is_wasted(tmp_path: Path) -> None:
    """torchrun's own box stands below and ends with our message; restarts find the verdict and end at once."""
    wrong = torchrun(2, restarts=2, multi_gpu="ddp", epochs=0)
    done = run_forked(wrong, tmp_path, forked_workers=6, TMPDIR=str(tmp_path))
    assert done.returncode == 1  # torchrun's, whatever ours was
    assert done.stdout == ""
    spoken = [line for line in done.stderr.splitlines() if line.startswith("error: --epochs must be")]
    assert len(spoken) == 1
    assert "exitcode  : 2" in done.stderr
    assert "traceback : error: --epochs must be" in done.stderr
    assert 'main_multi_gpu.py", line' not in done.stderr
