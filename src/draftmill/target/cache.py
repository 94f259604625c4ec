"""Hidden states kept on disk across epochs and runs: a bin holds the same tokens in every epoch, so its states stay
right, and with all bins kept no target needs to be loaded.

    folder/cache.json                  what makes the states what they are (CacheIdentity)
    folder/bin-00000012.safetensors    features [tokens, K·H] of bin 12, without its padding
    folder/shared.safetensors          embedding and head [V, H] of the target
    folder/cache.lock                  held while a process opens the cache

Several processes may use one folder at the same time. They need not talk: which bins are kept follows from the limit
alone, and a file is there as a whole or not at all.

Legend: T tokens of a batch, K taps, H hidden size, V rows of the embedding; GB = 10^9 bytes.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from draftmill.errors import UserError
from draftmill.target.cache_files import (
    BIN_FILE,
    SHARED_FILE,
    CacheIdentity,
    DamagedFileError,
    Label,
    claim,
    is_whole,
    locked,
    read_identity,
    read_tensors,
    refuse_foreign,
    remove_stale,
    target_files,
    write_tensors,
)

__all__ = ["CacheIdentity", "StateCache", "open_cache", "read_identity", "target_files"]


class StateCache:
    """The bins' states on disk. Made by `open_cache`.

    kept_bins   bins 0 … kept_bins−1 are written; those beyond are read where an earlier, larger limit left them
    hits        loads by this process that were answered
    misses      loads that were not
    bytes       of states that this process has read from the disk or written to it
    """

    def __init__(
        self,
        folder: Path,
        identity: CacheIdentity,
        *,
        slot_bytes: int,
        bins: int,
        limit_bytes: int | None,
        warn: Callable[[str], None],
    ) -> None:
        self.folder, self.identity, self.slot_bytes, self.bins = folder, identity, slot_bytes, bins
        self.limit_bytes = limit_bytes
        self.kept_bins = bins if limit_bytes is None else min(bins, limit_bytes // slot_bytes)
        self.hits = self.misses = self.bytes = 0
        self._warn, self._disk_full = warn, False
        self._digest, self._dtype = identity.digest, getattr(torch, identity.dtype)
        self._width = len(identity.taps) * identity.hidden_size
        self._refused: set[Path] = set()

    def load(self, bin: int, features: Tensor) -> bool:
        """Copy the bin's states into features [T, K·H] of the identity's dtype, on any device; zero behind them.

        False, with features untouched, when they are absent or damaged. A damaged file is named to `warn` and
        removed.
        """
        self._demand(features, self._width)
        tensors = self._read(self._path(bin), self._label(bin), max_rows=len(features))
        if tensors is None:
            self.misses += 1
            return False
        states = tensors["features"]
        features[: len(states)].copy_(states)
        features[len(states) :].zero_()
        self.hits += 1
        self.bytes += states.nbytes
        return True

    def keep(self, bin: int, features: Tensor) -> None:
        """Write the states of a bin's real tokens: features [tokens, K·H] of the identity's dtype, on any device.

        Returns when they are on the disk. Nothing is done for a bin beyond the limit or already there. When the disk
        takes no more, `warn` is told once, and no further bin is written.
        """
        self._demand(features, self._width)
        if bin < self.kept_bins and self._write(self._path(bin), self._label(bin), {"features": features}):
            self.bytes += features.nbytes

    def complete(self, bins: Iterable[int]) -> bool:
        """Whether all these bins are there, by header and size (about 50 µs a bin). Their bytes are checked by `load`,
        so a flipped bit shows only there."""
        return all(is_whole(self._path(bin), self._label(bin)) for bin in bins)

    def keep_shared(self, embedding: Tensor, head: Tensor) -> None:
        """Write the target's embedding and head, both [V, H] of the identity's dtype; once where they are one matrix.

        They are not counted to the limit.
        """
        for matrix in (embedding, head):
            self._demand(matrix, self.identity.hidden_size)
        tied = embedding.data_ptr() == head.data_ptr()
        matrices = {"embedding": embedding} if tied else {"embedding": embedding, "head": head}
        self._write(self.folder / SHARED_FILE, self._shared_label, matrices)

    def load_shared(self) -> tuple[Tensor, Tensor] | None:
        """(embedding, head) on the CPU, the same tensor twice where the target ties them: a map of the file, read when
        it is used. None when they are absent or damaged, as in `load`."""
        matrices = self._read(self.folder / SHARED_FILE, self._shared_label)
        if matrices is None:
            return None
        return matrices["embedding"], matrices.get("head", matrices["embedding"])

    def describe(self) -> str:
        """One line for the start of a run."""
        present = self._present()
        inside = sum(bin < self.kept_bins for bin in present)
        limit = "no limit" if self.limit_bytes is None else f"limit {self.limit_bytes / 1e9:g} GB"
        beyond = f" and {len(present) - inside} of an earlier, larger limit" if len(present) > inside else ""
        return f"cache: {self.kept_bins} of {self.bins} bins kept ({limit}), {inside} present{beyond}"

    def check_space(self) -> None:
        """Raise UserError when the disk has no room for the bins that are still to be written."""
        present = self._present()
        missing = sum(bin not in present for bin in range(self.kept_bins))
        free = shutil.disk_usage(self.folder).free
        if missing * self.slot_bytes <= free:
            return
        fitting = self._fitting(present, free)
        fitting_gb = math.floor(fitting * self.slot_bytes / 1e6) / 1e3
        remedy = f"Set cache_gb={fitting_gb:.3f} or less, or" if fitting else "Not one bin fits:"
        raise UserError(
            f"hidden-state cache {self.folder}: the {missing} bins still to be kept need "
            f"{missing * self.slot_bytes / 1e9:.3f} GB, but {free / 1e9:.3f} GB are free, so the disk would be full "
            f"before all are kept. {remedy} free space or choose a folder on another disk"
        )

    def _fitting(self, present: dict[int, Path], free: int) -> int:
        """How many bins from 0 on could be kept."""
        room = free // self.slot_bytes
        for bin in range(self.kept_bins):
            room -= bin not in present
            if room < 0:
                return bin
        return self.kept_bins

    def _present(self) -> dict[int, Path]:
        found = ((BIN_FILE.fullmatch(path.name), path) for path in self.folder.iterdir())
        return {int(match[1]): path for match, path in found if match}

    def _path(self, bin: int) -> Path:
        return self.folder / f"bin-{bin:08d}.safetensors"

    def _label(self, bin: int) -> Label:
        return Label(self._digest, f"bin {bin}", ("features",), self._dtype, self._width)

    @property
    def _shared_label(self) -> Label:
        return Label(self._digest, "shared matrices", ("embedding", "head"), self._dtype, self.identity.hidden_size)

    def _demand(self, tensor: Tensor, width: int) -> None:
        if tensor.dtype != self._dtype or tensor.ndim != 2 or tensor.shape[1] != width or not len(tensor):
            got = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"the cache holds {self._dtype} [1 or more, {width}], but was given {got}")

    def _read(self, path: Path, label: Label, max_rows: int | None = None) -> dict[str, Tensor] | None:
        try:
            tensors = read_tensors(path, label)
            rows = len(tensors[label.names[0]])
            if max_rows is not None and rows > max_rows:
                raise DamagedFileError(f"it holds {rows} tokens, more than the {max_rows} of a batch")
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            self._refuse(path, f"{error}); it {_remove(path)}, and")
            return None
        except OSError as error:  # the disk's trouble, not the file's
            self._refuse(path, f"{error.strerror or error}); it is left there, but")
            return None
        return tensors

    def _refuse(self, path: Path, reason: str) -> None:
        if path not in self._refused:
            self._refused.add(path)
            self._warn(f"hidden-state cache: {path} cannot be used ({reason} its states must be computed anew")

    def _write(self, path: Path, label: Label, tensors: dict[str, Tensor]) -> bool:
        """Whether the file has been written by this call."""
        if self._disk_full or path.exists():  # another process may have been first
            return False
        try:
            write_tensors(path, label, tensors)
        except OSError as error:
            self._disk_full = True
            self._warn(
                f"hidden-state cache: {path} could not be written ({error.strerror}); this process keeps no further "
                "states, so later epochs run the target for the bins that are missing"
            )
            return False
        return True


def _remove(path: Path) -> str:
    """What became of the file, for the warning that names it."""
    try:
        path.unlink(missing_ok=True)  # another process may have been first
    except OSError as error:  # such as a disk that went read-only: training goes on
        return f"cannot be removed ({error.strerror})"
    return "is removed"


def open_cache(
    folder: Path,
    identity: CacheIdentity,
    *,
    slot_bytes: int,
    bins: int,
    limit_bytes: int | None,
    warn: Callable[[str], None],
) -> StateCache:
    """The cache in this folder, made where there is none. Any number of processes may call this at the same time.

    slot_bytes: of a full batch's features, T·K·H·itemsize; bins: batches of an epoch; limit_bytes: for all bins
    together (None: no limit; file headers of 0.3 kB a bin are not counted); warn: takes one line. Raises UserError
    when the folder holds states of another identity or anything else, cannot be written, or its disk has no room.
    """
    try:
        refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            claim(folder, identity)
            remove_stale(folder)
        cache = StateCache(folder, identity, slot_bytes=slot_bytes, bins=bins, limit_bytes=limit_bytes, warn=warn)
    except OSError as error:
        raise UserError(
            f"hidden-state cache {folder}: the folder cannot be used ({error.strerror}), so nothing would be kept; "
            "choose a folder that this user may write"
        ) from error
    if not cache.kept_bins:
        warn(f"hidden-state cache {folder}: the limit is below the {slot_bytes / 1e9:.3f} GB of a bin; none is kept")
    cache.check_space()
    return cache
