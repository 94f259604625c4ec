"""How fast short conversations are prepared on one core, and where the time goes.

    python bench/prepare.py TARGET [--conversations 5000]

TARGET: folder or hub id of a model with a tokenizer and chat template. Prints conversations per second of the whole
job and the share of each stage. The goal is 2,000 a second and core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before transformers is imported: one core, as in a worker process

from draftmill.data.chunk import Chunk, RowDocuments
from draftmill.data.config import PrepareConfig
from draftmill.data.prepare import CHUNK_ROWS, prepare
from draftmill.data.read import Row, RowReader, parse
from draftmill.data.render import make_document, make_drafts
from draftmill.data.rules import check_conversation
from draftmill.data.tokenizer import ChatTokenizer
from draftmill.data.write import PreparedWriter

TEXT = (
    "the a number of apples is then we add and so find each day how many she has left total cost price "
    "because answer therefore multiply divide hours minutes Natalia 12 48 7 0.5 , . ? = ( ) function value list"
)


def write_conversations(path: Path, count: int) -> None:
    """`count` conversations of one question (30 words) and one answer (70 words)."""
    draw = random.Random(0)
    words_known = TEXT.split()
    with path.open("w") as file:
        for _ in range(count):
            texts = [" ".join(draw.choices(words_known, k=words)) for words in (30, 70)]
            messages = [
                {"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


class Stages:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def run_stages(config: PrepareConfig, chat: ChatTokenizer, folder: Path) -> Stages:
    """The steps of the job one after another over chunks, each timed."""
    stages = Stages()
    with stages.time("read"):
        rows = list(RowReader(config.inputs))
    with PreparedWriter(folder, chat.vocab_size) as writer:
        for start in range(0, len(rows), CHUNK_ROWS):
            run_chunk(rows[start : start + CHUNK_ROWS], chat, writer, stages)
    return stages


def run_chunk(rows: list[Row], chat: ChatTokenizer, writer: PreparedWriter, stages: Stages) -> None:
    with stages.time("read"):
        contents = [parse(row) for row in rows]
    with stages.time("rules"):
        checked = [
            check_conversation(content, row.source, row.row) for content, row in zip(contents, rows, strict=True)
        ]
    with stages.time("template"):
        drafts = [make_drafts(item, chat, "all")[0] for item in checked]
    with stages.time("tokenise"):
        encodings = chat.encode([draft.text for draft in drafts])
    with stages.time("mask"):
        made = [make_document(draft, encoding, chat, None) for draft, encoding in zip(drafts, encodings, strict=True)]
    with stages.time("write"):
        kept = [
            RowDocuments(row.source, row.row, "bench", [document])
            for row, document in zip(rows, made, strict=True)
            if document is not None
        ]
        writer.add(Chunk(rows=len(rows), kept=kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--conversations", type=int, default=5000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_conversations(folder / "chat.jsonl", arguments.conversations)
        config = PrepareConfig(inputs=[folder / "chat.jsonl"], output=folder / "set", model=arguments.target, workers=1)
        chat = ChatTokenizer(config.model, config.template_kwargs)
        chat.encode(["warm-up"])
        started = time.perf_counter()
        stages = run_stages(config, chat, folder)
        seconds = time.perf_counter() - started
        report = prepare(config)
    tokens = report.info.tokens / report.info.documents
    print(f"{arguments.conversations / seconds:,.0f} conversations/s on one core ({tokens:.0f} tokens each, 2 turns)")
    print(f"whole command with loading the tokenizer and hashing: {report.seconds:.1f} s")
    for name, stage_seconds in stages.seconds.items():
        print(
            f"  {name:9} {stage_seconds / seconds:6.1%}  {stage_seconds / arguments.conversations * 1e6:6.0f} µs each"
        )


if __name__ == "__main__":
    main()
