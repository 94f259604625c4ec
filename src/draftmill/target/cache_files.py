"""The folder of the hidden-state cache and its files. Whose states it holds is in cache.json; a tensor file is complete
or absent, and is checked against what it should be before any use.

Each tensor file is an ordinary safetensors file whose metadata say whose states they are (identity digest), what it
holds (which bin), how many rows, and the CRC-32 of the tensors' bytes. CRC-32 finds every single flipped bit and every
burst of up to 32, and runs at 4.2 GB/s on a core where blake2b runs at 0.95: reading stays bound by the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftmill.errors import UserError

FORMAT = 1
IDENTITY_FILE, LOCK_FILE, SHARED_FILE = "cache.json", "cache.lock", "shared.safetensors"
BIN_FILE = re.compile(r"bin-(\d{8,})\.safetensors")
_PARTIAL = re.compile(r"\.(cache\.json|shared\.safetensors|bin-\d{8,}\.safetensors)\..+-\d+\.partial")
_NFS_LEFTOVER = re.compile(r"\.nfs[0-9a-f]+")  # a removed file that a process on a network disk still has open
_WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_HOST = socket.gethostname()


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What makes the states what they are. Two runs with equal identities would compute the same states for each bin.

    target_fingerprint                   of the weights (`Target.fingerprint`)
    target_files                         of the target's files (`target_files`): known without loading weights
    dtype                                "bfloat16", "float16" or "float32"
    isolation                            "packed" or "rows", as it is used
    taps, hidden_size                    K layers of H components
    data_fingerprint, token_budget, seed fix which tokens a bin holds
    """

    target_fingerprint: str
    target_files: str
    dtype: str
    isolation: str
    taps: tuple[int, ...]
    hidden_size: int
    data_fingerprint: str
    token_budget: int
    seed: int

    @property
    def digest(self) -> str:
        """32 hex digits; every file of the cache carries it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


class DamagedFileError(Exception):
    """The file is not what it should be. The message says why, to stand in brackets behind the file's name."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a file must say of itself.

    identity: digest of the cache's identity; content: such as "bin 12"; names: of its tensors, of which the first is
    always there. All tensors are [rows, width] of this dtype.
    """

    identity: str
    content: str
    names: tuple[str, ...]
    dtype: torch.dtype
    width: int


def write_tensors(path: Path, label: Label, tensors: dict[str, Tensor]) -> None:
    """Write tensors [rows, width], on any device, in the order of label.names.

    Not flushed to the disk, so that the target need not wait for it: what a power cut leaves half is told by its
    checksum. Raises OSError (disk full, folder gone); then no part of it stays.
    """
    parts = [_bytes_of(tensors[name]) for name in label.names if name in tensors]
    header = _header(label, {name: tensors[name].shape for name in label.names if name in tensors}, _checksum(parts))
    write_atomically(path, [memoryview(header), *parts], flush=False)


def read_tensors(path: Path, label: Label) -> dict[str, Tensor]:
    """The file's tensors [rows, width], checked: a private map of the file, so no byte has been copied yet.

    Raises FileNotFoundError when it is absent, DamagedFileError when it is not what the label says.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            said = _check_header(file, label)
            tensors = {name: file.get_tensor(name) for name in label.names if name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedFileError(str(error)) from None
    if said != f"{_checksum(map(_bytes_of, tensors.values())):08x}":
        raise DamagedFileError("its checksum does not match its bytes")
    return tensors


def is_whole(path: Path, label: Label) -> bool:
    """Whether the file is there, says what the label says, and has the size that its header names. Reads no tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            _check_header(file, label)
    except (OSError, SafetensorError, DamagedFileError):
        return False
    return True


def write_atomically(path: Path, parts: Iterable[memoryview], *, flush: bool) -> None:
    """Readers see the whole file or none, with `flush` also after a power cut; of several writers the last one wins.

    Raises OSError; then the temporary file is gone.
    """
    temporary = path.with_name(f".{path.name}.{_HOST}-{os.getpid()}.partial")
    try:
        with temporary.open("wb", buffering=0) as file:
            for part in parts:
                _write_all(file, part)
            if flush:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if flush:
        _flush_folder(path.parent)


def remove_stale(folder: Path) -> None:
    """Remove the temporary files that killed processes of this host left. Not to be called while this process writes.

    A file with this process's own number is one of an earlier process: a restarted container numbers its processes
    anew.
    """
    import psutil

    for path in folder.glob(f".*.{_HOST}-*.partial"):
        owner = path.name.removesuffix(".partial").rpartition("-")[2]
        if owner.isdigit() and (int(owner) == os.getpid() or not psutil.pid_exists(int(owner))):
            path.unlink(missing_ok=True)


def _header(label: Label, shapes: dict[str, torch.Size], checksum: int) -> bytes:
    """The start of a safetensors file. Written here, because its own writer hides why a write failed."""
    rows = next(iter(shapes.values()))[0]
    metadata = {"identity": label.identity, "content": label.content, "rows": str(rows), "crc32": f"{checksum:08x}"}
    entries: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, shape in shapes.items():
        end = start + shape.numel() * label.dtype.itemsize
        entries[name] = {"dtype": DTYPES[label.dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants tensors to begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _check_header(file: Any, label: Label) -> str:
    """The checksum that the file names, once all else in its header is as it should be."""
    metadata = file.metadata() or {}
    for key, wanted in (("identity", label.identity), ("content", label.content)):
        if metadata.get(key) != wanted:
            raise DamagedFileError(f"its {key} is {metadata.get(key)!r}, not {wanted!r}")
    names = set(file.keys())
    if label.names[0] not in names or not names <= set(label.names):
        raise DamagedFileError(f"its tensors are {sorted(names)}")
    for name in names:
        part = file.get_slice(name)
        shape, dtype = part.get_shape(), part.get_dtype()
        if [metadata.get("rows"), label.width] != [*map(str, shape[:1]), *shape[1:]] or dtype != DTYPES[label.dtype]:
            wanted = f"{metadata.get('rows')} × {label.width} of {DTYPES[label.dtype]}"
            raise DamagedFileError(f"its tensor {name} is {' × '.join(map(str, shape))} of {dtype}, not {wanted}")
    return str(metadata.get("crc32"))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes; no copy where it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _checksum(parts: Iterable[memoryview]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _write_all(file: FileIO, part: memoryview) -> None:
    """A single write may stop short: Linux takes at most 2 GB, and fewer when the disk is filling up."""
    while part:
        part = part[file.write(part) :]


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_identity(folder: Path) -> CacheIdentity | None:
    """Whose states the folder holds; None where there is no cache. Raises UserError when that cannot be read."""
    path = folder / IDENTITY_FILE
    try:
        values = json.loads(path.read_text())
        stored_format, stored = values["format"], values["identity"]
        if stored_format == FORMAT and stored.keys() == {field.name for field in fields(CacheIdentity)}:
            identity = CacheIdentity(**{**stored, "taps": tuple(stored["taps"])})
            if identity.digest == values["digest"]:  # else a flipped bit would condemn every file of the folder
                return identity
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(
            f"hidden-state cache: {path} cannot be read ({error.strerror}), so its states are not used. Make it "
            "readable or give another folder"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError):
        stored_format = "unknown"
    raise UserError(
        f"hidden-state cache: {path} is damaged or of another version (its format: {stored_format}; this version reads "
        f"{FORMAT}), so the states beside it cannot be trusted. Remove the folder or give another one"
    )


def target_files(model: str) -> str:
    """What can be known of a target without loading it: 16 hex digits over a local folder's config.json and the names,
    sizes and some bytes of its weight files; a hub id itself. Raises UserError for a folder without config.json.
    """
    folder = Path(model)
    if not folder.is_dir():
        return model
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(f"target.model: {folder} has no config.json; give the folder of a transformers model")
    digest = hashlib.sha256(config.read_bytes())
    for path in sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS):
        digest.update(json.dumps([path.name, path.stat().st_size]).encode())
        digest.update(_some_bytes(path))
    return digest.hexdigest()[:16]


def _some_bytes(path: Path, places: int = 64, count: int = 4096) -> bytes:
    """From evenly spaced places: another training of the same model differs almost everywhere."""
    last = max(0, path.stat().st_size - count)
    with path.open("rb") as file:
        found = []
        for place in range(places):
            file.seek(last * place // (places - 1))
            found.append(file.read(count))
    return b"".join(found)


def refuse_foreign(folder: Path) -> None:
    """Raise UserError when the folder holds anything that no cache writes."""
    if not folder.exists():
        return
    own = (IDENTITY_FILE, LOCK_FILE, SHARED_FILE)
    patterns = (BIN_FILE, _PARTIAL, _NFS_LEFTOVER)
    for name in sorted(path.name for path in folder.iterdir()):
        if name not in own and not any(pattern.fullmatch(name) for pattern in patterns):
            raise UserError(
                f"hidden-state cache {folder}: the folder holds {name}, which is no part of a cache, so it is left "
                "alone. Give a folder of its own"
            )


def claim(folder: Path, identity: CacheIdentity) -> None:
    """Make the folder this identity's, or see that it is. Under the lock."""
    stored = read_identity(folder)
    if stored is None:
        if any(path.suffix == ".safetensors" for path in folder.iterdir()):
            raise UserError(
                f"hidden-state cache {folder}: {IDENTITY_FILE} is missing, so nobody knows whose states the folder "
                "holds. Remove it or give another one"
            )
        text = json.dumps({"format": FORMAT, "digest": identity.digest, "identity": asdict(identity)}, indent=1)
        write_atomically(folder / IDENTITY_FILE, [memoryview(text.encode())], flush=True)
    elif stored != identity:
        there, here = asdict(stored), asdict(identity)
        differing = "; ".join(
            f"{key}: {there[key]} there, {here[key]} in this run" for key in here if there[key] != here[key]
        )
        raise UserError(
            f"hidden-state cache {folder}: its states are not those of this run ({differing}), so training on them "
            "would be wrong. Give another folder, or remove this one to fill it anew"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time. The kernel frees the lock when a process ends, however it ends."""
    with (folder / LOCK_FILE).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
