"""Samples while training: the answers to --prompts, and what `sample` and `export` make of the same run."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import main_multi_gpu
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.source import Codec
from multigpu_cli.distributed.world import World
from multigpu_cli.language import prompts as prompt_samples
from multigpu_cli.language.prompts import PromptSamples, answer_prompt, format_sample
from multigpu_cli.monitor.journal import read_events
from tests.support.run_training import run_training
from tests.support.tiny_language_models import make_model_folder

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TALKS = {"What is 2 + 2?": "4", "Who is lazy?": "The dog.", "Capital of France?": "Paris, of course."}
RUN: dict[str, Any] = {
    "data": "chat", "data_dir": "talks.jsonl", "model": "pretrained", "model_dir": "model", "max_length": 100,
    "num_workers": 0, "packing": "off", "sets": ["data.val=0"], "batch_size": 1, "global_batch_size": 3, "epochs": 24,
    "optimizer": "adamw", "lr": 2e-2, "weight_decay": 0.0, "exact": True, "checkpoint_every": 18,
}  # fmt: skip
ASKED: dict[str, Any] = {"prompts": "prompts.jsonl", "sample_every": 10}
SHARDED: dict[str, Any] = {"multi_gpu": "fsdp", "resume": "one/checkpoints/step_00000018"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model_folder(tmp_path / "model", places=128)  # PAD is EOS
    talks = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in TALKS.items()
    ]
    Path("talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    prompts = [{"prompt": talks[0][0]["content"]}, {"messages": talks[1][:1]}, {"prompt": talks[2][:1]}]
    Path("prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return tmp_path


def read_samples(run: str) -> list[tuple[int, list[dict[str, Any]]]]:
    return [
        (each["epoch"], each["samples"]) for each in read_events(f"{run}/journal.jsonl") if each["event"] == "samples"
    ]


def refuse_dropout() -> None:
    """Let an answer fail whose model is in training mode."""

    def answer(model: Any, *args: Any, **more: Any) -> list[int]:
        assert not any(module.training for module in model.modules())
        return answer_prompt(model, *args, **more)

    vars(prompt_samples)["answer_prompt"] = answer


def test_a_model_learns_when_to_stop_and_says_so_after_epochs(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same text, and the same bits as without prompts, on any number of workers."""
    fingerprints = set()
    cases: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("without", 1, {}), ("one", 1, ASKED), ("two", 2, ASKED), ("sharded", 2, ASKED | SHARDED),
    )  # fmt: skip
    for folder, workers, flags in cases:
        ended = run_training(workers, **RUN | flags, save_dir=folder, screen="normal", prepare=refuse_dropout)
        assert not ended.error, ended.error
        fingerprints.add(ended.summary["fingerprint"])
    assert len(fingerprints) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines.count("  Who is lazy? → The dog.") >= 3, "on the terminal, by one rank of each run"
    assert not read_samples("without")
    found = read_samples("one")
    assert [epoch for epoch, _ in found] == [10, 20, 24]
    assert found[-1][1] == [{"prompt": asked, "answer": said, "ended": True} for asked, said in TALKS.items()]
    assert read_samples("two") == found
    assert read_samples("sharded") == found[1:]

    board = EventAccumulator("two/tensorboard")
    board.Reload()
    (shown,) = board.Tensors("samples/2/text_summary")[-1].tensor_proto.string_val
    assert shown.decode() == "    Who is lazy?\n\n---\n\n    The dog."
    assert main_multi_gpu.run(["report", "one"]) == 0
    page = Path("one/report/report.html").read_text()
    assert all(f"<td>{said}</td>" in page for said in TALKS.values())

    shutil.rmtree("one/checkpoints")
    Path("talks.jsonl").unlink()
    shutil.move("model", "moved")
    check_sample_command(capfd)
    check_exported_folder(capfd)


