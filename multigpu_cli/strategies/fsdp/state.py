"""A state whose weights are divided over the processes: its whole form, as of any other strategy, and its checkpoints.

Both ways go tensor by tensor, so that no process holds more than one whole tensor on its device. To one checkpoint each
rank writes its own rows, and rank 0 publishes it once all files are complete. The ranks' writer threads tell each other
by the launcher's store: a collective there would get between those of the training.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from multigpu_cli.checkpoint.files import check_owner, read_owner
from multigpu_cli.checkpoint.manifest import find_damaged_piece
from multigpu_cli.checkpoint.pieces import Pieces, Rows, fill_outlines, write_piece
from multigpu_cli.checkpoint.snapshot import Snapshot, TrainState, Writer
from multigpu_cli.checkpoint.store import Peers, Store
from multigpu_cli.checkpoint.weights import copy_to_host
from multigpu_cli.distributed.world import World, all_reduce_max, broadcast_object
from multigpu_cli.errors import TrainingError
from multigpu_cli.faults.rank_exits import RankExits
from multigpu_cli.runtime.module_state import TensorPath, broadcast_outline, broadcast_tensor, map_tensors, name_tensor
from multigpu_cli.strategies.base import ReadRows, Saver, Strategy


class ShardedState:
    """Gathers and scatters the states of a model, its optimizer and its average.

    `parameters` are the model's, by every name that they have; `mesh` is of the workers that share the rows, and
    perhaps, before that, of their replicas.
    """

    def __init__(self, world: World, parameters: Mapping[str, DTensor], mesh: DeviceMesh) -> None:
        self._world, self._parameters = world, parameters
        self._shard, self._num_shards = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self.replicas = world.size // self._num_shards  # workers that hold the same rows
        self._is_first = mesh.ndim == 1 or mesh.get_local_rank(0) == 0  # of the workers that hold the same rows
        self.moved: Mapping[int, DTensor] = {}  # those of the optimizer, by their number in its state

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """Whole tensors in host memory, on rank 0; {} on the others."""
        whole: dict[str, Any] = map_tensors(state, self._gather)
        return whole if self._world.is_main else {}

    def scatter(self, state: dict[str, Any] | None, source: int) -> dict[str, Any]:
        """This rank's part of the source's state: DTensors of model and average, and plain rows of the optimizer."""
        outline = broadcast_outline(self._world, state, source)
        return dict(map_tensors(outline, lambda path, tensor: self._receive(path, tensor, state, source)))

    def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Tensor, int]]]:
        """See `Strategy.sharded_state_dict`."""
        own: dict[str, tuple[Tensor, int]] = {}

        def outline(path: TensorPath, value: Tensor) -> Tensor:
            like = self._find_parameter(path, value)
            if like is None:
                return value
            rows = value.to_local() if isinstance(value, DTensor) else value
            self._check_rows(path, rows, like)
            if self._is_first:
                own[name_tensor(path)] = rows.detach(), self._find_rows(like)[0]
            return torch.empty(like.shape, dtype=value.dtype, device="meta")

        return map_tensors(state, outline), own

    def read(self, outline: dict[str, Any], read: ReadRows) -> dict[str, Any]:
        """See `Strategy.load_sharded`."""

        def fill(path: TensorPath, value: Tensor) -> Tensor:
            if not value.is_meta:
                return value
            like = self._find_parameter(path, value)
            if like is None or like.shape != value.shape:  # of another model: whoever loads it says so
                return read(name_tensor(path), value)
            rows = read(name_tensor(path), value, *self._find_rows(like)).to(self._world.device)
            return rows if path[0] == "optimizer" else _as_dtensor(rows, like)

        return dict(map_tensors(outline, fill))

    def _find_rows(self, whole: Tensor) -> tuple[int, int]:
        """The first of this rank's rows, and the one after its last, as `fully_shard` divides them."""
        length = -(-whole.shape[0] // self._num_shards)
        begin = min(length * self._shard, whole.shape[0])
        return begin, min(begin + length, whole.shape[0])

    def _check_rows(self, path: TensorPath, rows: Tensor, like: Tensor) -> None:
        """Raise a TrainingError if a tensor is not of the shape of this rank's rows: they could never be read again."""
        begin, end = self._find_rows(like)
        if tuple(rows.shape) != (shape := (end - begin, *like.shape[1:])):
            raise TrainingError(
                f"--multi-gpu fsdp: {name_tensor(path)} has shape {tuple(rows.shape)}, and this rank's rows of its "
                f"weight have {shape}: a checkpoint can't divide it",
                remedy="use an optimizer whose state has the shape of its weights, such as AdamW, or --multi-gpu ddp",
            )

    def _gather(self, path: TensorPath, value: Tensor) -> Tensor | None:
        like = self._find_parameter(path, value)
        if like is not None and not isinstance(value, DTensor):
            self._check_rows(path, value, like)
            value = _as_dtensor(value, like)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.detach().to("cpu", copy=True) if self._world.is_main else None

    def _receive(self, path: TensorPath, outline: Tensor, state: dict[str, Any] | None, source: int) -> Tensor:
        whole = broadcast_tensor(self._world, outline, state, path, source)
        like = self._find_parameter(path, whole)
        if like is None or like.shape != whole.shape:  # of another model: whoever loads it says so
            return whole.cpu()
        begin, end = self._find_rows(whole)
        rows = whole[begin:end].clone(memory_format=torch.contiguous_format)  # fused kernels ignore strides
        return rows if path[0] == "optimizer" else _as_dtensor(rows, like)

    def _find_parameter(self, path: TensorPath, value: Tensor) -> DTensor | None:
        """The parameter that a tensor is divided like; None for one that every rank has whole, such as a buffer."""
        if path[0] == "optimizer":
            return self.moved.get(path[2]) if path[1] == "state" and value.ndim else None
        if path[0] in ("model", "average"):
            return self._parameters.get(str(path[1]).removeprefix("module." if path[0] == "average" else ""))
        return None


def _as_dtensor(rows: Tensor, like: DTensor) -> DTensor:
    """Rows of this rank as a part of a tensor of the parameter's shape."""
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


_GRACE = 5.0  # seconds for writers to come to an end once a rank has ended, or the store does not answer
_POLL = 0.05  # seconds
_ROWS = "rows"  # where a snapshot has the rows that this rank writes


def agree_on_owner(world: World, folder: Path) -> str:
    """What the lock of the run folder says, if all ranks see the same folder; "" if not all do."""
    owner = str(broadcast_object(world, read_owner(folder)))
    return "" if all_reduce_max(world, [float(read_owner(folder) != owner)])[0] else owner


class GatheringSaver(Saver):
    """Rank 0 gathers the whole state, and writes it."""

    def capture(self, state: TrainState, held: dict[str, Any], step: int) -> Snapshot | None:
        whole = self._strategy.gather_state(held)
        return Snapshot(whole) if self._world.is_main else None

    def capture_best(self, weights: dict[str, Any]) -> dict[str, Any]:
        return dict(self._strategy.gather_state({"model": weights}).get("model", {}))


class RowSaver(Saver):
    """Each rank writes its rows, and rank 0 the rest; see `ShardedSave`."""

    def __init__(self, strategy: Strategy, world: World, store: Store, writer: Writer, owner: str) -> None:
        super().__init__(strategy, world, store, writer)
        self._owner, self._numbers = owner, count()
        self._best: dict[str, Any] = {}  # on rank 0, until best.pt is written
        self._best_rows: dict[str, Rows] = {}

    def wait(self) -> None:
        """By a collective, which fails if a rank is gone."""
        if not self._world.is_main:
            self._writer.wait()  # rank 0 was told of an error
        all_reduce_max(self._world, [0.0])

    def capture_best(self, weights: dict[str, Any]) -> dict[str, Any]:
        self._best_rows = {}  # earlier ones give their memory
        outline, rows = self._strategy.sharded_state_dict({"model": weights})
        self._best_rows = {name: Rows(copy_to_host(tensor), begin) for name, (tensor, begin) in rows.items()}
        self._best = super().capture_best(outline["model"])
        return self._best

    def capture(self, state: TrainState, held: dict[str, Any], step: int) -> Snapshot | None:
        if not all_reduce_max(self._world, [float(bool(self._best))])[0]:  # rank 0 has written them
            self._best_rows = {}
        outline, rows = self._strategy.sharded_state_dict(held)
        rest = outline if self._world.is_main else {"model": {}}
        snapshot = self._capture(state, rest | {_ROWS: {name: tensor for name, (tensor, _) in rows.items()}})
        copied = {name: Rows(tensor, rows[name][1]) for name, tensor in snapshot.state[_ROWS].items()}
        save = ShardedSave(self._world, self._store, self._owner, step, copied, next(self._numbers))
        save.best = self._best_rows
        if self._world.is_main:
            return replace(snapshot, state={name: snapshot.state[name] for name in rest}, peers=save)
        self._writer.submit(snapshot.finish, save.take_part)
        return None

    def share_best(self, step: int) -> Peers | None:
        save = ShardedSave(self._world, self._store, self._owner, step, {}, next(self._numbers))
        save.best = self._best_rows
        if self._world.is_main:
            return save
        self._writer.add(save.take_part)
        return None


class ShardedSave:
    """What this rank does for one checkpoint, in its writer thread.

    The owner is what the lock of the run folder says. The rows are those that this rank writes, by tensor; complete
    once the state has been staged. The number is of the save in this run, since a step may be saved more than once.
    `best` are this rank's rows of the best weights, if best.pt does not have them yet.
    """

    best: Mapping[str, Rows] = {}

    def __init__(
        self, world: World, store: Store, owner: str, step: int, rows: Mapping[str, Rows], number: int
    ) -> None:
        self._world, self._store, self._owner, self._step, self._rows = world, store, owner, step, rows
        self._number, self._exits = number, RankExits(world)

    def take_part(self) -> None:
        """Ranks other than 0: write the rows, or tell rank 0 why not, and check a share of what will go."""
        written: dict[str, Any] = {"error": "its writer failed"}
        try:
            check_owner(self._store.folder.parent, self._owner)
            best = self._write_best()
            files = self._write(self._store.open_draft(self._step), "rank", self._rows) if self._rows else {}
            written = {"best": best, "files": files}
        except OSError as error:
            written = {"error": str(error)}
            raise
        finally:
            self._tell("written", written)
        self._tell("checked", self._find_damaged_share())

    def add_pieces(self, draft: Path) -> dict[str, dict[str, Any]]:
        """Rank 0: see `Peers`; an OSError where a rank could not write its rows."""
        listed = self._write(draft, "rank", self._rows)
        for written in self._wait_for("written").values():
            listed |= written["files"]
        for name, file in listed.items():
            if (draft / name).stat().st_size != file["size"]:  # raises where another machine's disk has it
                raise OSError(f"{name} is not as large as its rank says")
        return listed

    def complete_best(self, outline: dict[str, Any]) -> dict[str, Any]:
        """Rank 0: see `Peers`; by files in the draft, because a collective would hold up the training."""
        names = [*self._write_best()]
        names += [name for written in self._wait_for("written").values() for name in written["best"]]
        pieces = Pieces(self._store.open_draft(self._step, "best"), names)
        complete = fill_outlines({"model": outline}, pieces.read)
        self._store.discard_draft(self._step, "best")
        return dict(complete["model"])

    def find_damaged_pieces(self) -> dict[str, str] | None:
        """Rank 0: see `Peers`."""
        found = self._find_damaged_share()
        try:
            others = self._wait_for("checked")
        except OSError:
            return None
        return found | {folder: damage for share in others.values() for folder, damage in share.items()}

    def abandon(self) -> None:
        """Rank 0: see `Peers`."""
        with suppress(OSError):
            self._wait_for("written")
        self._store.discard_draft(self._step)
        self._store.discard_draft(self._step, "best")

    def _write_best(self) -> dict[str, dict[str, Any]]:
        """Write this rank's rows of the best weights; the folder is not the step's, which becomes a checkpoint."""
        return self._write(self._store.open_draft(self._step, "best"), "best", self.best) if self.best else {}

    def _write(self, draft: Path, kind: str, rows: Mapping[str, Rows]) -> dict[str, dict[str, Any]]:
        """The file that this rank adds, with its size and sum; a replica of another rank's rows adds none."""
        name = f"{kind}_{self._world.rank}.safetensors"
        return {name: write_piece(draft / name, rows, self._store.moved)} if rows else {}

    def _find_damaged_share(self) -> dict[str, str]:
        """Damage of this rank's share of the pieces of old checkpoints, by the folder's name."""
        found: dict[str, str] = {}
        for folder in self._store.list_old(self._step):
            with suppress(OSError, ValueError):  # an unreadable manifest is rank 0's to find
                share = find_damaged_piece(folder, self._world.rank, self._world.size, moved=self._store.moved)
                found |= {folder.name: share} if share else {}
        return found

    def _tell(self, what: str, value: dict[str, Any]) -> None:
        if self._exits.store is not None:
            with suppress(RuntimeError):  # without the store rank 0 gives up by itself
                self._exits.store.set(self._name(what, self._world.rank), json.dumps(value))
                # rank 0 may still be reading those of the save before, but not of the one before that
                self._exits.store.delete(self._name(what, self._world.rank, self._number - 2))

    def _wait_for(self, what: str) -> dict[int, dict[str, Any]]:
        """Return the replies of the other ranks; wait as long as all of them are alive, because a disk may be slow.

        OSError: one of them could not write, or has ended.
        """
        names = {rank: self._name(what, rank) for rank in range(1, self._world.size)}
        store, alive = self._exits.store, time.monotonic()
        while store is not None and time.monotonic() - alive < _GRACE:
            with suppress(RuntimeError):
                if store.check([*names.values()]):
                    told = {rank: json.loads(store.get(name)) for rank, name in names.items()}
                    if errors := [f"rank {rank}: {reply['error']}" for rank, reply in told.items() if "error" in reply]:
                        raise OSError(errors[0])
                    return told
                if not self._exits.has_exits():
                    alive = time.monotonic()
            time.sleep(_POLL)
        raise OSError("a rank has ended before its rows were written")

    def _name(self, what: str, rank: int, number: int | None = None) -> str:
        return f"checkpoint-{self._number if number is None else number}-{what}-{rank}"
