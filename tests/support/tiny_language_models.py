"""Tiny models of transformers in folders, with tokenizers that are trained on the spot."""

from pathlib import Path
from typing import Any

import torch

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris, of course. 1 2 3 4 5 6 7 8"
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "qwen2": _SMALL | {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def make_model_folder(folder: Path, architecture: str = "llama", *, places: int = 64, **settings: Any) -> Path:
    """A model with weights drawn from seed 0, its tokenizer, and ChatML as its template."""
    import transformers

    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": places,
        **SIZES.get(architecture, _SMALL),
        **settings,
    }
    sizes |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.CONFIG_MAPPING[architecture](**sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer(template: str | None = CHATML, eos: str = "<|im_end|>", pad: str | None = None) -> Any:
    """Byte-level BPE with ChatML's special tokens; PAD is EOS where it is not given, as in many models."""
    import tokenizers
    import transformers

    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator([TEXT], vocab_size=400, special_tokens=["<|im_start|>", "<|im_end|>", "<|pad|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model._tokenizer, eos_token=eos, pad_token=pad or eos, chat_template=template
    )
