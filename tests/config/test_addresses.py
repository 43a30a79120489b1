import pytest
from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.config.code_names import has_password, hide_passwords

WORDS = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=8, max_size=12)


@given(WORDS, WORDS, WORDS, WORDS)
def test_a_password_is_found_and_hidden_wherever_it_stands(before: str, user: str, password: str, after: str) -> None:
    address = f"https://{user}:{password}@host/path"
    for value in (address, {"a": [1, address]}, (None, f"{before} {address} {after}")):
        assert has_password(value)
    hidden = hide_passwords(f"{before} {address} {after}")
    assert hidden == f"{before} https://…@host/path {after}"
    assert not has_password(hidden)


@given(WORDS, WORDS)
def test_a_secret_is_hidden_without_an_address(text: str, secret: str) -> None:
    assert secret not in hide_passwords(f"{text} token={secret}!", (secret,))


@pytest.mark.parametrize("plain", ["https://host:80/x", "me@host", "a:b@c", "s3://bucket/a@b", None, 7, ["x"]])
def test_what_has_no_password_stays(plain: object) -> None:
    assert not has_password(plain)
