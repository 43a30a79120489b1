import pytest

from multigpu_cli.config.code_names import parse_hook, parse_metric
from multigpu_cli.config.resume_rules import flatten_settings
from multigpu_cli.config.sources import resolve
from multigpu_cli.config.yaml_text import dump_config, list_arguments


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("macro_f1", "macro_f1"),
        ("my_code:f1", "f1"),
        ("pkg.mod:F1Score", "f1_score"),
        ("torchmetrics:classification.MulticlassF1Score", "multiclass_f1_score"),
        ("torchmetrics:AUROC", "auroc"),
        ("F1=torchmetrics:F1Score", "F1"),
    ],
)
def test_a_metric_has_a_name(text: str, name: str) -> None:
    assert parse_metric(text) == (name, text.rpartition("=")[2])


def test_a_hook_is_called_like_its_class() -> None:
    assert parse_hook("my.code:Outer.GradientNotes") == ("GradientNotes", "my.code:Outer.GradientNotes")
    assert parse_hook("mine=code:Notes") == ("mine", "code:Notes")


def test_they_are_lists_in_every_form(tmp_path: object) -> None:
    flags = {"metric": ["macro_f1", "my:g"], "hook": ["a:B", "c=a:B"], "best": "val_g:min"}
    sets = ["metric.args.g={k: 3}", "hook.args.c={file: x}"]
    config = resolve(flags, sets, None)
    assert config.metric.names == ("macro_f1", "my:g")
    assert config.metric.args == {"g": {"k": 3}}
    assert config.hook.args == {"c": {"file": "x"}}
    again = f"{tmp_path}/config.yaml"
    with open(again, "w") as file:
        file.write(dump_config(config))
    assert flatten_settings(resolve({}, [], again)) == flatten_settings(config)
    words = list_arguments(config)
    assert words.count("--metric") == words.count("--hook") == 2
    assert resolve({}, ["hook=[]"], again).hook.names == (), "none again"
    assert resolve({"metric": ["macro_f1"]}, [], again).metric.args == {}, "those were of other metrics"
