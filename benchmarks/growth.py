"""How cost grows with the work: CPU seconds and peak memory of whole commands at growing sizes, with exponents.

    python -m benchmarks.growth                  # also writes the table in docs/measurements.md
    python -m benchmarks.growth --tiny [AXIS …]  # at a fiftieth of the sizes; the figures mean nothing

Each figure is the median of three commands, of one where it takes long. An exponent is that of what comes on top of the
smallest size's cost: 0 where that is within the noise, 1 where twice the work costs twice as much.
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import tarfile
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paired_timing import ROOT, Spent, align, spent  # nothing that loads torch: a child's peak would show it

_PAGE, _PROGRAM = ROOT / "docs" / "measurements.md", str(ROOT / "main_multi_gpu.py")
_BEGIN, _END = "<!-- generated: growth, by python -m benchmarks.growth -->\n", "<!-- end of growth -->"
_HEAD = ("axis", "sizes", "CPU, s", "peak, MiB", "exponents", "verdict")
_LONG = 20.0  # CPU seconds, from which on once is enough
_NOISE = Spent(0.3, 8 * 2**20)  # or a tenth of the smallest size's cost
_SLACK = 0.25  # of an exponent: few runs on a shared machine
_FIRST = "--set=model.args.ends=1"


def cheap(split: str, train: int = 64, held_out: int = 32) -> Any:
    """A dataset of samples that cost nothing, as many as are asked for."""
    import torch
    from torch.utils.data import Dataset

    class Cheap(Dataset[Any]):
        num_classes = 3

        def __len__(self) -> int:
            return train if split == "train" else held_out

        def __getitem__(self, index: int) -> Any:
            return torch.full((6,), float(index % 7)), index % 7 % 3

    return Cheap()


def network(
    input_shape: Sequence[int], num_classes: int, task: str, width: int = 6, layers: int = 2, ends: int = 0
) -> Any:
    """So many layers and one more; two of tokens. With `ends` the process ends after its first step."""
    from torch import nn
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if ends:
        register_optimizer_step_post_hook(lambda *_: os._exit(0))
    if task == "language-model":
        return nn.Sequential(nn.Embedding(num_classes, width), nn.Linear(width, num_classes))
    sizes = [math.prod(input_shape), *[width] * layers, num_classes]
    return nn.Sequential(nn.Flatten(), *(nn.Linear(*pair) for pair in pairwise(sizes)))


def encode_turns(turns: int) -> None:
    from multigpu_cli.language.chat.conversations import Conversation
    from multigpu_cli.language.chat.encoder import ChatEncoder
    from tests.support.tiny_language_models import make_tokenizer

    tokenizer = make_tokenizer()
    encoder = ChatEncoder(tokenizer, None, "assistant", [tokenizer.eos_token_id])
    talk = [{"role": ("user", "assistant")[at % 2], "content": f"Number {at}?"} for at in range(turns)]
    for _ in range(20):
        encoder.encode(Conversation(talk), "talks.jsonl:1")


def make_packs(samples: int) -> None:
    import numpy as np

    from multigpu_cli.language.chat.samples import pack_first_fit, pack_windows

    draws = np.random.default_rng(0)
    lengths = np.clip(draws.lognormal(5.0, 0.8, samples), 1, 2048).astype(np.int32)
    pack_first_fit(lengths, 2048)
    pack_windows(draws.permutation(samples), lengths, 2048)


def write_log_lines(ranks: int) -> None:
    from multigpu_cli.monitor.journal import dump_json
    from multigpu_cli.monitor.tensorboard import list_scalars
    from multigpu_cli.run.train_log import combine_ranks, summarize_ranks

    rows = [(1e9 + rank, 0.1, 0.01, math.nan, 0.7, 0.0, 0.0) for rank in range(ranks)]
    for step in range(300):
        line = {"event": "train", "step": step, **summarize_ranks(combine_ranks(rows, {"step_ms": 100.0}, 10))}
        dump_json(line)
        list(list_scalars(line))


def train(folder: Path | None, *flags: str, data: str = "benchmarks.growth:cheap") -> list[str]:
    """A training in one process, into a folder of its own."""
    given = ["--multi-gpu=none", "--batch-size=32", "--lr=1e-3", "--num-workers=0", "--quiet", f"--data={data}"]
    return [
        *(_PROGRAM, *given, "--model=benchmarks.growth:network"),
        *([f"--save-dir={folder / 'run'}"] if folder else []),
        *flags,
    ]


def with_flags(*flags: str) -> Callable[[Path, int], list[str]]:
    """A training with the size in its flags."""
    return lambda folder, size: train(folder, *(flag.format(size) for flag in flags))


def read_csv(folder: Path, rows: int) -> list[str]:
    lines = (f"{at % 97},{at / 7:.5f},{at % 13},{'abc'[at % 3]},{at % 5},{at / 3:.5f},{at % 3}\n" for at in range(rows))
    (folder / "t.csv").write_text("a,b,c,word,e,f,target\n" + "".join(lines))
    return train(folder, f"--data-dir={folder / 't.csv'}", "--set=data.args.target=target", _FIRST, data="csv")


def read_json(folder: Path, rows: int) -> list[str]:
    with (folder / "t.jsonl").open("w") as file:
        file.writelines(json.dumps({"x": [at % 97, at / 7, at % 13], "label": at % 3}) + "\n" for at in range(rows))
    return train(folder, f"--data-dir={folder / 't.jsonl'}", _FIRST, data="jsonl")


def read_tar(folder: Path, samples: int) -> list[str]:
    import numpy as np

    np.save(sink := BytesIO(), np.ones(3, dtype=np.float32))
    with tarfile.open(folder / "t.tar", "w") as shard:
        for at in range(samples):
            for ending, content in (("npy", sink.getvalue()), ("cls", b"%d" % (at % 3))):
                member = tarfile.TarInfo(f"{at:08}.{ending}")
                member.size = len(content)
                shard.addfile(member, BytesIO(content))
    return train(folder, f"--data-dir={folder / 't.tar'}", _FIRST, data="tar")


def read_arrow(folder: Path, rows: int) -> list[str]:
    import numpy as np
    import pyarrow

    fields = {"a": pyarrow.float32(), "b": pyarrow.float32(), "label": pyarrow.int8()}
    with (
        pyarrow.OSFile(str(folder / "t.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, pyarrow.schema(list(fields.items()))) as out,
    ):
        for first in range(0, rows, 2**16):
            numbers = np.arange(first, min(first + 2**16, rows))
            columns = [
                pyarrow.array(numbers % each, kind) for each, kind in zip((97, 13, 3), fields.values(), strict=True)
            ]
            out.write_batch(pyarrow.record_batch(columns, names=list(fields)))
    return train(folder, f"--data-dir={folder / 't.arrow'}", _FIRST, data="arrow")


def read_tokens(folder: Path, tokens: int) -> list[str]:
    piece = array("H", range(53)).tobytes() * 10_000
    with (folder / "train.bin").open("wb") as file:
        for _ in range(0, 2 * tokens, len(piece)):
            file.write(piece)
        file.truncate(2 * tokens)
    return train(folder, f"--data-dir={folder}", _FIRST, data="text")


def list_images(folder: Path, files: int) -> list[str]:
    from PIL import Image

    Image.new("RGB", (16, 16), "red").save(folder / "one.png")
    for at in range(files):
        place = folder / "images" / f"{at % 10}"
        place.mkdir(parents=True, exist_ok=True)
        os.link(folder / "one.png", place / f"{at}.png")
    return train(folder, f"--data-dir={folder / 'images'}", "--set=data.args.size=16", _FIRST, data="image-folder")


def predict(folder: Path, rows: int) -> list[str]:
    spent(train(folder, "--max-steps=4", f"--set=data.args.held_out={rows}"))
    return [_PROGRAM, "predict", str(folder / "run"), f"--out={folder / 'rows.csv'}", "--own-code"]


def copy_run(run: Path, place: Path, times: int) -> None:
    """Links to a finished run's files, in so many folders beside each other."""
    for at in range(times):
        shutil.copytree(run, place / f"20250101-000000-{at:04}", copy_function=os.link)


