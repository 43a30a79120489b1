from pathlib import Path

import pytest

from multigpu_cli.commands.plan.plan import format_plan, make_plan, parse_plan_request
from multigpu_cli.config.sources import resolve
from tests.support.tiny_language_models import make_model_folder

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")


def test_the_memory_of_a_model_whose_weights_are_not_there_yet(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    parameters = transformers.AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    request = parse_plan_request(None, "1,2", None, None, "8")
    flags = {"model": "pretrained", "model_dir": str(folder)}
    trained = 4 * (16 * (2 * (32 + 32) + 2 * (32 + 16)) + 16 * 3 * (32 + 64)) // 2  # 2 layers, rank 16
    for adapter, learning in (("none", parameters), ("lora", trained)):
        forecast = make_plan(resolve(flags | {"adapter": adapter}, (), None), request)
        every = parameters + (trained if adapter == "lora" else 0)
        assert (forecast.about["parameters"], forecast.about["trained"]) == (every, learning)
        assert forecast.memory.gradients == 4 * learning
        assert forecast.memory.optimizer == 8 * learning
        assert forecast.memory.weights == pytest.approx(4 * every, abs=4096)
        text = "\n".join(format_plan(forecast))
        assert "a device before any sample" in text
        assert "has no weights: what a micro-batch keeps" in text
        assert ("frozen" in text) == (adapter == "lora")
        assert "quantize" not in text
    config = resolve(flags | {"adapter": "lora", "model.args": {"quantize": "4bit"}}, (), None)
    assert "weights are counted whole" in "\n".join(format_plan(make_plan(config, request)))
