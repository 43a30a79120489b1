"""A copy of a run's checkpoints in a remote folder, through fsspec; only what was read back and verified counts.

A checkpoint there is its manifest, which is written last and removed first, with the files that it lists. This file
loads no torch: a process beside the training uses it.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from multigpu_cli.checkpoint.files import PIECE, Moved, compute_sha256, flush_folder, publish, publish_stream
from multigpu_cli.checkpoint.manifest import BEST, MANIFEST, find_damage, parse_step
from multigpu_cli.config.regular_files import NotRegularFile, open_regular, read_small
from multigpu_cli.config.yaml_text import drop_private
from multigpu_cli.errors import TrainingError
from multigpu_cli.faults.explain import hide_secrets
from multigpu_cli.mirror.rules import make_absolute
from multigpu_cli.monitor.journal import check_fields

SMALL_FILES = ("config.yaml", "journal.jsonl", "summary.json")
"""Files of a run folder that are mirrored beside its checkpoints."""

FINAL_FILES = ("best.pt", "last.pt")  # weights for use, which are mirrored once the run has ended
OWNER = "run.json"  # which run the remote folder belongs to
_S3_LIMITS = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}  # seconds, and tries


class MirrorError(TrainingError):
    """The remote folder can't be read or written, or does not hold what it should."""


class DamagedMirror(MirrorError):
    """A checkpoint there is not what its manifest says."""


