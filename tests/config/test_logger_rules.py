from typing import Any

import pytest

from multigpu_cli.config.sources import resolve
from multigpu_cli.errors import RequestError
from multigpu_cli.loggers import rules


def errors(flags: dict[str, Any], *sets: str) -> str:
    [rule] = rules.RULES
    return "\n".join(str(error) for error in rule.check(resolve(flags, sets, None)))


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None if name == "wandb" else object())
    told = errors({"logger": ["mlflow", "wandb", "my_file:Log"]})
    assert told == "--logger wandb needs the package wandb\n  try: pip install 'multigpu-cli[wandb]'"


@pytest.mark.parametrize(
    ("key", "address"),
    [
        ("data.args.url", "postgres://me:geheim@host/table"),
        ("data.args.urls", "[https://host/a, https://:geheim@host]"),
        ("model.args.from", "{hub: s3://key:geheim@host}"),
    ],
)
def test_a_password_in_a_setting_is_refused_and_not_repeated(key: str, address: str) -> None:
    told = errors({"logger": ["mlflow"]}, f"{key}={address}")
    assert f"{key.partition('.')[0]}.args" in told
    assert "read it from the environment" in told
    assert "geheim" not in told
    assert errors({}, f"{key}={address}") == "", "without a logger nobody gets it"


def test_an_address_without_a_password_passes() -> None:
    assert errors({"logger": ["mlflow"]}, "data.args.url=https://host:80/a@b?x=1:2") == ""


@pytest.mark.parametrize("value", ["https://me:geheim@host", "me:geheim@host", ["mlflow", "http://host"]])
def test_an_address_is_no_name_and_is_not_repeated(value: Any) -> None:
    with pytest.raises(RequestError, match="must be a name, not an address") as refused:
        resolve({"logger": value}, [], None)
    assert "geheim" not in str(refused.value)


def test_none_is_no_logger_and_counts_as_given() -> None:
    config = resolve({"logger": ["none"]}, [], None)
    assert config.log.loggers == ()
    assert "logger" in config.explicit
