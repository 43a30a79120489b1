"""Peak memory of a language model's forward and backward pass: logits in chunks against all logits at once.

    python -m benchmarks.logits_memory

A small Llama with a large vocabulary in float32, each way in a process of its own; of the tokens all, or every fourth
one, are learned. What stands before the pass (libraries, weights, one gradient of each) is not counted.
"""

import os
import resource
import subprocess
import sys
from typing import Any

from benchmarks.paired_timing import ONE_THREAD, ROOT, Row, program, row

VOCABULARY, TOKENS, REPEATS = 32_768, 4096, 3
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


def measure(tiny: bool = False) -> list[Row]:
    tokens, repeats = (64, 1) if tiny else (TOKENS, REPEATS)
    rows: list[Row] = []
    for every in (1, 4):
        taken = {way: [_run(way, tokens, every) for _ in range(repeats)] for way in ("chunks", "plain")}
        what = f"a pass of {tokens:,} tokens, {'all' if every == 1 else 'a quarter'} learned"
        rows += [row(f"{what}: {way}", [each / 2**20 for each in taken[way]], unit="MiB") for way in taken]
        ratios = [ours / theirs for ours, theirs in zip(taken["chunks"], taken["plain"], strict=True)]
        rows.append(row(f"{what}: chunks / plain", ratios, aim=1.0))
    return rows


def _run(way: str, tokens: int, every: int) -> float:
    command = [sys.executable, "-m", "benchmarks.logits_memory", way, str(tokens), str(every)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def run_pass(way: str, tokens: int, every: int) -> float:
    """Bytes by which the peak of this process grows in a pass."""
    import torch
    import transformers
    from torch.nn.functional import cross_entropy

    from multigpu_cli.language.hugging_face import Logits
    from multigpu_cli.models.token_losses import TokenTargets

    config = transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=tokens, use_cache=False, **SIZES)
    model = Logits(transformers.AutoModelForCausalLM.from_config(config))
    inputs = torch.arange(tokens)[None] % VOCABULARY
    targets = inputs.roll(-1).masked_fill(inputs % every != 0, -100)

    def train(some: slice) -> None:
        wanted = TokenTargets(inputs[:, some], targets[:, some], int((targets[:, some] >= 0).sum()), summed=True)
        if way == "chunks":
            loss = model(wanted).losses.sum()
        else:
            loss = cross_entropy(model(wanted.inputs).flatten(0, 1), wanted.targets.flatten(), reduction="sum")
        loss.backward()

    train(slice(0, 8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train(slice(None))
    return 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


if __name__ == "__main__":
    if sys.argv[1:2] in (["chunks"], ["plain"]):
        print(run_pass(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
        sys.exit()
    program(measure, __doc__)
