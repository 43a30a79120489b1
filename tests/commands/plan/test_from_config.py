import gc
from dataclasses import replace
from pathlib import Path

import pytest

from multigpu_cli.commands.doctor.doctor import check_model, judge_estimate
from multigpu_cli.commands.plan import from_config
from multigpu_cli.commands.plan.from_config import ConfigEstimate, estimate_training
from multigpu_cli.commands.plan.plan import format_plan, make_plan, parse_plan_request
from multigpu_cli.config.sources import resolve
from multigpu_cli.planning.memory import Memory
from tests.support.tiny_language_models import make_model_folder

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

REQUEST = parse_plan_request(None, "1,2", None, None, "8")


def test_the_memory_of_a_model_whose_weights_are_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_folder(tmp_path / "model")
    gc.freeze()  # models without values are looked for among all objects
    parameters = transformers.AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    flags = {"model": "pretrained", "model_dir": str(folder)}
    assert "there is no --data-dir" in "\n".join(format_plan(make_plan(resolve(flags, (), None), REQUEST)))
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    trained = 4 * (16 * (2 * (32 + 32) + 2 * (32 + 16)) + 16 * 3 * (32 + 64)) // 2  # 2 layers, rank 16
    for adapter, learning in (("none", parameters), ("lora", trained)):
        config = resolve(flags | {"adapter": adapter, "save_dir": "here"}, (), None)
        forecast = make_plan(config, REQUEST)
        every = parameters + (trained if adapter == "lora" else 0)
        assert (forecast.about["parameters"], forecast.about["trained"]) == (every, learning)
        assert forecast.memory.gradients == 4 * learning
        assert forecast.memory.optimizer == 8 * learning
        assert forecast.memory.weights == pytest.approx(4 * every, abs=4096)
        assert forecast.memory.per_sample > 64 * 2 * 4 * 2 * 32  # of each layer at least its input and its output
        text = "\n".join(format_plan(forecast))
        assert "more kept for backward by a micro-batch of 32 rows of 64 tokens (computed)" in text
        assert "has no weights: nothing is measured" in text
        assert "--save-dir: nothing is written" in text
        assert ("frozen" in text) == (adapter == "lora")
        assert "quantize" not in text
    (found,) = check_model(config)
    assert found.verdict == "not checked"
    assert f"{every:,} parameters ({trained:,} trained)" in found.evidence
    assert "for --batch-size 32 of 64 tokens" in found.evidence

    def failing(*_: object) -> None:
        raise ValueError("no values")

    monkeypatch.setattr(from_config, "count_kept_bytes", failing)
    config = resolve(flags | {"adapter": "lora", "model.args": {"quantize": "4bit"}}, (), None)
    text = "\n".join(format_plan(make_plan(config, REQUEST)))
    assert "weights are counted whole" in text
    assert "kept for backward by" not in text
    assert "keeps for backward is not counted: its layers ask for values (ValueError)" in text
    (found,) = check_model(config)
    assert "activations not counted (its layers ask for values (ValueError))" in found.evidence


def test_the_verdict_follows_from_the_memory_of_the_gpu() -> None:
    memory = Memory(weights=600, gradients=100, optimizer=200, fixed=100, per_sample=50)
    estimate = ConfigEstimate(Path("m"), "no weights", 9, 3, memory, 4, 64, "", "a GPU", None, quantized=False)
    for capacity, activations, verdict, batch in (
        (2000, "", "ok", 16),
        (1300, "", "warn", 3),
        (1150, "", "fail", 0),
        (990, "", "fail", 0),
        (1150, "not known", "ok", None),
        (990, "not known", "fail", None),
    ):
        found = judge_estimate(replace(estimate, capacity=capacity, activations=activations))
        assert (found.verdict, found.numbers and found.numbers["largest_batch"]) == (verdict, batch)
        assert bool(found.fix) == (verdict != "ok")
    assert judge_estimate(estimate).verdict == "not checked"


def test_data_that_are_there_are_measured(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n')
    flags = {"model": "pretrained", "model_dir": str(folder), "data": "chat", "data_dir": str(tmp_path / "data.jsonl")}
    assert estimate_training(resolve(flags, (), None)) is None
