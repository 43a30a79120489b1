"""defaults < YAML < --set < flags: what wins, what is refused, and that config.yaml repeats a run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.config.resume_rules import OF_THE_COMMAND
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.sources import explicit_dump, gather, resolve
from multigpu_cli.config.yaml_text import dump_config
from multigpu_cli.errors import RequestError

Write = Callable[[str], str]


@pytest.fixture
def recipe(tmp_path: Path) -> Write:
    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


def read_refusal(flags: dict[str, Any] | None = None, sets: tuple[str, ...] = (), file: str | None = None) -> str:
    with pytest.raises(RequestError) as refusal:
        resolve(flags or {}, sets, file)
    return str(refusal.value)


def test_nothing_said_is_all_defaults() -> None:
    assert resolve({}, (), None) == Config()


def test_each_source_overrides_the_ones_before(recipe: Write) -> None:
    file = recipe("epochs: 1\nseed: 1\nkeep: 1\n")
    config = resolve({"keep": "3"}, ("seed=2", "keep=2"), file)
    assert (config.length.epochs, config.reproducibility.seed, config.checkpoint.keep) == (1, 2, 3)
    assert config.explicit == {"epochs", "seed", "keep"}
    assert config.recipe == "mine"


def test_flags_that_were_not_given_say_nothing() -> None:
    assert resolve({"epochs": None}, (), None).explicit == frozenset()


def test_data_model_and_task_are_words_or_mappings(recipe: Write) -> None:
    config = resolve(
        {}, (), recipe("data: har\nmodel:\n  name: mlp\n  args: {width: 64, rate: 1e-3}\ntask: {args: {x: on}}\n")
    )
    assert (config.data.name, config.data.args) == ("har", {})
    assert (config.model.name, config.model.args) == ("mlp", {"width": 64, "rate": 0.001})
    assert (config.task.name, config.task.args) == (None, {"x": True})
    assert config.explicit == {"data", "model", "model.args", "task.args"}


def test_arguments_of_plugins_merge_over_the_sources(recipe: Write) -> None:
    file = recipe("model: {name: mlp, args: {width: 64, depth: 2}}\n")
    config = resolve({}, ("model.args.depth=3", "model.bias=false", "data.rows=[1, 2e3]"), file)
    assert config.model.args == {"width": 64, "depth": 3, "bias": False}
    assert config.data.args == {"rows": [1, 2000.0]}


def test_arguments_go_with_the_name_that_they_were_written_for(recipe: Write) -> None:
    file = recipe("model: {name: mlp, args: {width: 64}}\n")
    assert resolve({"model": "convnet"}, (), file).model.args == {}
    assert resolve({"model": "mlp"}, (), file).model.args == {"width": 64}
    assert resolve({"model": "convnet"}, ("model.args.depth=3",), file).model.args == {"depth": 3}


def test_set_with_a_settings_own_name_is_no_argument() -> None:
    assert "data_dir for the setting, data.args.dir for an argument" in read_refusal(sets=("data.dir=x",))
    assert "seed for the setting, model.args.seed" in read_refusal(sets=("model.seed=3",))
    assert resolve({}, ("data.name=har",), None).data.name == "har"


def test_an_adapter_is_a_section_of_its_own(recipe: Write) -> None:
    file = recipe("adapter: {kind: dora, r: 4, targets: [q_proj, v_proj]}\n")
    written = resolve({}, ["adapter.alpha=8"], file).adapter
    assert (written.kind, written.r, written.alpha, written.targets) == ("dora", 4, 8, ("q_proj", "v_proj"))
    assert resolve({}, ["adapter.kind=lora", "adapter.targets=q_proj, k_proj"], None).adapter.targets == (
        "q_proj",
        "k_proj",
    )
    assert resolve({"adapter": "none"}, [], file).adapter == Config().adapter, "they were those of another kind"
    with pytest.raises(RequestError, match=r"(?s)adapter.rank: there is no such setting.*'adapter.r'"):
        resolve({}, ["adapter.rank=8"], None)


def test_a_parts_own_settings_stand_beside_its_arguments(recipe: Write) -> None:
    file = recipe("model: {name: mlp, unfreeze_at: 3}\noptimizer: {rates: {head.*: 10}, layer_decay: 0.9}\n")
    config = resolve({}, (), file)
    assert (config.model.unfreeze_at, config.model.args) == (3, {})
    assert (config.optimizer.rates, config.optimizer.layer_decay) == ({"head.*": 10.0}, 0.9)
    config = resolve({}, ("optimizer.rates={'*.bias': 2}", "optimizer.layer_decay=null", "model.unfreeze_at=4"), file)
    assert (config.optimizer.rates, config.optimizer.layer_decay) == ({"*.bias": 2.0}, None)
    assert (config.model.unfreeze_at, config.model.args) == (4, {})


@pytest.mark.parametrize("text", ["{no: 1, yes: 3, 010: 2}", "{'no': 1, \"yes\": 3e0, '010': 2}"])
def test_names_of_classes_and_parameters_are_text(recipe: Write, text: str) -> None:
    """YAML's own reading is False, True and 8; arguments of a dataset or a model have it."""
    weights = {"no": 1.0, "yes": 3.0, "010": 2.0}
    for file in (None, f"task.class_weights: {text}\n", f"task: {{class_weights: {text}}}\n"):
        sets = () if file else (f"task.class_weights={text}", f"optimizer.rates={text}")
        config = resolve({}, sets, recipe(file) if file else None)
        assert config.task.class_weights == weights
        assert file or config.optimizer.rates == weights
    assert resolve({}, (), recipe(dump_config(config))).task.class_weights == weights
    assert resolve({}, ("data.args={x: {no: 1}}",), None).data.args == {"x": {False: 1}}