def show_runs(folder: Path, runs: int) -> list[str]:
    """`status` of so many copies of a finished run."""
    spent(train(folder, "--max-steps=4"))
    copy_run(folder / "run", folder / "runs", runs)
    return [_PROGRAM, "status", str(folder / "runs")]


def start_after(folder: Path, runs: int) -> list[str]:
    """A start that looks among so many finished runs, with checkpoints of 12 MB, for one to go on with."""
    flags = ("--set=model.args.width=1000", "--max-steps=4")
    spent(train(None, *flags), folder=folder)
    (run,) = folder.glob("checkpoints/*/*/")
    copy_run(run, run.parent, runs)
    return train(None, *flags, _FIRST)


def join_group(folder: Path, processes: int) -> list[str]:
    """A training of so many real processes, with the same global batch."""
    flags = ("--multi-gpu=ddp", f"--nproc-per-node={processes}", "--batch-size=auto", "--global-batch-size=32")
    return train(folder, *flags, "--epochs=3", "--hang-timeout=600")


def read_journal(command: str) -> Callable[[Path, int], list[str]]:
    """A command on a finished run whose journal has so many more lines of training."""

    def prepare(folder: Path, lines: int) -> list[str]:
        spent(train(folder, "--max-steps=4"))
        journal = folder / "run" / "journal.jsonl"
        events = [json.loads(line) for line in journal.read_text().splitlines()]
        first = next(at for at, event in enumerate(events) if event["event"] == "train")
        more = (events[first] | {"step": step, "samples": 32 * step} for step in range(1, lines + 1))
        journal.write_text("".join(json.dumps(each) + "\n" for each in (*events[:first], *more, *events[first + 1 :])))
        return [_PROGRAM, command, str(folder / "run")]

    return prepare


