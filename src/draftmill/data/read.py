"""Rows of JSON Lines and Parquet files, as they lie there."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from draftmill.errors import UserError

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
PARQUET_ROWS = 1000  # rows decoded at once
BLOCK_BYTES = 1 << 20


class RowError(Exception):
    """A row that cannot be used. `reason`: short snake_case name, counted in the report. `detail`: for a human."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Row:
    """One row, not yet checked. `content`: the line of a JSON Lines file, or the columns of a Parquet row."""

    source: str
    row: int  # 1-based; in JSON Lines the line number
    content: bytes | dict[str, Any]


def parse(row: Row) -> dict[str, Any]:
    """The row's object. Raises RowError when the line is no JSON or no object."""
    if isinstance(row.content, dict):
        return row.content
    try:
        value = json.loads(row.content)
    except (ValueError, RecursionError) as error:  # ValueError covers bad JSON and bad UTF-8
        raise RowError("not_json", str(error)) from None
    if not isinstance(value, dict):
        raise RowError("not_an_object", f"the line holds a JSON {type(value).__name__}, not an object")
    return value


def ending_of(name: str) -> str | None:
    """Which of ENDINGS the file name has."""
    return next((ending for ending in ENDINGS if name.lower().endswith(ending)), None)


def stem_of(name: str) -> str:
    """File name without folder and known ending: `a/chat.jsonl.gz` → `chat`."""
    base = Path(name).name
    return base[: len(base) - len(ending_of(base) or "")]


def check_inputs(paths: Iterable[Path]) -> None:
    """Raises UserError for a file that is missing or of an unknown kind, before any work is done."""
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is not a file; nothing was prepared. Correct the path.")
        if ending_of(path.name) is None:
            raise UserError(
                f"{path} has an unknown ending; nothing was prepared. Known are {', '.join(ENDINGS)}: "
                "rename or convert the file."
            )


def source_names(paths: list[Path]) -> list[str]:
    """What each file is called in reports: its name, or its whole path where two files share a name."""
    names = [path.name for path in paths]
    return [str(path) if names.count(path.name) > 1 else path.name for path in paths]


class RowReader:
    """Iterates the rows of all files in order; blank lines are no rows.

    `position` and `size` are bytes, for a progress bar. Raises UserError for a file that ends early or is corrupt.
    """

    def __init__(self, paths: list[Path]) -> None:
        check_inputs(paths)
        self.paths = paths
        self.size = sum(path.stat().st_size for path in paths)
        self._finished_bytes = 0
        self._open: BinaryIO | None = None

    @property
    def position(self) -> int:
        return self._finished_bytes + (self._open.tell() if self._open is not None else 0)

    def __iter__(self) -> Iterator[Row]:
        for path, source in zip(self.paths, source_names(self.paths), strict=True):
            with path.open("rb") as self._open:
                for number, content in _contents(self._open, path):
                    yield Row(source, number, content)
            self._open = None
            self._finished_bytes += path.stat().st_size


def _contents(raw: BinaryIO, path: Path) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """(row number, content) of one file."""
    if ending_of(path.name) == ".parquet":
        yield from enumerate(_parquet_rows(raw, path), start=1)
        return
    for number, line in enumerate(_lines(raw, path), start=1):
        if line := line.strip():
            yield number, line


def _lines(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    ending = ending_of(path.name)
    if ending == ".jsonl.gz":
        return _gzip_lines(raw, path)
    if ending == ".jsonl.zst":
        return _split_lines(_zstd_blocks(raw, path))
    return iter(raw)


def _gzip_lines(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=raw) as file:
            yield from io.BufferedReader(file, BLOCK_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _broken(path, str(error)) from None


def _zstd_blocks(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    """Decompressed blocks of all frames. `stream_reader` would take a file that ends inside a frame as complete."""
    import zstandard

    frame = zstandard.ZstdDecompressor().decompressobj()
    started = False
    try:
        while block := raw.read(BLOCK_BYTES):
            while block:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(block)
                started = True
                block = frame.unused_data if frame.eof else b""
    except zstandard.ZstdError as error:
        raise _broken(path, str(error)) from None
    if started and not frame.eof:
        raise _broken(path, "it ends inside a compressed frame")


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []  # pieces of a line that spans blocks
    for block in blocks:
        *lines, last = block.split(b"\n")
        if lines:
            yield b"".join([*rest, lines[0]])
            yield from lines[1:]
            rest = []
        rest.append(last)
    yield b"".join(rest)


def _parquet_rows(raw: BinaryIO, path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        for batch in parquet.ParquetFile(raw).iter_batches(batch_size=PARQUET_ROWS):
            yield from batch.to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise _broken(path, str(error).splitlines()[0]) from None


def _broken(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} cannot be read to its end ({why}); nothing was prepared. Copy or download the file again."
    )