def check_sample_command(capfd: pytest.CaptureFixture[str]) -> None:
    """`sample` answers as the run's own samples did, from best.pt and a folder of the model that was moved."""
    capfd.readouterr()
    for asked, said in TALKS.items():
        words = ["sample", "one", "--prompt", asked, "--temperature", "0", "--model-dir", "moved"]
        assert main_multi_gpu.run(words) == 0
        assert capfd.readouterr().out == f"{said}\n"
    words = ["sample", "one", "--prompt", "x" * 90, "--temperature", "0", "--model-dir", "moved"]
    assert main_multi_gpu.run(words) == 0, "longer than --max-length, and within the model's own places"
    capfd.readouterr()
    raw = "<|im_start|>user\nWho is lazy?<|im_end|>\n<|im_start|>assistant\n"
    words = ["sample", "one", "--raw", "--prompt", raw, "--temperature", "0", "--model-dir", "moved"]
    assert main_multi_gpu.run(words) == 0
    assert capfd.readouterr().out == f"{raw}The dog.<|im_end|>\n"


def check_exported_folder(capfd: pytest.CaptureFixture[str]) -> None:
    """A sharded checkpoint becomes a folder with which transformers alone answers alike."""
    pieces = next(Path("sharded/checkpoints").iterdir())
    assert (pieces / "rank_1.safetensors").is_file()
    words = ["export", str(pieces), "--to", "out", "--format", "hf", "--model-dir", "moved", "--json"]
    assert main_multi_gpu.run(words) == 0
    assert json.loads(capfd.readouterr().out)["origin"] == str(pieces)
    model, tokenizer = (
        kind.from_pretrained("out") for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    for asked, said in TALKS.items():
        messages = [{"role": "user", "content": asked}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(written) == f"{said}<|im_end|>", "transformers alone says the same"


def test_wrong_prompts_are_refused_before_the_first_step(here: Path) -> None:
    cases = (
        ("p.jsonl", '{"prompt": "What"}\n{"asked": 1}\n', "p.jsonl:2: there are no messages in it"),
        ("p.jsonl", '{"messages": [{"role": "assistant", "content": "x"}]}', "its last message is the assistant's own"),
        ("p.jsonl", "{", "--prompts p.jsonl:1: not JSON (Expecting property name"),
        ("p.txt", "\n\n", "there is no prompt in it"),
        ("p.txt", "\nWhat is " + "very " * 60, "p.txt:2: "),
        ("p.txt", b"\xff\xfe", "can't decode"),
    )
    for file, text, message in cases:
        Path(file).write_bytes(text if isinstance(text, bytes) else text.encode())
        ended = run_training(1, **RUN, prompts=file, save_dir="run", dry_run=True)
        assert ended.kind == "RequestError", ended
        assert message in ended.error
    assert not Path("run").exists()
    Path("p.txt").write_text("\nWhat is\n1 2 3\n")
    ended = run_training(1, **RUN | {"epochs": 1}, prompts="p.txt", save_dir="run")
    assert not ended.error, ended.error
    ((_, samples),) = read_samples("run")
    assert [each["prompt"] for each in samples] == ["What is", "1 2 3"]


def test_a_prompt_may_fill_the_places_of_the_model_whatever_the_training_takes(here: Path) -> None:
    flags = {"model": "pretrained", "data": "chat", "model_dir": "model", "prompts": "prompts.jsonl"}
    config = resolve(flags, (), None)
    spec: Any = SimpleNamespace(config=config, source=SimpleNamespace(input_shape=(8,), codec=Codec()))
    found = PromptSamples(spec, World(torch.device("cpu")))
    assert found.places == 128


def test_a_sample_is_one_line_that_does_nothing_to_a_terminal() -> None:
    sample = {"prompt": "a\nb\x1b[2J", "answer": "x" * 99, "ended": False}
    assert format_sample(sample) == f"  a b\\x1b[2J → {'x' * 59}… (no end)"
