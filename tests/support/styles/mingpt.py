"""A GPT and its dataset as minGPT has them: the network returns logits and loss, without a loss where no target is."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.styles.samples import Tokens


class SortDataset(Tokens):
    """Two halves; only the second one counts, and the first is masked by -1."""

    def get_vocab_size(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = self.words[index]
        both = torch.cat([words[:6], words[:6].sort().values])
        x, y = both[:-1].clone(), both[1:].clone()
        y[:5] = -1
        return x, y


class GPT(nn.Module):
    def __init__(self, vocab_size: int = 10, block_size: int = 12, n_embd: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.attn, self.ln = nn.MultiheadAttention(n_embd, 2, dropout=0.1, batch_first=True), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        t = idx.shape[1]
        x = self.wte(idx) + self.wpe(torch.arange(t, device=idx.device))
        mask = torch.ones(t, t, dtype=torch.bool, device=idx.device).triu(1)
        logits = self.lm_head(self.ln(x + self.attn(x, x, x, attn_mask=mask)[0]))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
