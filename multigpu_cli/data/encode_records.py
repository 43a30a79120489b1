"""Encodes the records of a file with a model's tokenizer, once on a machine."""

import inspect
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from multigpu_cli.data import chat_tokens, conversations, preference_pairs
from multigpu_cli.data.chat_tokens import ChatEncoder, ChatTokens
from multigpu_cli.data.conversations import PREFERENCE, read_conversation
from multigpu_cli.data.json_lines import JsonLines
from multigpu_cli.data.preference_pairs import Answers, encode_pair
from multigpu_cli.data.token_file import TokenFile, open_tokens

_CODE = (chat_tokens, conversations, preference_pairs)
_LIBRARIES = ("transformers", "tokenizers", "jinja2")


def open_record_tokens(records: JsonLines, form: str, encoder: ChatEncoder, conditions: object) -> TokenFile:
    """The tokens of all records, in a file below Hugging Face's cache; a preference is two samples.

    Args:
        form: of the records.
        conditions: what their tokens depend on, beside file, form, code and libraries.

    Raises:
        RequestError: a record is not of that form or can't be encoded, or there is no room.
    """
    from huggingface_hub.constants import HF_HOME  # late: transformers has loaded it

    def encode(row: int) -> Sequence[ChatTokens]:
        place = records.describe(row)
        conversation = read_conversation(records[row], form, place)
        return encode_pair(encoder, conversation, place) if paired else (encoder.encode(conversation, place),)

    paired = form == PREFERENCE
    code, versions = [inspect.getsource(module) for module in _CODE], [version(library) for library in _LIBRARIES]
    key = sha256(repr((records.digest, form, conditions, code, versions)).encode()).hexdigest()
    return open_tokens(Path(HF_HOME, "multigpu"), key, len(records), encode, Answers.width if paired else 1)
