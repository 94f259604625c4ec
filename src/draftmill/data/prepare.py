"""The job that turns files of conversations into a prepared set, over several processes.

Rows go out in chunks and come back in order, so the files are the same whatever the number of workers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from draftmill.data.chunk import Chunk, make_chunk
from draftmill.data.config import PrepareConfig
from draftmill.data.prepared import FORMAT_VERSION, INFO_FILE, PreparedInfo, read_info
from draftmill.data.progress import PrepareProgress
from draftmill.data.read import Row, RowReader, source_names
from draftmill.data.tokenizer import ChatTokenizer
from draftmill.data.write import PreparedWriter, check_output, new_folder
from draftmill.errors import UserError

CHUNK_ROWS = 500
# Starting a worker takes as long as tokenising some megabytes, so small inputs get fewer workers.
BYTES_PER_WORKER = 32 << 20


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What was done. `already_prepared`: the same set lay there, so nothing was. `seconds`: wall time."""

    output: Path
    info: PreparedInfo
    already_prepared: bool
    seconds: float

    def lines(self) -> list[str]:
        """The report for a human: rows in = kept + dropped, by reason."""
        info = self.info
        if self.already_prepared:
            return [f"{self.output}: already prepared, nothing to do", *_count_lines(info)]
        return [f"{self.output}: prepared in {self.seconds:.1f} s", *_count_lines(info)]


def _count_lines(info: PreparedInfo) -> list[str]:
    lines = [f"rows {info.rows:,} = kept {info.kept_rows:,} + dropped {info.rows - info.kept_rows:,}"]
    lines += [f"  dropped {count:,}: {reason}" for reason, count in info.dropped.items()]
    share = info.trained_tokens / info.tokens
    lines.append(f"documents {info.documents:,}, tokens {info.tokens:,}, trained {share:.0%}, longest {info.longest:,}")
    if info.trailing_turns_removed:
        lines.append(f"trailing turns removed {info.trailing_turns_removed:,} (no assistant turn follows them)")
    if info.cut_documents:
        lines.append(f"documents cut to {info.max_tokens:,} tokens: {info.cut_documents:,}")
    return lines


def prepare(config: PrepareConfig, *, overwrite: bool = False) -> PrepareReport:
    """Writes the prepared set to config.output, or finds it there already.

    overwrite: replace a prepared set in config.output, also the same one. Raises UserError for unreadable inputs, an
    output folder in use, or when no row could be kept.
    """
    started = time.monotonic()
    reader = RowReader(config.inputs)
    chat = ChatTokenizer(config.model, config.template_kwargs)
    inputs = _input_hashes(config.inputs)
    identity = _identity(config, chat, inputs)
    if not overwrite and (config.output / INFO_FILE).is_file():
        existing = read_info(config.output)
        if existing.identity == identity:
            return PrepareReport(config.output, existing, True, time.monotonic() - started)
    check_output(config.output, overwrite)
    with new_folder(config.output) as folder:
        info = _write_set(folder, config, chat, reader, identity, inputs)
    return PrepareReport(config.output, info, False, time.monotonic() - started)


def _write_set(
    folder: Path, config: PrepareConfig, chat: ChatTokenizer, reader: RowReader, identity: str, inputs: dict[str, str]
) -> PreparedInfo:
    with PreparedWriter(folder, chat.vocab_size) as writer, PrepareProgress(reader.size) as progress:
        for chunk in _make_chunks(config, chat, reader):
            writer.add(chunk)
            progress.update(reader.position, writer.rows, writer.rows - writer.kept_rows)
    if writer.kept_rows == 0:
        raise _nothing_kept(config, writer)
    return writer.finish(config, chat, identity, inputs)


def _nothing_kept(config: PrepareConfig, writer: PreparedWriter) -> UserError:
    files = ", ".join(str(path) for path in config.inputs)
    if writer.rows == 0:
        return UserError(f"{files}: no rows at all, so no set was written. Give a file that has some.")
    reasons = "; ".join(
        f"{count} × {reason} (first in {writer.examples[reason].source} row {writer.examples[reason].row}: "
        f"{writer.examples[reason].detail})"
        for reason, count in writer.dropped.most_common(5)
    )
    return UserError(
        f"{files}: none of {writer.rows} rows can be trained: {reasons}. No set was written. "
        "Mend the rows or the template arguments; docs/data.md explains each reason."
    )


def _input_hashes(paths: list[Path]) -> dict[str, str]:
    hashes = {}
    for path, name in zip(paths, source_names(paths), strict=True):
        with path.open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _identity(config: PrepareConfig, chat: ChatTokenizer, inputs: dict[str, str]) -> str:
    """Hash of everything the set depends on; not of where it is written or by how many workers."""
    settings = config.model_dump(mode="json", exclude={"inputs", "output", "model", "workers"})
    content = [FORMAT_VERSION, settings, chat.fingerprint, list(inputs.items())]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _make_chunks(config: PrepareConfig, chat: ChatTokenizer, reader: RowReader) -> Iterator[Chunk]:
    batches = _batches(reader)
    workers = min(config.workers, 1 + reader.size // BYTES_PER_WORKER)
    if workers == 1:
        return (make_chunk(rows, config, chat) for rows in batches)
    return _make_chunks_in_workers(config, batches, workers)


def _batches(reader: RowReader) -> Iterator[list[Row]]:
    rows = iter(reader)
    while batch := list(itertools.islice(rows, CHUNK_ROWS)):
        yield batch


def _make_chunks_in_workers(config: PrepareConfig, batches: Iterator[list[Row]], workers: int) -> Iterator[Chunk]:
    context = multiprocessing.get_context("spawn")  # a forked tokenizer can deadlock on its thread pool's locks
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(config,))
    waiting: deque[Future[Chunk]] = deque()
    try:
        for rows in batches:
            waiting.append(pool.submit(_work, rows))
            if len(waiting) > 2 * workers:  # bounds the memory; two a worker keep all of them busy
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "A tokenising process was killed, most likely for lack of memory; nothing was written. Use fewer --workers."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[PrepareConfig, ChatTokenizer]  # one for each worker process: loading a tokenizer takes seconds


def _start_worker(config: PrepareConfig) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = (config, ChatTokenizer(config.model, config.template_kwargs))


def _work(rows: list[Row]) -> Chunk:
    return make_chunk(rows, *_worker)
