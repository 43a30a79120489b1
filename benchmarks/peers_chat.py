"""Fine-tuning a small Llama on packed texts: our steps beside those of TRL's SFTTrainer, in alternating pairs.

    pip install '.[dev]'
    make bench-peers

Both read the same prompts and completions, learn the completions alone, pack rows of as many tokens, take as many rows
a step in float32, clip, and run AdamW; each in processes of its own, of one thread. A step's time is the median of its
run.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paired_timing import ONE_THREAD, ROOT, Row, program, row

VOCABULARY, LENGTH, ROWS = 8192, 512, 2
LLAMA = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
RATE = 1e-4


class Pace(NamedTuple):
    """What a run did.

    Attributes:
        tokens: per second, on all workers, without padding.
        memory: bytes at the peak of the fullest process.
    """

    tokens: float
    memory: float


def measure(tiny: bool = False) -> list[Row]:
    steps, pairs = (4, 1) if tiny else (24, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder / "train.jsonl", 80 if tiny else 2000)
        make_model(folder / "model", SMALL if tiny else LLAMA)
        return [each for workers in (1, 2) for each in _compare(folder, workers, steps, pairs)]


def _compare(folder: Path, workers: int, steps: int, pairs: int) -> list[Row]:
    found = [(run_ours(folder, workers, steps), run_trl(folder, workers, steps)) for _ in range(pairs)]
    kind = "process" if workers == 1 else "processes"
    what = f"chat, {workers} {kind}"
    faster = [ours.tokens / theirs.tokens for ours, theirs in found]
    smaller = [ours.memory / theirs.memory for ours, theirs in found]
    return [
        row(f"{what}: our tokens/s / TRL's", faster, aim=1.0, at_least=True),
        row(f"{what}: our peak memory / TRL's", smaller, aim=1.0),
        row(f"{what}: our tokens/s", [ours.tokens for ours, _ in found], unit="tokens/s"),
        row(f"{what}: TRL's tokens/s", [theirs.tokens for _, theirs in found], unit="tokens/s"),
        row(f"{what}: our peak memory", [ours.memory / 2**20 for ours, _ in found], unit="MiB"),
        row(f"{what}: TRL's peak memory", [theirs.memory / 2**20 for _, theirs in found], unit="MiB"),
    ]


def write_texts(file: Path, most: int) -> None:
    """Python's own documentation: the beginning of a paragraph is the prompt."""
    from pydoc_data.topics import topics

    paragraphs = [text for topic in topics.values() for text in topic.split("\n\n") if len(text) > 120]
    with file.open("w") as lines:
        for text in paragraphs[:most]:
            lines.write(json.dumps({"prompt": text[:60], "completion": text[60:1000]}) + "\n")


def make_model(folder: Path, sizes: dict[str, Any]) -> None:
    """A Llama with weights drawn from seed 0, and a tokenizer that is trained on the texts beside it."""
    import tokenizers
    import torch
    import transformers

    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train([str(folder.parent / "train.jsonl")], vocab_size=VOCABULARY, special_tokens=["<eos>", "<pad>"])
    names: dict[str, Any] = {"eos_token": "<eos>", "pad_token": "<pad>", "model_max_length": LENGTH}
    transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **names).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        **sizes,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def run_ours(folder: Path, workers: int, steps: int) -> Pace:
    flags: dict[str, Any] = {
        "model": "pretrained",
        "model-dir": folder / "model",
        "data": "chat",
        "data-dir": folder / "train.jsonl",
    }
    flags |= {"max-length": LENGTH, "batch-size": ROWS, "lr": RATE, "epochs": 100, "max-steps": steps, "num-workers": 0}
    flags |= {"multi-gpu": "none"} if workers == 1 else {"multi-gpu": "ddp", "nproc-per-node": workers}
    with tempfile.TemporaryDirectory() as run:
        given = [f"--{name}={value}" for name, value in (flags | {"save-dir": run}).items()]
        _run(["main_multi_gpu.py", "--json", "--set=data.val=0", *given])
        summary = json.loads(Path(run, "summary.json").read_text())
        events = map(json.loads, Path(run, "journal.jsonl").read_text().splitlines())
        line = next(event for event in events if event["event"] == "train")
    in_a_step = line["all_tokens_per_second"] * line["step_ms"]
    return Pace(in_a_step / summary["step_ms"]["p50"], max(summary["peak_memory_bytes"]))


def run_trl(folder: Path, workers: int, steps: int) -> Pace:
    with tempfile.TemporaryDirectory() as out:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        _run([*launch, "-m", "benchmarks.peers_chat", "trl", str(folder), str(steps), out])
        found = [json.loads(file.read_text()) for file in Path(out).glob("*.json")]
    return Pace(sum(each["tokens"] for each in found), max(each["memory"] for each in found))


def _run(arguments: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.decode()[-2000:]}")


def train_by_trl(folder: Path, steps: int, out: Path) -> None:
    """One process of TRL's; writes what `Pace` needs of it."""
    import transformers
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    given: dict[str, Any] = {
        "packing": True,
        "max_length": LENGTH,
        "per_device_train_batch_size": ROWS,
        "max_steps": steps,
    }
    given |= {"learning_rate": RATE, "gradient_checkpointing": False, "bf16": False, "use_cpu": True}
    given |= {"report_to": "none", "save_strategy": "no", "logging_steps": 50, "disable_tqdm": True}
    trainer = SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=SFTConfig(output_dir=str(out / "run"), **given),
        train_dataset=Dataset.from_json(str(folder / "train.jsonl"), cache_dir=str(out)),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Clock()],
    )
    packed: Any = trainer.train_dataset
    packs = [len(ids) for ids in packed["input_ids"]]
    trainer.train()
    seconds = statistics.median(after - before for before, after in pairwise(ends))
    tokens = ROWS * sum(packs) / len(packs) / seconds
    found = {"tokens": tokens, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["trl"]:
        train_by_trl(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        os._exit(0)  # past torch's exit, where gloo now and then aborts a process that is done
    program(measure, __doc__)
