"""How cost grows with the work, counted in calls and in bytes: times say little on a busy machine."""

import io
import json
import math
import random
import sys
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path, PosixPath, PurePath
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import send
from torch.utils.data import Dataset

from multigpu_cli.checkpoint import files, store
from multigpu_cli.checkpoint.manifest import BEST, read_manifest
from multigpu_cli.checkpoint.pieces import serialize
from multigpu_cli.checkpoint.store import BestWeights, Store, restore_file
from multigpu_cli.checkpoint.weights import save_weights
from multigpu_cli.commands import status
from multigpu_cli.commands.predict import predict
from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data import files as data_files
from multigpu_cli.data import load as load_data
from multigpu_cli.data.images import folder
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.rows.tar import TarStore
from multigpu_cli.distributed.world import World, all_gather
from multigpu_cli.faults import replica_check
from multigpu_cli.language.chat.conversations import Conversation
from multigpu_cli.language.chat.encoder import ChatEncoder, ChatTokens
from multigpu_cli.language.chat.records import open_tokens
from multigpu_cli.language.chat.samples import PackedDataset, SFTDataset
from multigpu_cli.metrics.load import OrderedMetric
from multigpu_cli.monitor.curves import load_runs
from multigpu_cli.monitor.format import format_other_numbers
from multigpu_cli.monitor.journal import parse_event
from multigpu_cli.monitor.tensorboard import list_scalars
from multigpu_cli.run.train_log import combine_ranks, summarize_ranks
from multigpu_cli.runtime.precision import Precision
from tests.commands.runs import event, run_folder
from tests.support.ranks import run_on_each_rank
from tests.support.tiny_language_models import make_tokenizer


def count_calls(work: Callable[[], Any], within: str = "/multigpu_cli/") -> int:
    """How many functions of this program, or of files with other names, are called, each item of a generator too."""
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and within in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def write_table(folder: Path, count: int) -> DataConfig:
    draws = random.Random(0)
    rows = [[draws.gauss(0, 1), "" if at % 9 == 5 else draws.random(), draws.choice("ab")] for at in range(count)]
    lines = [f"{number:.7f},{gap},{word},{at % 3}" for at, (number, gap, word) in enumerate(rows)]
    folder.mkdir()
    (folder / "t.csv").write_text("\n".join(["number,gap,word,target", *lines]))
    return DataConfig(name="csv", dir=str(folder), args={"target": "target"})


def test_the_cells_of_a_table_are_read_column_by_column(tmp_path: Path) -> None:
    small, large = (write_table(tmp_path / str(count), count) for count in (1000, 3000))
    load_data_source(small, 0)
    more = count_calls(lambda: load_data_source(large, 0)) - count_calls(lambda: load_data_source(small, 0))
    assert more / 2000 < 5, "calls a row"


class CountedPlaces(list[tuple[int, int]]):
    """The places of tokens in a text, and how many of them were looked at one after the other."""

    looks = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.looks += len(self)
        return super().__iter__()


def test_tokens_of_a_conversation_are_not_searched_for_each_answer() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer, places = make_tokenizer(), CountedPlaces()

    class Counted:
        chat_template, eos_token = tokenizer.chat_template, tokenizer.eos_token
        apply_chat_template, get_chat_template = tokenizer.apply_chat_template, tokenizer.get_chat_template

        def __call__(self, text: str, **options: Any) -> dict[str, Any]:
            found = tokenizer(text, **options)
            places[:] = found["offset_mapping"]
            return {"input_ids": found["input_ids"], "offset_mapping": places}

    turns = [{"role": ("user", "assistant")[at % 2], "content": f"Number {at}?"} for at in range(64)]
    encoder = ChatEncoder(Counted(), None, "assistant", [tokenizer.eos_token_id])
    learned = encoder.encode(Conversation(turns), "a:1").learned
    assert sum(learned) > 64
    assert places.looks <= 4 * len(places), "each token is looked at a few times, however many answers there are"


