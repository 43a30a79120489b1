"""Writes tests/language/chat/golden_masks anew: `python -m tests.support.golden_masks`.

Each file shows what is learned of the same conversations with one of the chat templates that come with trl, which are
those of well-known models. Learned text stands between ⟦ and ⟧. The conversations are real ones (chatterbot_corpus),
and the tokenizer is trained on the spot on them and on Python's own help (pydoc_data.topics).
"""

import re
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat.conversations import Conversation
from multigpu_cli.language.chat.encoder import ChatEncoder

GOLDEN = Path(__file__).resolve().parents[1] / "language" / "chat" / "golden_masks"
_MARKS = re.compile(r"<\|[^|<>\s']+\|>|<｜[^｜]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|</?[a-z_]+>|<[A-Z_]+>|\[/?[A-Z_]+\]")
_SPEAKERS = ("user", "assistant")
_THOUGHTS = ("What is AI?", "Are you sentient?")  # chatterbot_corpus has them, too
_CALL = {"type": "function", "function": {"name": "search", "arguments": {"words": "a computer", "most": 1}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the library.",
        "parameters": {
            "type": "object",
            "properties": {
                "words": {"type": "string", "description": "what to look for"},
                "most": {"type": "integer", "description": "books at most"},
            },
            "required": ["words"],
        },
    },
}
ENDS: dict[str, tuple[str, ...]] = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion": ("<turn|>", "<eos>"),
    "gemma": ("<eos>", "<end_of_turn>"),
    "gemma4": ("<turn|>", "<eos>", "<|tool_response>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>", "<|endoftext|>"),
    "idefics3": ("<end_of_utterance>",),
    "lfm2": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    "llava": ("</s>",),
    "muse": ("<|eot|>",),
    "nemotron": ("<|im_end|>",),
    "phi3": ("<|endoftext|>", "<|end|>", "<|assistant|>"),
    "qwen": ("<|im_end|>", "<|endoftext|>"),
    "smolvlm": ("<end_of_utterance>",),
}
"""By the beginning of a template's name: the tokens at which its model stops, EOS first."""


@cache
def list_templates() -> dict[str, str]:
    """The templates by name; those ending in _training are trl's own variants."""
    paths = sorted(_find_package("trl").glob("chat_templates/*.jinja"))
    return {path.stem: path.read_text() for path in paths}


@cache
def read_corpus(name: str) -> list[list[str]]:
    """The conversations of a file of chatterbot_corpus: texts in turn."""
    path = _find_package("chatterbot_corpus") / "data" / "english" / f"{name}.yml"
    found: list[list[str]] = yaml.safe_load(path.read_text())["conversations"]
    return found


