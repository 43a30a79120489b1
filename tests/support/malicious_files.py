"""Files that would do something when they are loaded without care: they make a folder."""

import io
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from multigpu_cli.checkpoint.manifest import MANIFEST, find_damage, read_manifest, sign_manifest


class Evil:
    """Its pickle makes a folder when it is loaded without care."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


def poison_and_sign(checkpoint: Path, target: Path) -> Path:
    """Rewrite state.pt so that it would make `target`, and sign the manifest for it: every checksum is right."""
    state: dict[str, Any] = torch.load(checkpoint / "state.pt", weights_only=True)
    poison(checkpoint / "state.pt", target, state)
    content = (checkpoint / "state.pt").read_bytes()
    listed = {"state.pt": {"size": len(content), "sha256": sha256(content).hexdigest()}}
    manifest = {name: value for name, value in read_manifest(checkpoint).items() if name != "sha256"}
    (checkpoint / MANIFEST).write_bytes(sign_manifest(manifest | {"files": listed}))
    assert find_damage(checkpoint) is None, json.dumps(read_manifest(checkpoint))
    return checkpoint


def poison(file: Path, target: Path, state: dict[str, Any]) -> Path:
    """Write a file of torch.save that would make `target` if it were loaded without weights_only."""
    content = io.BytesIO()
    torch.save(state | {"progress": Evil(target)}, content)
    file.write_bytes(content.getvalue())
    torch.load(file, weights_only=False)
    target.rmdir()  # the attack works on whoever is careless, so a test with it can fail
    return file