def test_a_token_of_a_long_conversation_costs_no_more_than_one_of_a_short() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer = make_tokenizer()
    encoder = ChatEncoder(tokenizer, None, "assistant", [tokenizer.eos_token_id])

    def count_calls_a_token(count: int) -> float:
        turns = [{"role": ("user", "assistant")[at % 2], "content": f"Number {at}, of {count}?"} for at in range(count)]
        length = len(encoder.encode(Conversation(turns), "a:1").ids)  # the template is compiled
        return count_calls(lambda: encoder.encode(Conversation(turns), "a:1"), within="") / length

    assert count_calls_a_token(256) < 2 * count_calls_a_token(8)


def test_conversations_are_counted_without_a_call_for_each(tmp_path: Path) -> None:
    count = 9000
    texts = [ChatTokens([at % 50] * (at % 6), [place % 2 == at % 2 for place in range(at % 6)]) for at in range(count)]
    tokens = open_tokens(tmp_path / "tokens", "key", count, lambda record: [texts[record]])

    def open_samples(rows: range | np.ndarray) -> SFTDataset:
        return SFTDataset(None, tokens, rows, 3, padding=0)  # type: ignore[arg-type]

    chats = open_samples(range(0, count, 2))
    assert chats.learned.tolist() == [int(chats._read(index)[1].sum()) for index in range(len(chats))]
    assert count_calls(lambda: open_samples(range(count))) < 100
    learned = open_samples(np.flatnonzero(np.arange(count) % 6))
    packs = PackedDataset(learned, seed=0)
    assert count_calls(lambda: PackedDataset(learned, seed=0)) < 100
    assert count_calls(lambda: packs.make_packs_of_epoch(1)) < 100


def test_best_weights_are_written_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, store):
        monkeypatch.setattr(module, "PIECE", 2**20)
    state = {f"layer {at}": torch.randn(2**15) for at in range(64)}
    tracemalloc.start()
    try:
        mark = save_weights(tmp_path / "best.pt", state, {}, {})
        Store(tmp_path / "checkpoints", 2).save(1, {"step": 1}, {}, BestWeights(tmp_path / "best.pt", mark))
        restore_file([tmp_path / "lost.pt", tmp_path / "best.pt"], mark)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert mark == sha256(serialize({"model": state, "config": {}, "metrics": {}})).hexdigest()
    assert (tmp_path / "lost.pt").read_bytes() == (tmp_path / f"checkpoints/step_00000001/{BEST}").read_bytes()
    assert peak < 2**22, "bytes, of 2**23"


