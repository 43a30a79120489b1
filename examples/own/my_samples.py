"""A dataset, a stream, a network and a LoRA model, named by docs/start/what-you-have.md."""

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset):
    def __init__(self, split):  # train, val or test
        self.inputs = torch.randn(60, 8, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], int(self.inputs[index].sum() > 0)


class Stream(IterableDataset):
    def __iter__(self):
        yield from Numbers("train")


class Net(nn.Module):
    def __init__(self, num_classes, width=16):
        super().__init__()
        self.body, self.head = nn.Linear(8, width), nn.Linear(width, num_classes)

    def forward(self, inputs):
        return self.head(self.body(inputs).relu())


def lora(num_classes):
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    network = GPT2LMHeadModel(
        GPT2Config(vocab_size=num_classes, n_layer=2, n_embd=16, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    return get_peft_model(network, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
