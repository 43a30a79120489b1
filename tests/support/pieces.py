"""Checkpoints in pieces, as so many ranks would write them, without these ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.checkpoint.manifest import find_damaged_piece
from multigpu_cli.checkpoint.pieces import Rows, write_piece
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.runtime.module_state import TensorPath, map_tensors, name_tensor

FACTS: dict[str, Any] = {"settings": {"epochs": 3}, "pins": {"lr": 0.004, "model": "mlp"}, "world_size": 3}


class Peers:
    """Ranks that write their rows one after the other."""

    def __init__(self, store: Store, step: int, pieces: list[dict[str, Rows]]) -> None:
        self.store, self.step, self.pieces = store, step, pieces

    def add_pieces(self, draft: Path) -> dict[str, dict[str, Any]]:
        names = [f"rank_{rank}.safetensors" for rank in range(len(self.pieces))]
        return {name: write_piece(draft / name, rows) for name, rows in zip(names, self.pieces, strict=True)}

    def complete_best(self, outline: dict[str, Any]) -> dict[str, Any]:
        return outline

    def find_damaged_pieces(self) -> dict[str, str]:
        found = {folder.name: find_damaged_piece(folder) for folder in self.store.list_old(self.step)}
        return {name: damage for name, damage in found.items() if damage}

    def abandon(self) -> None:
        self.store.discard_draft(self.step)


def divide(state: dict[str, Any], ranks: int) -> tuple[dict[str, Any], list[dict[str, Rows]]]:
    """An outline of a state, and each rank's rows of its tensors that have dimensions."""
    pieces: list[dict[str, Rows]] = [{} for _ in range(ranks)]

    def cut(path: TensorPath, value: Tensor) -> Tensor:
        if not value.ndim:
            return value
        length = -(-len(value) // ranks)
        for rank, rows in enumerate(value.split(length)):
            pieces[rank][name_tensor(path)] = Rows(rows, rank * length)
        return torch.empty_like(value, device="meta")

    return map_tensors(state, cut), pieces


def save_in_pieces(
    store: Store,
    step: int,
    state: dict[str, Any],
    ranks: int = 3,
    change: Callable[[list[dict[str, Rows]]], object] = lambda pieces: None,
) -> Path:
    """Save a state as so many ranks do; returns the checkpoint's folder.

    Args:
        change: what goes wrong with the rows before they are written.
    """
    outline, pieces = divide(state, ranks)
    change(pieces)
    store.save(step, outline, FACTS, peers=Peers(store, step, pieces))
    return store.folder / f"step_{step:08d}"


def flip_byte(file: Path) -> None:
    """Change the last byte of a file."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