def test_classes_of_images_are_not_searched_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    class Name(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    class Place(PosixPath):
        @property
        def name(self) -> Name:
            return Name(super().name)

    for at in range(60):
        for split in ("train", "val"):
            (tmp_path / split / f"{at:02}").mkdir(parents=True)
            for name in ("b.PNG", "a.jpg", "text.txt"):
                (tmp_path / split / f"{at:02}" / name).touch()
    seventh = tmp_path / "train/07"
    (seventh / "within").mkdir()
    (seventh / "within/c.jpg").touch()
    (seventh / "d.jpg").symlink_to("nowhere")
    monkeypatch.setattr(
        data_files, "list_visible_folders", lambda root: [Place(each) for each in sorted(root.iterdir())]
    )
    names, parts = folder._read_classes(tmp_path)
    assert (len(names), len(parts["val"])) == (60, 120)
    assert [(str(Path(path).relative_to(seventh)), label) for path, label in parts["train"] if label == 7] == [
        ("a.jpg", 7),
        ("b.PNG", 7),
        ("within/c.jpg", 7),
    ]
    assert compared <= 4 * 60, "a few times a class, and not for each file and class"


def test_a_dataset_that_is_divided_keeps_eight_bytes_a_sample() -> None:
    class Numbers(Dataset[tuple[torch.Tensor, float]]):
        num_classes = 2

        def __len__(self) -> int:
            return 300_000

        def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
            assert type(index) is int
            return torch.tensor([float(index)]), 0.5

    tracemalloc.start()
    try:
        source = load_data.infer_source  # loaded before
        parts = load_data._split_by_seed(Numbers(), 0, lambda *found: found)  # type: ignore[arg-type]
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert callable(source)
    assert [len(part) for part in parts] == [240_000, 30_000, 30_000]  # type: ignore[attr-defined]
    assert parts[1][0][0].shape == (1,)  # type: ignore[index]
    assert held < 12 * 300_000


def test_watching_reads_only_what_is_new_in_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run", [event(0, "start", plan={"total_steps": 900})])
    journal, looks = run / "journal.jsonl", []

    def look_again(_: float) -> None:
        looks.append(parsed.call_count)
        with journal.open("a") as file:
            file.write(json.dumps(event(len(looks), "train", step=len(looks), loss=1.0, step_ms=1.0)) + "\n")
        if len(looks) == 100:
            monkeypatch.setattr(status, "is_locked", lambda _: False)

    parsed = Mock(wraps=parse_event)
    monkeypatch.setattr(status, "is_locked", lambda _: True)
    monkeypatch.setattr("time.sleep", look_again)
    for module in ("history", "journal"):
        monkeypatch.setattr(f"multigpu_cli.monitor.{module}.parse_event", parsed)
    status.watch_runs([str(run)], as_json=True, repeat=True)
    assert len(looks) == 100
    assert parsed.call_count == 101, "each line once"


def test_runs_are_not_compared_with_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run_folder(tmp_path / f"{at:03}", []) for at in range(120)]
    compared = 0

    def compare(one: PurePath, other: object) -> bool:
        nonlocal compared
        compared += 1
        return str(one) == str(other)

    monkeypatch.setattr(PurePath, "__eq__", compare)
    assert len(status.find_runs([str(run) for run in [*runs, tmp_path]])) == 120
    assert compared < 10 * 120


def test_a_report_by_samples_does_not_search_all_lines_for_each_evaluation(tmp_path: Path) -> None:
    plan = {"steps_per_epoch": 10, "samples": 100, "global_batch_size": 10}
    lines = [event(at, "train", step=10 * at + 5, samples=100 * at + 50) for at in range(200)]
    evals = [event(at, "eval", step=10 * at, epoch=at, split="val", loss=1.0) for at in range(1, 200)]
    (run,) = load_runs([run_folder(tmp_path / "a", [event(0, "start", plan=plan), *lines, *evals])])
    assert run.evaluated("loss", by="samples")[0] == [100 * at for at in range(1, 200)]
    assert count_calls(lambda: run.evaluated("loss", by="samples")) < 10 * 200


def test_predictions_are_kept_as_text_and_not_as_numbers(tmp_path: Path) -> None:
    class Task:
        def predictions(self, model: object, batch: Batch) -> dict[str, list[float]]:
            return {
                "predicted": [number + 0.125 for number in batch.sample_indices.tolist()],
                "target": [0.0] * len(batch),
            }

    class Stream:
        def eval_batches(self, size: int, rank: int, workers: int) -> Iterator[Batch]:
            for at in range(rank * 250, (rank + 1) * 250):
                yield Batch(None, None, torch.arange(100 * at, 100 * (at + 1)), at)

    def write(world: World) -> int:
        part = SimpleNamespace(
            world=world, task=Task(), loader=Stream(), batch_size=100, names=None, has_targets=False, model=nn.Module()
        )
        part.precision = Precision("fp32", world.device)
        tracemalloc.start()
        predict._write_table(tmp_path / "said.csv", part)  # type: ignore[arg-type]
        return tracemalloc.get_traced_memory()[1]

    _, peak = run_on_each_rank(2, write)
    rows = [f"{at},{at + 0.125}\n" for at in range(50_000)]
    assert (tmp_path / "said.csv").read_text() == "".join(["sample,predicted\n", *rows])
    assert peak < 120 * len(rows) // 2, "bytes on rank 1"


def test_new_best_weights_are_not_looked_for_in_old_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(wraps=read_manifest)
    monkeypatch.setattr(store, "read_manifest", read)
    for step in range(1, 31):
        (tmp_path / "best.pt").write_bytes(b"%d" % step)
        best = BestWeights(tmp_path / "best.pt", sha256(b"%d" % step).hexdigest())
        Store(tmp_path / "checkpoints", 100).save(step, {"step": step}, {}, best)
    assert read.call_count < 60


