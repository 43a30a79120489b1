"""Addresses with a password in them, which belong into the environment: found, and hidden in texts."""

import re
from typing import Any

_WITH_PASSWORD = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]+(?=@)")
_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def has_password(value: Any) -> bool:
    """Whether a setting's value, or a text in it, is an address with a password, as in https://me:secret@host."""
    if isinstance(value, dict):
        return any(has_password(entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return any(has_password(entry) for entry in value)
    return isinstance(value, str) and _WITH_PASSWORD.search(value) is not None


def hide_passwords(text: str, secrets: tuple[str, ...] = ()) -> str:
    """A text without the users and passwords of its addresses, and without these secrets."""
    for secret in secrets:
        text = text.replace(secret, "…")
    return _USER.sub("…", text)
