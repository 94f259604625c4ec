"""The prepared set on disk: opened memory-mapped, read by document number.

Folder: documents.arrow, token_counts.npy, dropped.jsonl, prepared.json (written last). docs/data.md describes each.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftmill.errors import UserError

FORMAT_VERSION = 1
INFO_FILE = "prepared.json"
DOCUMENTS_FILE = "documents.arrow"
COUNTS_FILE = "token_counts.npy"
DROPPED_FILE = "dropped.jsonl"


@dataclass(frozen=True, slots=True)
class PreparedInfo:
    """What prepared.json says.

    fingerprint            hash of all tokens and masks in order: what a training run depends on
    identity               hash of settings, tokenizer and input files: what preparing again depends on
    model                  whose tokenizer and template were used; tokenizer_fingerprint: hash of both
    template_kwargs        arguments of the chat template; serving must use the same
    inputs                 name → sha256 of each input file
    rows, kept_rows        read, and with at least one document; the difference is `dropped`, counted by reason
    trailing_turns_removed turns after the last assistant turn of their conversation
    documents, slices      documents in all and by slice; cut_documents: those cut to max_tokens
    tokens, trained_tokens in all documents; longest: tokens of the longest one
    vocab_size             highest token id of the tokenizer + 1
    """

    format_version: int
    fingerprint: str
    identity: str
    model: str
    tokenizer_fingerprint: str
    template_kwargs: dict[str, Any]
    turns: str
    max_tokens: int | None
    mask_token_id: int | None
    inputs: dict[str, str]
    rows: int
    kept_rows: int
    dropped: dict[str, int]
    trailing_turns_removed: int
    documents: int
    slices: dict[str, int]
    cut_documents: int
    tokens: int
    trained_tokens: int
    longest: int
    vocab_size: int


def write_info(folder: Path, info: PreparedInfo) -> None:
    (folder / INFO_FILE).write_text(json.dumps(asdict(info), indent=2, ensure_ascii=False) + "\n")


def read_info(folder: Path) -> PreparedInfo:
    """Raises UserError when the folder is no complete prepared set of this format."""
    remedy = "Prepare it again, overwriting it."
    path = folder / INFO_FILE
    if not path.is_file():
        raise UserError(
            f"{folder} holds no prepared set ({INFO_FILE} is missing); there is nothing to train on. {remedy}"
        )
    try:
        values = json.loads(path.read_text())
        version = values["format_version"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged, so the set cannot be trusted. {remedy}") from None
    if version != FORMAT_VERSION:
        advice = "Update draftmill, or prepare the set again" if version > FORMAT_VERSION else "Prepare the set again"
        raise UserError(f"{folder} has format {version}; this draftmill reads format {FORMAT_VERSION}. {advice}.")
    if values.keys() != {field.name for field in fields(PreparedInfo)}:
        raise UserError(f"{path} lacks keys or has unknown ones, so the set cannot be trusted. {remedy}")
    return PreparedInfo(**values)


class PreparedSet:
    """All documents of a prepared set, memory-mapped: opening is quick and many processes share one copy.

    lengths        [n] int64  tokens of each document
    first_anchors  [n] int64  first position p with loss_mask[p] and loss_mask[p+1]
    """

    def __init__(self, folder: Path, info: PreparedInfo, batches: list[Any], counts: npt.NDArray[np.int64]) -> None:
        self.folder = folder
        self.info = info
        self._batches = batches
        self._counts = counts
        self._ends = np.cumsum([batch.num_rows for batch in batches])
        self._offsets = [batch.column("input_ids").offsets.to_numpy() for batch in batches]
        self.lengths = np.concatenate([np.diff(offsets) for offsets in self._offsets]).astype(np.int64)
        self.first_anchors = np.concatenate([batch.column("first_anchor").to_numpy() for batch in batches]).astype(
            np.int64
        )

    @classmethod
    def open(cls, path: Path | str) -> PreparedSet:
        """Raises UserError when the folder is missing, incomplete, damaged or of another format."""
        import pyarrow as pa

        folder = Path(path)
        info = read_info(folder)
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(folder / DOCUMENTS_FILE)))
            batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
            counts = np.load(folder / COUNTS_FILE, mmap_mode="r")
        except (OSError, ValueError) as error:  # pyarrow.ArrowInvalid is a ValueError
            why = str(error).splitlines()[0]
            raise UserError(
                f"{folder} is incomplete ({why}), so it is not used. Prepare it again, overwriting it."
            ) from None
        if sum(batch.num_rows for batch in batches) != info.documents:
            raise UserError(
                f"{folder} does not hold the {info.documents} documents that {INFO_FILE} names, so it is not used. "
                "Prepare it again, overwriting it."
            )
        return cls(folder, info, batches, counts)

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """(input_ids [length] int32, a read-only view of the file; loss_mask [length] bool)."""
        batch, row = self._locate(number)
        start, end = (int(value) for value in self._offsets[batch][row : row + 2])
        ids = self._batches[batch].column("input_ids").values.slice(start, end - start).to_numpy()
        mask = self._batches[batch].column("loss_mask").values.slice(start, end - start)
        return ids, mask.to_numpy(zero_copy_only=False)  # Arrow keeps one bit a flag

    def slice(self, number: int) -> str:
        """Name of the slice the document belongs to."""
        batch, row = self._locate(number)
        return str(self._batches[batch].column("slice")[row])

    def origin(self, number: int) -> str:
        """Where the document came from, for messages: "chat.jsonl row 17"."""
        batch, row = self._locate(number)
        columns = self._batches[batch]
        return f"{columns.column('source')[row]} row {columns.column('row')[row]}"

    def occurs(self, token_id: int) -> int:
        """How often the token occurs in all documents. 0 for ids beyond the tokenizer's vocabulary."""
        return int(self._counts[token_id]) if 0 <= token_id < len(self._counts) else 0

    def _locate(self, number: int) -> tuple[int, int]:
        """(record batch, row in it)."""
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        batch = int(np.searchsorted(self._ends, number, side="right"))
        return batch, number - int(self._ends[batch]) + int(self._batches[batch].num_rows)
