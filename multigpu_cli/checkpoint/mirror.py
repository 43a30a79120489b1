"""A copy of a run's checkpoints in a remote folder, through fsspec; only what was read back and verified counts.

A checkpoint there is its manifest, which is written last and removed first, with the files that it lists. This file
loads no torch: a process beside the training uses it.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from multigpu_cli.checkpoint.files import PIECE, flush_folder, publish
from multigpu_cli.checkpoint.manifest import BEST, MANIFEST, find_damage, parse_step, read_manifest
from multigpu_cli.config.mirror_url import make_absolute
from multigpu_cli.errors import TrainingError

SMALL_FILES = ("config.yaml", "journal.jsonl", "summary.json")
"""Files of a run folder that are mirrored beside its checkpoints."""

FINAL_FILES = ("best.pt", "last.pt")
"""Weights for use, which are mirrored once the run has ended."""

OWNER = "run.json"  # which run the remote folder belongs to
_S3_LIMITS = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}  # seconds, and tries


class MirrorError(TrainingError):
    """The remote folder can't be read or written, or does not hold what it should."""


class Mirror:
    """The remote folder of one run.

    Args:
        url: s3://…, gs://… or file:…, checked by config/mirror_url.py; drivers find their credentials themselves.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # late: only runs with a mirror load it

        self.url = url = make_absolute(url)
        options: dict[str, Any] = {"config_kwargs": _S3_LIMITS} if url.startswith("s3:") else {}
        self._system, root = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        self._root, self._on_disk = root.rstrip("/"), url.startswith("file:")

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Turn what a driver raises, whatever its classes, into one error that names the URL."""
        try:
            yield
        except MirrorError:
            raise
        except Exception as error:  # each driver has errors of its own, not all of them an OSError
            name = type(error).__name__
            raise MirrorError(f"mirror {self.url}: {doing} failed ({name}: {str(error)[:300]})") from error

    def _path(self, *names: str) -> str:
        return "/".join([self._root, *names])

    def read_owner(self) -> str:
        """The id of the run that this folder belongs to; "" where it belongs to none."""
        content = self._read(OWNER)
        with self._errors(f"reading {OWNER}"):
            return "" if content is None else str(json.loads(content)["id"])

    def write_owner(self, run_id: str) -> None:
        """Claim the folder for a run, which also shows that it can be written to."""
        self._write(json.dumps({"id": run_id}).encode(), OWNER)

    def list_steps(self) -> list[int]:
        """The steps of the complete checkpoints, newest first."""
        with self._errors("listing"):
            home = self._path("checkpoints")
            if not self._system.exists(home):
                return []
            found = self._system.glob(f"{home}/step_*/{MANIFEST}")
        return sorted((parse_step(Path(path).parent) for path in found), reverse=True)

    def upload_checkpoint(self, folder: Path, moved: Callable[[], None]) -> None:
        """Copy a checkpoint file by file, each one read back and compared, the manifest last.

        What an interrupted upload has left complete is not sent again.

        Raises:
            MirrorError: the remote folder refused it, or gave back other content.
            OSError: the checkpoint was removed meanwhile, as old ones are.
        """
        manifest = read_manifest(folder)
        listed = {name: str(entry["sha256"]) for name, entry in manifest["files"].items()}
        if "best" in manifest:
            listed[BEST] = str(manifest["best"]["sha256"])
        sums = {name: wanted for name, wanted in listed.items() if name != BEST or (folder / BEST).exists()}
        content = (folder / MANIFEST).read_bytes()
        there = ("checkpoints", folder.name)
        if self._read(*there, MANIFEST) != content:
            self._remove_file(*there, MANIFEST)  # of the same step of an earlier attempt
        for name, wanted in sums.items():
            moved()
            if self._sum(*there, name, moved=moved) != wanted:
                self._send(folder / name, *there, name)
                if self._sum(*there, name, moved=moved) != wanted:
                    raise MirrorError(f"mirror {self.url}: {folder.name}/{name} came back with other content")
        self._write(content, *there, MANIFEST)

    def upload_file(self, file: Path) -> None:
        """Copy a file of the run folder; one that is not there is left out."""
        if file.exists():
            self._write(file.read_bytes(), file.name)

    def download_checkpoint(self, step: int, run: Path) -> None:
        """Copy a checkpoint into a run folder, verified before it gets its name there.

        Raises:
            MirrorError: it is damaged, or could not be read.
            OSError: the local disk refused it.
        """
        name = f"step_{step:08d}"
        draft, final = run / "checkpoints" / f".draft_mirror_{name}", run / "checkpoints" / name
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            with self._errors(f"reading {name}"):
                for path in self._system.find(self._path("checkpoints", name)):
                    self._system.get_file(path, str(draft / Path(path).name))
            if damage := find_damage(draft):
                raise MirrorError(f"mirror {self.url}: {name} is damaged: {damage}")
            draft.rename(final)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        flush_folder(final.parent)

    def download_file(self, name: str, run: Path) -> None:
        """Copy a file into a run folder, unless it is there or the mirror has none."""
        content = None if (run / name).exists() else self._read(name)
        if content is not None:
            publish(run / name, content)

    def discard(self, unwanted: Callable[[int], bool]) -> None:
        """Remove checkpoints by their step, each one's manifest first."""
        for step in filter(unwanted, self.list_steps()):
            name = f"step_{step:08d}"
            self._remove_file("checkpoints", name, MANIFEST)
            with self._errors(f"removing {name}"):
                self._system.rm(self._path("checkpoints", name), recursive=True)

    def _read(self, *names: str) -> bytes | None:
        with self._errors(f"reading {names[-1]}"):
            try:
                return bytes(self._system.cat_file(self._path(*names)))
            except FileNotFoundError:
                return None

    def _write(self, content: bytes, *names: str) -> None:
        with self._errors(f"writing {names[-1]}"):
            self._make_folder(*names[:-1])
            if self._on_disk:  # where a file appears before its content; an object store shows whole ones only
                publish(Path(self._path(*names)), content)
            else:
                self._system.pipe_file(self._path(*names), content)
        if self._read(*names) != content:
            raise MirrorError(f"mirror {self.url}: {names[-1]} came back with other content")

    def _send(self, file: Path, *names: str) -> None:
        with open(file, "rb"):
            pass  # a file that is gone is the run's doing, and no error of the mirror
        with self._errors(f"writing {names[-1]}"):
            self._make_folder(*names[:-1])
            self._system.put_file(str(file), self._path(*names))

    def _make_folder(self, *names: str) -> None:
        if self._on_disk:  # object stores have no folders, and s3fs would ask for a bucket
            self._system.makedirs(self._path(*names), exist_ok=True)

    def _sum(self, *names: str, moved: Callable[[], None]) -> str | None:
        """SHA-256 of a remote file, read in chunks; None where it is missing."""
        digest = sha256()
        with self._errors(f"reading {names[-1]} back"):
            try:
                with self._system.open(self._path(*names), "rb", block_size=PIECE, cache_type="readahead") as file:
                    while piece := file.read(PIECE):
                        digest.update(piece)
                        moved()
            except FileNotFoundError:
                return None
        return digest.hexdigest()

    def _remove_file(self, *names: str) -> None:
        with self._errors(f"removing {names[-1]}"):
            try:
                self._system.rm_file(self._path(*names))
            except FileNotFoundError:
                return