def test_a_shard_is_not_opened_for_each_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        for at in range(80):
            content = str(at % 7).encode()
            member = tarfile.TarInfo(f"{at:03}.cls")
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    opened, usual = 0, Path.open

    def count(path: Path, *args: Any, **named: Any) -> Any:
        nonlocal opened
        opened += path.suffix == ".tar"
        return usual(path, *args, **named)

    monkeypatch.setattr(Path, "open", count)
    found = TarStore([tmp_path / "a.tar"])
    assert found.list_values("cls") == list(range(7))
    assert opened < 10


def test_a_metric_sends_its_batches_to_rank_0_alone_and_several_at_once() -> None:
    class Kept:
        def __init__(self) -> None:
            self.kept: list[float] = []

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            self.kept += outputs.tolist()

        def compute(self) -> float:
            return float(self.kept == [float(at) for at in range(3000)])

    def measure(world: World) -> tuple[float, int, int]:
        metric = OrderedMetric("kept", "own:Kept", Kept)
        metric.begin(1000, world)
        for at in range(1000 * world.rank // world.size, 1000 * (world.rank + 1) // world.size):
            numbers = torch.arange(3 * at, 3 * at + 3).float()
            metric.add(at, numbers, numbers, 3)
        with patch("torch.distributed.broadcast") as broadcast, patch("torch.distributed.send", wraps=send) as sent:
            moves = Mock()
            with patch("multigpu_cli.tasks.metric.run_on_main_rank", lambda world, work: world.is_main and work()):
                value = metric.reduce(world, moves)
        return float(value), broadcast.call_count + sent.call_count, moves.call_count

    found = run_on_each_rank(3, measure)
    assert found[0][0] == 1.0
    assert found[0][1] == 0
    assert all(0 < calls < 30 for _, calls, _ in found[1:]), "two for each message"
    assert all(moves for *_, moves in found)


def test_a_log_line_of_many_ranks_is_no_longer_than_one_of_few() -> None:
    def write_line(ranks: int) -> dict[str, Any]:
        rows = [
            (100.0 + rank, 0.1, 0.03 + rank * 1e-6, math.nan, 0.7 - 0.0001 * rank, 0.0, 0.0) for rank in range(ranks)
        ]
        return summarize_ranks(combine_ranks(rows, {"step_ms": 100.0}, 10))

    assert write_line(64)["memory"] == [100 + rank for rank in range(64)]
    line = write_line(4096)
    assert line["memory"] == {"min": 100, "mean": 2147.5, "max": 4195, "worst_rank": 4095}
    assert line["cpu_utilisation"]["worst_rank"] == 4095
    assert line["own_ms"]["worst_rank"] == 0
    assert summarize_ranks({"gpu_power": [None] * 65, "lr": 0.5}) == {"gpu_power": None, "lr": 0.5}
    assert len(json.dumps(line)) < 600
    tags = dict(list_scalars({"event": "train", "step": 1, "step_ms": 100.0, **line}))
    assert (tags["system/memory/max"], tags["system/memory/worst_rank"]) == (4195.0, 4095.0)
    assert len(tags) < 20
    assert "3 MiB / 5 MiB / 7 MiB, worst rank 9" in format_other_numbers(
        {"memory": {"min": 3 * 2**20, "mean": 5 * 2**20, "max": 7 * 2**20, "worst_rank": 9}}
    )


def test_sums_of_equal_replicas_are_not_gathered() -> None:
    def check(world: World) -> int:
        with patch.object(replica_check, "all_gather", wraps=all_gather) as gather:
            replica_check.check_replicas(torch.nn.Linear(2, 2).requires_grad_(False).apply(fill), world, 1)
        return gather.call_count

    def fill(module: torch.nn.Module) -> None:
        for parameter in module.parameters():
            parameter.fill_(-1.5)

    assert run_on_each_rank(2, check) == [0, 0]