def test_lr_and_base_lr_in_one_layer_are_refused(recipe: Write) -> None:
    assert "--lr can't be used with --base-lr" in read_refusal({"lr": "1", "base_lr": "2"})
    assert "--lr can't be used with --set base_lr" in read_refusal({"lr": "1"}, ("base_lr=2",))
    assert "mine.yaml:1: lr can't be used with" in read_refusal(file=recipe("lr: 1\nbase_lr: 2\n"))


def test_lr_and_base_lr_of_different_layers_replace_each_other(recipe: Write) -> None:
    config = resolve({"lr": "4e-3"}, (), recipe("base_lr: 1\nbase_batch_size: 256\nlr_scaling: sqrt\n"))
    assert (config.rate.lr, config.rate.base_lr, config.rate.base_batch_size) == (0.004, None, 32)
    assert config.explicit == {"lr"}
    config = resolve({"base_lr": "4e-3"}, (), recipe("lr: 1\n"))
    assert (config.rate.lr, config.rate.base_lr) == (None, 0.004)
    assert config.explicit == {"base_lr"}


def test_an_empty_value_means_the_default_only_where_that_is_empty_too(recipe: Write) -> None:
    assert resolve({}, ("lr=null",), recipe("lr: 1\n")).rate.lr is None
    assert resolve({}, (), recipe("lr:\n")).explicit == frozenset()
    assert "mine.yaml:2: epochs has no value" in read_refusal(file=recipe("seed: 1\nepochs:\n"))


def test_everything_wrong_is_reported_at_once_with_file_and_line(recipe: Write) -> None:
    file = recipe("epoch: 3\nseed: x\ndata:\n  nam: har\n  args: [1]\nbatch-size: 3\n")
    message = read_refusal({"lr": "nan"}, ("keep=0", "word", "modell=mlp"), file)
    for part in (
        "mine.yaml:1: epoch: there is no such setting\n  try: did you mean 'epochs'?",
        "mine.yaml:2: seed must be a whole number",
        "mine.yaml:4: data.nam: there is no such setting\n  try: did you mean 'data.name'?",
        "mine.yaml:5: data.args must be a mapping",
        "mine.yaml:6: batch-size: there is no such setting\n  try: did you mean 'batch_size'?",
        "--set keep must be",
        "--set word: must be KEY=VALUE",
        "--set modell: there is no such setting",
        "--lr must be a number above 0",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "mine.yaml:1: the file is empty"),
        (b"- epochs\n", "mine.yaml:1: the file is a list"),
        (b"epochs\n", "mine.yaml:1: the file is a single value"),
        (b"epochs: 3\nmode: \xe9\n", "mine.yaml:2: not UTF-8"),
        (b"#" * (2**20 + 1), "too large"),
        (b"epochs: [\n", "mine.yaml:2: malformed"),
        (b"recipe: [a]\n", "recipe"),
        (b"\x00\x01\x02", "control character"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    assert words in read_refusal(file=str(file))


def test_folders_devices_and_missing_files_are_refused(tmp_path: Path) -> None:
    assert "is a directory" in read_refusal(file=str(tmp_path))
    assert "not a regular file" in read_refusal(file="/dev/zero")
    assert "no such file or recipe" in read_refusal(file=str(tmp_path / "none.yaml"))


def test_recipes_are_found_by_name_here_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "my_fashion.yaml").write_text("seed: 7\n")
    monkeypatch.chdir(tmp_path)
    for name in ("my_fashion", "my-fashion", "configs/my_fashion.yaml"):
        config = resolve({}, (), name)
        assert (config.reproducibility.seed, config.recipe) == (7, "my_fashion")
    assert "did you mean 'my_fashion'?" in read_refusal(file="my_fashio")
    assert "did you mean 'configs/my_fashion.yaml'?" in read_refusal(file="configs/my_fashio.yaml")