def _find_package(name: str) -> Path:
    """The folder of an installed package, without importing it: trl loads for seconds."""
    spec = find_spec(name)
    assert spec
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def make_conversations() -> dict[str, Conversation]:
    """By what they show."""
    talk = next(talk for talk in read_corpus("conversations") if talk[0] == "Hello")[:6]
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(talk)]
    system = {"role": "system", "content": next(talk[0] for talk in read_corpus("ai") if talk[0].startswith("You are"))}
    asked, answer = next(talk for talk in read_corpus("computers") if talk[0] == "What is a computer?")[:2]
    more = next(talk for talk in read_corpus("computers") if talk[0].startswith("What is a") and talk[0] != asked)[:2]
    return {
        "several turns": Conversation(messages),
        "thoughts in the text": Conversation(
            [
                {"role": role, "content": f"<think>\n{_THOUGHTS[at // 2]}\n</think>\n\n{text}" if at % 2 else text}
                for at, (role, text) in enumerate(zip(_SPEAKERS * 2, talk[:4], strict=True))
            ]
        ),
        "thoughts beside the text": Conversation(
            [
                message | ({"reasoning_content": _THOUGHTS[at // 2]} if at % 2 else {})
                for at, message in enumerate(messages[:4])
            ]
        ),
        "a system message": Conversation([system, *messages[:2]]),
        "a call of a tool": Conversation(
            [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "", "tool_calls": [_CALL]},
                {"role": "tool", "content": answer, "name": "search"},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": more[0]},
                {"role": "assistant", "content": more[1]},
            ],
            tools=[_TOOL],
        ),
    }


def make_long_conversations() -> dict[str, Conversation]:
    """By what they show, of seven answers or more."""
    talks = [talk[:2] for talk in read_corpus("ai") if len(talk) > 1][:7]
    turns = [{"role": role, "content": text} for talk in talks for role, text in zip(_SPEAKERS, talk, strict=True)]
    thought = {"role": "assistant", "content": f"<think>{talks[0][0]}</think>{talks[0][1]}"}
    trace: list[dict[str, Any]] = turns[:1]
    for at, turn in enumerate(turns[:8]):
        tool, count = ("search", "open")[at % 2], 1 + at % 3
        call = {"type": "function", "function": {"name": tool, "arguments": {"words": turn["content"], "most": at}}}
        trace.append({"role": "assistant", "content": "", "tool_calls": [call] * count})
        trace += [{"role": "tool", "content": turn["content"], "name": tool}] * count
    return {
        "a question at the end": Conversation([{"role": "system", "content": talks[0][0]}, *turns, turns[0]]),
        "two in a row": Conversation([*turns[:7], *turns[6:]]),
        "a thought": Conversation([*turns[:7], thought, *turns[8:]]),
        "calls of tools": Conversation([*trace, *turns[1:2]], tools=[_TOOL]),
    }


@cache
def train_tokenizer() -> Any:
    """Byte-level BPE of 2,000 subwords, with all marks of all templates as special tokens."""
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer

    marks = {mark for template in list_templates().values() for mark in _MARKS.findall(template)}
    marks |= {mark for ends in ENDS.values() for mark in ends} | {"<bos>"}
    subwords = ByteLevelBPETokenizer()
    texts = [text for name in ("ai", "computers", "conversations") for talk in read_corpus(name) for text in talk]
    subwords.train_from_iterator([*texts, *topics.values()], vocab_size=2000 + len(marks), special_tokens=sorted(marks))
    return subwords._tokenizer


def make_tokenizer(name: str) -> tuple[Any, tuple[int, ...]]:
    """A tokenizer with a template of trl's, and the tokens at which generation stops."""
    from transformers import PreTrainedTokenizerFast

    ends = ENDS[max((begin for begin in ENDS if name.startswith(begin)), key=len)]
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(), bos_token="<bos>", eos_token=ends[0], chat_template=list_templates()[name]
    )
    return tokenizer, tuple(tokenizer.convert_tokens_to_ids(list(ends)))


def mark_learned(tokenizer: Any, ids: list[int], learned: list[bool]) -> str:
    """The text of tokens, with what is learned between marks."""
    text = ""
    for counts, stretch in groupby(zip(ids, learned, strict=True), key=itemgetter(1)):
        part = tokenizer.decode([token for token, _ in stretch])
        text += f"⟦{part}⟧" if counts else part
    return text


def describe_masks(name: str) -> str:
    """What is learned of each conversation with a template, or why it is refused."""
    tokenizer, ends = make_tokenizer(name)
    sections = []
    for title, conversation in make_conversations().items():
        for loss_on in ("assistant", "completion"):
            try:
                found = ChatEncoder(tokenizer, None, loss_on, ends).encode(conversation, "talks.jsonl:1")
            except RequestError as error:
                sections.append(f"=== {title}, {loss_on}: refused\n{error.problem}\n  try: {error.remedy}\n")
                continue
            sections.append(f"=== {title}, {loss_on}\n{mark_learned(tokenizer, *found)}\n")
            break
    return "\n".join(sections)


def read_golden(name: str) -> str:
    """The golden text of a template; a variant of trl's for training has one of its own only where it differs."""
    path = GOLDEN / f"{name}.txt"
    return (path if path.exists() else GOLDEN / f"{name.removesuffix('_training')}.txt").read_text()


# --- The table of the guide ------------------------------------------------------------------------------------------

_FORMS = ("several turns", "system message", "calls of tools", "`<think>` in `content`", "`reasoning_content`")


def tabulate_templates() -> str:
    """What is learned with each template, by the golden files; those with the same row share it."""
    families: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(GOLDEN.glob("*.txt")):
        families.setdefault(_describe_family(path.read_text()), []).append(f"`{path.stem}`")
    lines = [f"| chat templates of | {' | '.join(_FORMS)} |", "|-|" + "-|" * len(_FORMS)]
    found = sorted(families.items(), key=lambda family: (-len(family[1]), family[1]))
    return "\n".join([*lines, *(f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in found)])


def _describe_family(golden: str) -> tuple[str, ...]:
    sections = dict(re.findall(r"^=== (.*)\n((?:(?!===).*\n)*)", golden, re.MULTILINE))

    def tell(title: str) -> str:
        answers = [f"{title}, {loss_on}" for loss_on in ("assistant", "completion")]
        return "yes" if answers[0] in sections else "the last answer" if answers[1] in sections else "refused"

    def tell_thoughts(title: str) -> str:
        if f"{title}, assistant" not in sections:
            return tell(title)
        learned = re.findall("⟦([^⟧]*)⟧", sections[f"{title}, assistant"])
        first, last = (thought in text for thought, text in zip(_THOUGHTS, learned, strict=True))
        if any(text.count("</think>") > 1 for text in learned):
            return "behind an empty thought"
        return {(True, True): "learned", (False, True): "of the last answer", (False, False): "left out"}[first, last]

    plain = [tell(title) for title in ("several turns", "a system message", "a call of a tool")]
    return (*plain, tell_thoughts("thoughts in the text"), tell_thoughts("thoughts beside the text"))


def main() -> None:
    """Write them all."""
    GOLDEN.mkdir(exist_ok=True)
    for path in GOLDEN.glob("*.txt"):
        path.unlink()
    for name in list_templates():  # a variant for training comes after its model's own
        found = describe_masks(name)
        if not name.endswith("_training") or read_golden(name) != found:
            (GOLDEN / f"{name}.txt").write_text(found)


if __name__ == "__main__":
    main()