class Mirror:
    """The remote folder of one run: s3://…, gs://… or file:…, checked by rules.py; drivers find credentials themselves.

    MirrorError: the driver can't begin, for instance for want of credentials.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # late: only runs with a mirror load it

        self.url = url = make_absolute(url)
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs with tracebacks what it raises as well
        options: dict[str, Any] = {"config_kwargs": _S3_LIMITS} if url.startswith("s3:") else {}
        with self._errors("opening"):
            self._system, root = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        if url.startswith("s3:"):
            self._system.retries = 1  # the driver's own, beside those of _S3_LIMITS; the follower tries again
        self._root, self._on_disk = root.rstrip("/"), url.startswith("file:")

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Turn what a driver raises, whatever its classes, into one error that names the URL.

        Raises DamagedMirror if a file of a mirror on disk is a link or a FIFO.
        """
        try:
            yield
        except MirrorError:
            raise
        except NotRegularFile as error:
            raise DamagedMirror(f"mirror {self.url}: {doing} failed ({error})") from error
        except Exception as error:  # each driver has errors of its own, not all of them an OSError
            text = hide_secrets(f"{type(error).__name__}: {error}")[:300]
            raise MirrorError(f"mirror {self.url}: {doing} failed ({text})") from error

    def _path(self, *names: str) -> str:
        return "/".join([self._root, *names])

    def read_owner(self) -> str:
        """Return the id of the run that this folder belongs to; "" if it does not belong to a run."""
        content = self._read(OWNER)
        with self._errors(f"reading {OWNER}"):
            return "" if content is None else str(json.loads(content)["id"])

    def write_owner(self, run_id: str) -> None:
        """Claim the folder for a run, which also shows that it can be written to."""
        self._write(json.dumps({"id": run_id}).encode(), OWNER)

    def list_steps(self) -> list[int]:
        """The steps of the complete checkpoints, newest first."""
        with self._errors("listing"):
            found = map(Path, self._system.find(self._path("checkpoints")))  # a pattern would expand the URL's [] too
            steps = [parse_step(path.parent) for path in found if path.name == MANIFEST]
        return sorted((step for step in steps if step >= 0), reverse=True)

    def upload_checkpoint(self, folder: Path, moved: Moved) -> None:
        """Copy a checkpoint file by file, each one read back and compared, the manifest last.

        What an interrupted upload has left complete is not sent again. The files stay open, so that the run may remove
        the checkpoint meanwhile, as it does with old ones: on a slow network each would be gone before it has arrived.
        MirrorError: the remote folder refused it, or gave back other content. OSError: the checkpoint was removed
        before. NotRegularFile: a link or a FIFO was planted in it; what a link leads to is never sent.
        """
        with ExitStack() as stack:

            def hold(name: str) -> Path:
                return Path(f"/dev/fd/{stack.enter_context(open_regular(folder / name)).fileno()}")

            content = read_small(folder / MANIFEST)
            manifest = json.loads(content)
            sums = {name: str(entry["sha256"]) for name, entry in manifest["files"].items()}
            if "best" in manifest and (folder / BEST).exists():
                sums[BEST] = str(manifest["best"]["sha256"])
            held = {name: hold(name) for name in sums}
            there = ("checkpoints", folder.name)
            if self._sum(*there, MANIFEST, moved=moved) != sha256(content).hexdigest():
                self._remove_file(*there, MANIFEST)  # of the same step of an earlier attempt
            for name, wanted in sums.items():
                self._upload(held[name], wanted, moved, *there, name)
        self._write(content, *there, MANIFEST)

    def upload_file(self, file: Path, moved: Moved) -> None:
        """Copy a file of the run folder; if it is missing, remove the copy: a run that continues has no summary.

        Raises NotRegularFile if the file is a link or a FIFO.
        """
        try:
            with open_regular(file) as held:
                copied = Path(f"/dev/fd/{held.fileno()}")
                if file.name in FINAL_FILES:
                    self._upload(copied, compute_sha256(copied, moved), moved, file.name)
                else:
                    self._write(drop_private(held.read()), file.name)  # JSON has no lines that begin like settings
        except FileNotFoundError:
            self._remove_file(file.name)

    def read_manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a checkpoint, not verified; DamagedMirror if it is none."""
        name = f"step_{step:08d}"
        try:
            manifest: dict[str, Any] = json.loads(self._read("checkpoints", name, MANIFEST) or b"")
            check_fields(manifest, MANIFEST)
        except (ValueError, RecursionError) as error:
            raise DamagedMirror(f"mirror {self.url}: {name} is damaged: {MANIFEST} can't be read") from error
        return manifest

    def measure_checkpoint(self, step: int) -> int:
        """The bytes of a checkpoint there."""
        return sum(self._list_files(step).values())

    def download_checkpoint(self, step: int, run: Path, moved: Moved = lambda: None) -> None:
        """Copy a checkpoint into a run folder, verified, and the run's other files before it gets its name there.

        DamagedMirror: it is damaged there. MirrorError: it could not be read. OSError: the local disk refused it.
        """
        name = f"step_{step:08d}"
        draft, final = run / "checkpoints" / f".draft_mirror_{name}", run / "checkpoints" / name
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            for file, size in self._list_files(step).items():
                self._download_file(draft / file, moved, "checkpoints", name, file, size=size)
            if damage := find_damage(draft, moved):
                raise DamagedMirror(f"mirror {self.url}: {name} is damaged: {damage}")
            for file in (*SMALL_FILES, *FINAL_FILES):
                if not (run / file).exists():
                    self._download_file(run / file, moved, file)
            if final.exists():  # and damaged, or it would not be wanted
                shutil.rmtree(final)
            draft.rename(final)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            with suppress(OSError):  # they hold something
                draft.parent.rmdir()
                run.rmdir()
            raise
        flush_folder(final.parent)

    def _list_files(self, step: int) -> dict[str, int]:
        """The files of a checkpoint, and their bytes."""
        name = f"step_{step:08d}"
        with self._errors(f"listing {name}"):
            found = self._system.find(self._path("checkpoints", name), detail=True)
            files = {Path(path).name: int(facts["size"]) for path, facts in found.items()}
        return {file: size for file, size in files.items() if not file.endswith(".draft")}  # of an upload that was cut

    def _download_file(self, target: Path, moved: Moved, *names: str, size: int = 0) -> None:
        """Copy a file of any size, if the mirror has it."""
        if (file := self._open(*names)) is not None:
            with file:
                pieces = self._iterate_pieces(file, names[-1])
                publish_stream(target, lambda copy: [copy.write(piece) for piece in pieces], size, moved)

    def discard(self, unwanted: Callable[[int], bool]) -> None:
        """Remove checkpoints by their step, each one's manifest first."""
        for step in filter(unwanted, self.list_steps()):
            name = f"step_{step:08d}"
            self._remove_file("checkpoints", name, MANIFEST)
            with self._errors(f"removing {name}"):
                for path in self._system.find(self._path("checkpoints", name)):
                    self._system.rm_file(path)
                if self._on_disk:
                    self._system.rm(self._path("checkpoints", name), recursive=True)

    def _read(self, *names: str) -> bytes | None:
        if (file := self._open(*names)) is None:
            return None
        with file:
            return b"".join(self._iterate_pieces(file, names[-1]))

    def _write(self, content: bytes, *names: str) -> None:
        with self._errors(f"writing {names[-1]}"):
            self._make_folder(*names[:-1])
            if self._on_disk:
                publish(Path(self._path(*names)), content)
            else:
                self._system.pipe_file(self._path(*names), content)
        if self._read(*names) != content:
            raise MirrorError(f"mirror {self.url}: {names[-1]} came back with other content")

    def _upload(self, file: Path, wanted: str, moved: Moved, *names: str) -> None:
        """Send a file of SHA-256 sum `wanted`, unless the mirror holds it already, and check it by reading it back."""
        moved()
        if self._sum(*names, moved=moved) != wanted:
            self._send(file, moved, *names)
            if self._sum(*names, moved=moved) != wanted:
                raise MirrorError(f"mirror {self.url}: {'/'.join(names[-2:])} came back with other content")

    def _send(self, file: Path, moved: Moved, *names: str) -> None:
        from fsspec.callbacks import Callback

        with self._errors(f"writing {names[-1]}"), open(file, "rb") as content:
            self._make_folder(*names[:-1])
            if self._on_disk:  # where a file appears before its content; an object store shows whole ones only
                size = os.fstat(content.fileno()).st_size
                target = Path(self._path(*names))
                publish_stream(target, lambda copy: shutil.copyfileobj(content, copy, PIECE), size, moved)
            else:
                sent = Callback(hooks={"moved": lambda *_, **__: moved()})
                self._system.put_file(str(file), self._path(*names), callback=sent)

    def _make_folder(self, *names: str) -> None:
        if self._on_disk:  # object stores have no folders, and s3fs would ask for a bucket
            self._system.makedirs(self._path(*names), exist_ok=True)

    def _sum(self, *names: str, moved: Moved) -> str | None:
        """SHA-256 of a remote file, read in chunks; None if it is missing, or a link or a FIFO to be replaced."""
        try:
            file = self._open(*names)
        except DamagedMirror:
            return None
        if file is None:
            return None
        digest = sha256()
        with file:
            for piece in self._iterate_pieces(file, names[-1]):
                digest.update(piece)
                moved()
        return digest.hexdigest()

    def _open(self, *names: str) -> Any:  # the file of a driver, or None
        """Open a remote file for reading; None if it is missing.

        Raises DamagedMirror if the mirror is on disk and the file is a link or a FIFO.
        """
        path = self._path(*names)
        with self._errors(f"reading {names[-1]}"), suppress(FileNotFoundError):
            if self._on_disk:
                return open_regular(Path(path))
            return self._system.open(path, "rb", block_size=PIECE, cache_type="readahead")
        return None

    def _iterate_pieces(self, file: Any, name: str) -> Iterator[bytes]:
        with self._errors(f"reading {name}"):
            while piece := file.read(PIECE):
                yield piece

    def _remove_file(self, *names: str) -> None:
        with self._errors(f"removing {names[-1]}"), suppress(FileNotFoundError):
            self._system.rm_file(self._path(*names))
