"""What data.mix and data.shuffle_block do not go together with, and that code in a mixture is code like any other."""

import pytest

from multigpu_cli.config.code_names import check_code
from multigpu_cli.config.rules import find_rule_errors
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import resolve
from multigpu_cli.errors import RequestError

MIX = "data.mix=[{data: digits}, {data: %s}]"


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([MIX % "har", "data=har"], "data.mix can't be used with --data har"),
        ([MIX % "har", "data_dir=."], "data.mix can't be used with --data-dir"),
        ([MIX % "harr"], "data.mix: harr: unknown name"),
        ([MIX % "chat"], "data.mix: chat can't be mixed"),
        ([MIX % "har", "data.sample_weights=balanced"], "data.mix can't be used with data.sample_weights"),
        (["data.shuffle_block=8", "data.sample_weights=balanced"], "data.shuffle_block can't be used with"),
        ([MIX % "har"], ""),
        (["data.shuffle_block=8"], ""),
    ],
)
def test_rules(sets: list[str], message: str) -> None:
    found = "\n".join(str(error) for error in find_rule_errors(resolve({}, sets, None)))
    assert message in found
    assert bool(message) == bool(found)


@pytest.mark.parametrize("entry", ["planted:data", "synthetic, args: {maker: 'planted:make'}"])
def test_code_that_only_a_run_names_is_refused(entry: str) -> None:
    stored = resolve({}, [MIX % entry], None)
    with pytest.raises(RequestError, match="planted:"):
        check_code(stored, Config(), "run")
    check_code(stored, stored, "run")
