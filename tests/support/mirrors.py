"""Remote folders for tests: a local S3 server, and a folder whose transfers are cut."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from multigpu_cli.checkpoint.manifest import BEST, MANIFEST, sign_manifest
from multigpu_cli.mirror.remote import Mirror, MirrorError

_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


@contextmanager
def s3_server() -> Iterator[str]:
    """An S3 server on loopback, to which the environment points; yields the name of a bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    before = {name: os.environ.get(name) for name in _VARIABLES}
    host, port = server.get_host_and_port()
    os.environ |= dict(zip(_VARIABLES, (f"http://{host}:{port}", "key", "secret", "us-east-1"), strict=True))
    try:
        boto3.client("s3").create_bucket(Bucket="runs")
        yield "runs"
    finally:
        server.stop()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def write_checkpoint(run: Path, step: int, content: bytes = b"state" * 1000) -> Path:
    """A checkpoint as the store writes them, with any content."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.pt").write_bytes(content)
    (folder / BEST).write_bytes(best := f"best of {step}".encode())
    files = {"state.pt": {"size": len(content), "sha256": sha256(content).hexdigest()}}
    facts: dict[str, Any] = {"step": step, "files": files, "best": {"file": BEST, "sha256": sha256(best).hexdigest()}}
    (folder / MANIFEST).write_bytes(sign_manifest(facts))
    return folder


class CutMirror(Mirror):
    """A mirror on disk that breaks off at the write or removal number `after`; of a large file, half is written.

    Attributes:
        sent: the files of checkpoints that were sent.
    """

    def __init__(self, url: str, after: int = 10**6) -> None:
        super().__init__(url)
        self._left = after
        self.sent: list[str] = []
        remove = self._system.rm_file
        self._system.rm_file = lambda name: (self._count(), remove(name))

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise MirrorError("cut")

    def _write(self, content: bytes, *names: str) -> None:
        self._count()
        super()._write(content, *names)

    def _send(self, file: Path, moved: Callable[[], None], *names: str) -> None:
        self.sent.append(names[-1])
        super()._send(file, moved, *names)
        try:
            self._count()
        except MirrorError:
            Path(self._path(*names)).write_bytes(b"half")
            raise


def read_mirrored_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a mirror on disk, by their manifests."""
    return sorted(json.loads(file.read_text())["step"] for file in folder.glob(f"checkpoints/*/{MANIFEST}"))
