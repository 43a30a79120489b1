"""Datasets and networks as scripts around Hugging Face's Trainer have them."""

from typing import Any

import datasets
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from tests.support.styles.samples import Tokens


class Reviews(Tokens):
    """Padded rows of input_ids with their mask, and a label."""

    num_classes = 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 5 + index % 8
        ids = torch.where(torch.arange(12) < length, self.words[index] + 1, 0)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "label": index % 2}


class Unpadded(Reviews):
    """The same as the tokenizer made them; a data collator pads each batch."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return {"input_ids": row["input_ids"][: 5 + index % 8].tolist(), "label": row["label"]}


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """DataCollatorWithPadding."""
    ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    labels = torch.tensor([row["label"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


class Collated(Unpadded):
    collate_fn = staticmethod(collate)


def bert(num_classes: int) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropped = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    network: nn.Module = BertForSequenceClassification(
        BertConfig(vocab_size=12, num_labels=num_classes, **sizes, **dropped)
    )
    return network


class Texts(Tokens):
    """For a causal language model: labels are the ids themselves, -100 where none is learned."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.words[index]
        return {"input_ids": ids, "labels": torch.where(torch.arange(12) < 3, -100, ids)}


def gpt2() -> nn.Module:
    config = GPT2Config(vocab_size=10, n_layer=1, n_embd=16, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    network: nn.Module = GPT2LMHeadModel(config)
    return network


def stream(split: str) -> IterableDataset[Any]:
    """`Dataset.to_iterable_dataset()`, which ends."""

    class Stream(IterableDataset[Any]):
        num_classes = 2

        def __iter__(self) -> Any:
            rows = Reviews(split)
            listed = [
                {name: torch.as_tensor(value).tolist() for name, value in rows[at].items()} for at in range(len(rows))
            ]
            yield from datasets.Dataset.from_list(listed).to_iterable_dataset()

    return Stream()