def call(work: Callable[[int], None]) -> Callable[[Path, int], list[str]]:
    code = "import sys, benchmarks.growth as growth; getattr(growth, sys.argv[1])(int(sys.argv[2]))"
    return lambda _, size: ["-c", code, work.__name__, str(size)]


class Axis(NamedTuple):
    """What grows; `expected` are the greatest exponents of time and memory that are right, and `why` says so."""

    name: str
    sizes: tuple[int, ...]
    prepare: Callable[[Path, int], list[str]]  # makes what a command needs in a folder, and gives its arguments
    expected: tuple[float, float]
    why: str


_SAMPLES, _HELD_OUT = "--set=data.args.train={}", "--set=data.args.held_out={}"
_MANY = (10_000, 200_000, 800_000)
_LINES = (1000, 30_000, 120_000)
AXES = [
    Axis(*row)
    for row in (
        (
            "samples, first step",
            (10_000, 10**6, 10**7),
            with_flags(_SAMPLES, _FIRST),
            (1, 1),
            "one order, 8 B a sample",
        ),
        ("CSV rows, first step", (1000, 100_000, 400_000), read_csv, (1, 1), "each cell is parsed once"),
        (
            "JSON lines, first step",
            (1000, 30_000, 200_000),
            read_json,
            (1, 0),
            "each is parsed once; the index is mapped",
        ),
        (
            "tar samples, first step",
            (1000, 10_000, 50_000),
            read_tar,
            (1, 0),
            "each is listed once; the index is mapped",
        ),
        (
            "Arrow rows, first step",
            (10_000, 10**6, 10**7),
            read_arrow,
            (1, 1),
            "the labels alone are read; pages are mapped",
        ),
        (
            "tokens, first step",
            (10**6, 10**7, 10**8),
            read_tokens,
            (1, 1),
            "the largest is looked for; pages are mapped",
        ),
        ("images, first step", (100, 3000, 20_000), list_images, (1, 1), "each file is listed once"),
        (
            "steps",
            (300, 3000, 12_000),
            with_flags("--max-steps={}", "--epochs=999999"),
            (1, 0),
            "nothing stays of a step",
        ),
        ("epochs, saved", (10, 60, 240), with_flags("--epochs={}"), (1, 0), "three checkpoints stay"),
        (
            "improving epochs, all kept",
            (10, 60, 240),
            with_flags("--epochs={}", "--keep=9999", "--best=val_loss:min"),
            (1, 0),
            "no old checkpoint is read",
        ),
        ("evaluated samples", _MANY, with_flags("--epochs=1", _HELD_OUT), (1, 0), "each is read once"),
        ("predicted rows", _MANY, predict, (1, 1), "the table's text is kept until it is whole"),
        (
            "width of a layer",
            (1000, 3000, 6000),
            with_flags("--epochs=1", "--set=model.args.width={}"),
            (2, 2),
            "weights",
        ),
        (
            "layers, two tensors each",
            (10, 300, 1000),
            with_flags("--epochs=3", "--set=model.args.layers={}"),
            (1, 1),
            "a kernel or more for each tensor",
        ),
        ("runs, status", (10, 100, 400), show_runs, (1, 0.5), "each one's summary is read"),
        ("finished runs, start without --save-dir", (10, 60, 240), start_after, (1, 0), "each one's summary is read"),
        ("journal lines, status", _LINES, read_journal("status"), (1, 1), "each is parsed once"),
        ("journal lines, report", _LINES, read_journal("report"), (1, 1), "each is parsed once"),
        ("turns, as tokens", (8, 64, 256), call(encode_turns), (1, 0), "each is rendered a few times"),
        ("texts, packed", (10_000, 200_000, 10**6), call(make_packs), (1, 1), "arrays of them"),
        ("processes of a group", (1, 4, 12), join_group, (1, 0), "each imports torch; the peak is one process's"),
        ("ranks, log lines", (8, 64, 4096), call(write_log_lines), (1, 0), "summed up; none is listed beyond 64"),
    )
]


