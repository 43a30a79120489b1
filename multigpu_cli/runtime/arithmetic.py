"""Checksums of a device's arithmetic, by which a run with --exact recognizes a machine that rounds differently.

A name says too little. Libraries choose their kernels by the processor's vendor, model and caches, so two processors
with the same instructions, which torch names alike, can differ in the last bits of a product.
"""

from collections.abc import Callable
from functools import cache
from hashlib import sha256

import torch
from torch import Tensor
from torch.nn import functional

from multigpu_cli.runtime.precision import Precision
from multigpu_cli.runtime.seeding import choose_kernels, limit_threads

# Functions of values (33153,), whose views are the operands. Odd sizes reach the ends of vectors and blocks, where
# kernels differ. Each family takes milliseconds on a CPU.
_FAMILIES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "products": lambda x: [
        *(x[:2145].view(33, 65) @ x[:1105].view(65, 17), x[:651].view(3, 31, 7) @ x[:273].view(3, 7, 13)),
        functional.linear(x[:1285].view(5, 257), x.view(129, 257), x[:129]),
        functional.scaled_dot_product_attention(rows := x[:1216].view(2, 2, 19, 16), rows, rows),
    ],
    "convolutions": lambda x: [
        functional.conv1d(x[:492].view(2, 6, 41), x[:150].view(5, 6, 5)),
        functional.conv2d(x[:3876].view(4, 3, 17, 19), x[:216].view(8, 3, 3, 3), x[:8], padding=1),
        functional.conv2d(x[:1296].view(2, 8, 9, 9), x[:144].view(8, 2, 3, 3), stride=2, groups=4),
    ],
    "reductions": lambda x: [
        *(reduce(x[:7217].view(7, 1031), 1) for reduce in (torch.sum, torch.var, torch.softmax, torch.logsumexp)),
        *(torch.linalg.vector_norm(x), functional.layer_norm(x[:7217].view(7, 1031), (1031,))),
        functional.batch_norm(x[:2700].view(9, 12, 25), None, None, training=True),
    ],
    "exponentials": lambda x: [x.exp(), x.tanh(), x.sigmoid(), x.sin(), functional.softplus(x), functional.gelu(x)],
}


@cache
def compute_checksums(device: torch.device, precision: str) -> dict[str, str]:
    """Compute each family of operations, forward and backward, as a run with --exact does, and return the checksums.

    Such a run has one CPU thread and deterministic kernels, which are set for the duration. Nothing else changes, and
    no random number is drawn.

    Args:
        precision: off, bf16 or fp16, as in --amp.

    Returns: the first 12 hexadecimal digits of a SHA-256, by the name "checksum of FAMILY".
    """
    checksums = dict[str, str]()
    with limit_threads(1), choose_kernels(device, exact=True), torch.enable_grad():
        for name, compute in _FAMILIES.items():
            # integers, divided by a power of two, so the values in [-4, 4] are the same on every device
            values = ((torch.arange(33153, device=device) * 40503 % 65537 - 32768).float() / 8192).requires_grad_()
            with Precision(precision, device).autocast():
                outputs = torch.cat([output.flatten().float() for output in compute(values)])
            outputs.square().sum().backward()
            results = torch.cat([outputs.detach(), values.grad]).cpu()  # type: ignore[list-item]
            checksums[f"checksum of {name}"] = sha256(results.numpy().tobytes()).hexdigest()[:12]
    return checksums