def test_a_request_with_faults_still_has_a_config_for_the_rules(recipe: Write) -> None:
    request = gather({"epochs": "0", "keep": "5"}, (), None)
    assert request.invalid_keys == {"epochs"}
    assert (request.config.checkpoint.keep, request.is_readable) == (5, True)
    assert not gather({}, (), recipe("[")).is_readable


WRITTEN = {
    "data": "har",
    "data.args": {"window": 3, "names": ["a", None], "nested": {"rate": 1e-5}},
    "model": "my.module:build",
    "optimizer.args": {"betas": [0.9, 0.95]},
    "optimizer.rates": {"head.*": "10", "*.bias": 0.5},
    "optimizer.layer_decay": "0.75",
    "model.unfreeze_at": "3",
    "freeze": ["features.*", "*"],
    "gpu_ids": "1,0",
    "checkpoint_every": "10m",
    "lr": "1e-5",
    "sync_bn": True,
    "ema": "off",
    "amp": "off",
    "data_dir": "~/some where/däta #1",
    "save_dir": "runs/1",
    "resume": "never",
    "own_code": True,
    "init_from": "null",
}


@pytest.mark.parametrize("flags", [{}, WRITTEN, {"base_lr": "0.1", "max_grad_norm": "off", "seed": "0"}])
def test_config_yaml_repeats_the_run(recipe: Write, flags: dict[str, Any]) -> None:
    config = resolve(flags, (), None)
    repeated = resolve({}, (), recipe(dump_config(config)))
    for key in SETTINGS.keys() - OF_THE_COMMAND:
        assert repeated.get(key) == config.get(key), key
    assert repeated.recipe == config.recipe
    assert dump_config(repeated) == dump_config(config)
    assert not any(key in dump_config(config) for key in OF_THE_COMMAND)


def test_config_yaml_has_every_setting_in_the_tables_order(recipe: Write) -> None:
    found = [line.split(":")[0] for line in dump_config(Config()).splitlines() if not line.startswith(" ")]
    told = dict.fromkeys(key.partition(".")[0] for key in SETTINGS if key not in OF_THE_COMMAND)
    assert found == ["recipe", *told]


@pytest.mark.parametrize("flags", [{}, WRITTEN, {"on_oom": "shrink", "max_restarts": "2"}])
def test_a_worker_gets_the_same_config_and_knows_what_was_written(recipe: Write, flags: dict[str, Any]) -> None:
    config = replace(resolve(flags, ("task.args.x=1e-3",), None), recipe="fashion")
    assert resolve({}, (), recipe(json.dumps(explicit_dump(config)))) == config


def test_how_many_parts_of_a_sample_are_inputs_is_a_setting(recipe: Write) -> None:
    assert resolve({}, ("data.inputs=2",), None).data.inputs == 2
    file = recipe("data: {name: mine:rows, inputs: 2, args: {inputs: 5}}\n")
    config = resolve({}, (), file)
    assert (config.data.inputs, config.data.args) == (2, {"inputs": 5})
    assert resolve({}, (), recipe(dump_config(config))).data == config.data
    assert resolve({"data": "digits"}, (), file).data.inputs is None, "it was meant for the other dataset"
    assert "must be a whole number" in read_refusal(sets=("data.inputs=both",))
