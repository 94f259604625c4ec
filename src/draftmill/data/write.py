"""Writing a prepared set: documents as they come, then what is known only at the end."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from draftmill.data.chunk import Chunk, Drop, RowDocuments
from draftmill.data.config import PrepareConfig
from draftmill.data.prepared import (
    COUNTS_FILE,
    DOCUMENTS_FILE,
    DROPPED_FILE,
    FORMAT_VERSION,
    INFO_FILE,
    PreparedInfo,
    write_info,
)
from draftmill.data.render import Document
from draftmill.data.tokenizer import ChatTokenizer
from draftmill.errors import UserError

SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "first_anchor": pa.int32(),
        "slice": pa.string(),
        "source": pa.string(),
        "row": pa.int32(),
    }
)


class PreparedWriter:
    """Takes chunks in order and keeps the counts. Use as a context manager, then call `finish`."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.rows = 0
        self.kept_rows = 0
        self.trailing_removed = 0
        self.cut_documents = 0
        self.trained_tokens = 0
        self.longest = 0
        self.dropped: Counter[str] = Counter()
        self.slices: Counter[str] = Counter()
        self.examples: dict[str, Drop] = {}  # the first dropped row of each reason
        self._folder = folder
        self._token_counts = np.zeros(vocab_size, dtype=np.int64)
        self._hash = hashlib.sha256()
        self._files = contextlib.ExitStack()
        self._dropped_file = self._files.enter_context((folder / DROPPED_FILE).open("w", encoding="utf-8"))
        self._documents = self._files.enter_context(pa.ipc.new_file(str(folder / DOCUMENTS_FILE), SCHEMA))

    def __enter__(self) -> PreparedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def add(self, chunk: Chunk) -> None:
        self.rows += chunk.rows
        self.kept_rows += len(chunk.kept)
        self.trailing_removed += chunk.trailing_removed
        for drop in chunk.dropped:
            self.dropped[drop.reason] += 1
            self.examples.setdefault(drop.reason, drop)
            self._dropped_file.write(json.dumps(asdict(drop)) + "\n")
        pairs = [(kept, document) for kept in chunk.kept for document in kept.documents]
        if pairs:
            self._add_documents(pairs)

    def _add_documents(self, pairs: list[tuple[RowDocuments, Document]]) -> None:
        documents = [document for _, document in pairs]
        lengths = np.array([len(document.input_ids) for document in documents], dtype=np.int32)
        ids = np.concatenate([document.input_ids for document in documents])
        mask = np.concatenate([document.loss_mask for document in documents])
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(ids)),
            pa.ListArray.from_arrays(offsets, pa.array(mask)),
            pa.array([document.first_anchor for document in documents], pa.int32()),
            pa.array([kept.slice_name for kept, _ in pairs], pa.string()),
            pa.array([kept.source for kept, _ in pairs], pa.string()),
            pa.array([kept.row for kept, _ in pairs], pa.int32()),
        ]
        self._documents.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._count(lengths, ids, mask)
        self.cut_documents += sum(document.cut for document in documents)
        self.slices.update(kept.slice_name for kept, _ in pairs)

    def _count(self, lengths: Any, ids: Any, mask: Any) -> None:
        for part in (lengths, ids, mask):
            self._hash.update(part.tobytes())
        self._token_counts += np.bincount(ids, minlength=len(self._token_counts))
        self.trained_tokens += int(mask.sum())
        self.longest = max(self.longest, int(lengths.max()))

    def finish(self, config: PrepareConfig, chat: ChatTokenizer, identity: str, inputs: dict[str, str]) -> PreparedInfo:
        """Writes the counts and prepared.json; call after the context manager has closed the other files."""
        np.save(self._folder / COUNTS_FILE, self._token_counts)
        info = PreparedInfo(
            format_version=FORMAT_VERSION,
            fingerprint=self._hash.hexdigest()[:32],
            identity=identity,
            model=config.model,
            tokenizer_fingerprint=chat.fingerprint,
            template_kwargs=config.template_kwargs,
            turns=config.turns,
            max_tokens=config.max_tokens,
            mask_token_id=config.mask_token_id,
            inputs=inputs,
            rows=self.rows,
            kept_rows=self.kept_rows,
            dropped=dict(self.dropped.most_common()),
            trailing_turns_removed=self.trailing_removed,
            documents=self.slices.total(),
            slices=dict(sorted(self.slices.items())),
            cut_documents=self.cut_documents,
            tokens=int(self._token_counts.sum()),
            trained_tokens=self.trained_tokens,
            longest=self.longest,
            vocab_size=chat.vocab_size,
        )
        write_info(self._folder, info)
        return info


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place when the block ends well, and is removed otherwise."""
    output.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(output)
    folder = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        folder.mkdir()
        yield folder
        _take_place(folder, output)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(
            f"The disk of {output} is full; nothing was written. Free space or give another --output."
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(output: Path) -> None:
    """What a killed job left behind. Folders of living processes stay."""
    import psutil

    for folder in output.parent.glob(f".{output.name}.partial-*"):
        owner = folder.name.rpartition("-")[2]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _take_place(folder: Path, output: Path) -> None:
    """Swaps the folders by renaming, so that `output` is at no time half written."""
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    if output.exists():
        output.rename(old)
    folder.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def check_output(output: Path, overwrite: bool) -> None:
    """Raises UserError when writing to `output` would destroy something."""
    if output.is_file():
        raise UserError(f"{output} is a file, so no set can be written there. Give a folder as --output.")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not (output / INFO_FILE).exists():
        raise UserError(f"{output} holds other files and no prepared set, so it is left alone. Give another --output.")
    if not overwrite:
        raise UserError(
            f"{output} holds another prepared set (other inputs, tokenizer or settings), so it is left alone. "
            "Give another --output, or replace it with --overwrite."
        )