def measure(axis: Axis, sizes: Sequence[int], times: int) -> list[Spent]:
    """CPU and memory of the command at each size."""
    found = []
    for size in sizes:
        taken: list[Spent] = []
        while not taken or (len(taken) < times and taken[0].cpu < _LONG):
            with tempfile.TemporaryDirectory(prefix="multigpu-growth-") as folder:
                taken.append(spent(axis.prepare(Path(folder), size), folder=Path(folder)))
        cpu, peak = zip(*taken, strict=True)
        found.append(Spent(statistics.median(cpu), int(statistics.median(peak))))
    return found


def find_exponent(sizes: Sequence[int], costs: Sequence[float], noise: float) -> float:
    """The p of costs = a + b·size^p, in hundredths; 0 where what comes on top of the first cost is noise."""
    noise = max(noise, costs[0] / 10)
    middle, most = (cost - costs[0] for cost in costs[-2:])
    if most < noise:
        return 0.0
    first, second, last = sizes[0], *sizes[-2:]

    def grow(hundredths: int) -> float:
        p = hundredths / 100
        return float((last**p - first**p) / (second**p - first**p))

    return (bisect_left(range(1, 1000), most / max(middle, noise), key=grow) + 1) / 100


def describe(axis: Axis, sizes: Sequence[int], costs: Sequence[Spent]) -> tuple[str, ...]:
    """A row of the table."""
    columns = zip(zip(*costs, strict=True), _NOISE, strict=True)
    exponents = [find_exponent(sizes, column, noise) for column, noise in columns]
    wrong = any(found > most + _SLACK for found, most in zip(exponents, axis.expected, strict=True))
    return (
        *(axis.name, ", ".join(f"{size:,}" for size in sizes), ", ".join(f"{each.cpu:.3g}" for each in costs)),
        *(", ".join(f"{each.peak / 2**20:,.0f}" for each in costs), ", ".join(f"{each:.1f}" for each in exponents)),
        f"{'**grows faster than it should**' if wrong else 'good'}: {axis.why}",
    )


def write_section(rows: Sequence[Sequence[str]]) -> None:
    """The table between its marks in docs/measurements.md."""
    before, _, rest = _PAGE.read_text().partition(_BEGIN)
    facts = f"{os.cpu_count()} cores, Python {platform.python_version()}, {datetime.now(UTC).date().isoformat()}."
    table = "\n".join(f"| {' | '.join(row)} |" for row in [_HEAD, *rows])
    table = table.replace("\n", "\n|-|-|-|-|-|-|\n", 1)
    _PAGE.write_text(f"{before}{_BEGIN}{facts}\n\n{table}\n{_END}{rest.partition(_END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("axes", nargs="*", default=[], metavar="AXIS", help="words of axes' names; default: all")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    rows = []
    for axis in (axis for axis in AXES if not asked.axes or any(word in axis.name for word in asked.axes)):
        tiny = [min(size, max(8 * (at + 1), size // 50)) for at, size in enumerate(axis.sizes)]
        sizes = tiny if asked.tiny else axis.sizes
        rows.append(describe(axis, sizes, measure(axis, sizes, 1 if asked.tiny else 3)))
        print(align([_HEAD, rows[-1]]), flush=True)
    if not asked.tiny and not asked.axes:
        write_section(rows)


if __name__ == "__main__":
    main()
