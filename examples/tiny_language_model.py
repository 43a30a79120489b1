"""A tiny Llama with its tokenizer, conversations and preferences in files, to try fine-tuning without a download.

They are written to tiny/model, tiny/train.jsonl and tiny/preferences.jsonl.

Usage: python examples/tiny_language_model.py
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer

try:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
except ImportError as error:  # it loads torchvision, which is built for one version of torch
    raise SystemExit(
        f"transformers can't be loaded: {error.__cause__ or error}\n"
        "  try: pip install 'multigpu-cli[hugging-face]'; of torchvision the one for this torch (docs/howto/models.md)"
    ) from error

TEMPLATE = (  # ChatML
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def draw_conversation(dice: random.Random) -> list[dict[str, str]]:
    one, other = dice.randint(1, 9), dice.randint(1, 9)
    answer = f"{one} + {other} = {one + other}"
    return [{"role": "user", "content": f"What is {one} + {other}?"}, {"role": "assistant", "content": answer}]


def draw_preference(dice: random.Random) -> dict[str, object]:
    asked, right = draw_conversation(dice)
    wrong = {"role": "assistant", "content": f"{right['content']}0"}
    return {"prompt": [asked], "chosen": [right], "rejected": [wrong]}


def main() -> None:
    folder, dice = Path("tiny"), random.Random(0)
    folder.mkdir(exist_ok=True)
    conversations = [draw_conversation(dice) for _ in range(400)]
    lines = [json.dumps({"messages": messages}) + "\n" for messages in conversations]
    (folder / "train.jsonl").write_text("".join(lines))
    preferences = [json.dumps(draw_preference(dice)) + "\n" for _ in range(100)]
    (folder / "preferences.jsonl").write_text("".join(preferences))

    subwords = ByteLevelBPETokenizer()
    texts = [message["content"] for messages in conversations for message in messages]
    subwords.train_from_iterator(texts, vocab_size=300, special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=subwords._tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder / "model")

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")


if __name__ == "__main__":
    main()
