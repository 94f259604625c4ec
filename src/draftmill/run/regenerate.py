"""`draftmill regenerate`: conversations in, the same user turns answered by the target out.

A drafter learns what its target says; answers of another model cost about one token of acceptance length. Rows are
answered in batches in file order and a batch is appended at once, so an interrupted job goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from draftmill.data.read import RowError, RowReader, parse
from draftmill.data.rules import check_question
from draftmill.data.tokenizer import ChatTokenizer
from draftmill.errors import UserError
from draftmill.evaluate.measure import stop_ids
from draftmill.records import Conversation
from draftmill.run.files import write_atomically
from draftmill.target.config import TargetConfig
from draftmill.target.generate import Answer, answer_batch
from draftmill.target.model import load_causal_lm


class RegenerateConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: list[Path] = Field(min_length=1, description="Files of conversations or of prompts, as for prepare.")
    output: Path = Field(description="JSON Lines file to write; settings go beside it, into OUTPUT.config.json.")
    model: str = Field(description="Folder or hub id of the target.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="Precision of the target.")
    max_new_tokens: int = Field(512, ge=1, description="Longest answer; one that is cut there is marked unfinished.")
    temperature: float = Field(0.0, ge=0, description="0: greedy. Above: plain sampling.")
    batch_size: int = Field(32, ge=1, description="Conversations answered at once.")
    seed: int = Field(0, ge=0, description="Of the draws at a temperature above 0.")
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments for the chat template; use those of serving."
    )


@dataclass(frozen=True, slots=True)
class Regenerated:
    """rows = answered + dropped; `resumed` of the answered ones were there before."""

    rows: int
    answered: int
    dropped: int
    resumed: int
    unfinished: int
    tokens: int
    seconds: float


def regenerate(config: RegenerateConfig, *, device: str, progress: Callable[[int, int, int], None]) -> Regenerated:
    """Answer every row. progress gets (answered, rows, new tokens) after each batch.

    Raises UserError when the output was made with other settings or from other files.
    """
    conversations, dropped = _read(config)
    if not conversations:
        raise UserError(f"none of {len(dropped)} rows can be answered ({dropped[0]['reason']}: {dropped[0]['detail']})")
    _claim(config)
    write_atomically(Path(f"{config.output}.dropped.jsonl"), "".join(json.dumps(row) + "\n" for row in dropped))
    batches = [
        conversations[start : start + config.batch_size] for start in range(0, len(conversations), config.batch_size)
    ]
    done = _resume(config.output, batches)
    answered = resumed = sum(len(batch) for batch in batches[:done])
    chat = ChatTokenizer(config.model, config.template_kwargs)
    model = load_causal_lm(TargetConfig(model=config.model, dtype=config.dtype), device=device)  # type: ignore[call-arg]
    answerer = _Answerer(model, chat, config)
    started = time.monotonic()
    with config.output.open("a") as file:
        for number in range(done, len(batches)):
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in answerer.answer(batches[number])))
            file.flush()
            answered += len(batches[number])
            progress(answered, len(conversations), answerer.tokens)
    seconds = time.monotonic() - started
    rows = len(conversations) + len(dropped)
    return Regenerated(rows, answered, len(dropped), resumed, answerer.unfinished, answerer.tokens, seconds)


class _Answerer:
    def __init__(self, model: torch.nn.Module, chat: ChatTokenizer, config: RegenerateConfig) -> None:
        self._model, self._chat, self._config = model, chat, config
        self._stops = stop_ids(model, chat.tokenizer)
        self.tokens = self.unfinished = 0

    def answer(self, batch: list[Conversation]) -> list[dict[str, Any]]:
        """Turn by turn: each question is asked after the answers that the target itself gave before."""
        histories: list[list[dict[str, Any]]] = [[] for _ in batch]
        finished = [True] * len(batch)
        turns = [_questions(conversation) for conversation in batch]
        for turn in range(max(len(t) for t in turns)):
            asked = [i for i, t in enumerate(turns) if turn < len(t) and finished[i]]
            if not asked:  # a cut answer ends its conversation: nobody would go on from half a sentence
                break
            for i in asked:
                histories[i] += turns[i][turn]
            answers = self._ask([(batch[i], histories[i]) for i in asked], batch[0].row, turn)
            for i, answer in zip(asked, answers, strict=True):
                histories[i].append({"role": "assistant", "content": self._chat.tokenizer.decode(answer.token_ids)})
                finished[i] = answer.finished
        self.unfinished += finished.count(False)
        return [_row(*parts) for parts in zip(batch, histories, finished, strict=True)]

    def _ask(self, prompts: list[tuple[Conversation, list[dict[str, Any]]]], row: int, turn: int) -> list[Answer]:
        texts = [self._chat.render_prompt(history, conversation.tools) for conversation, history in prompts]
        # The seed follows from the batch, not from what ran before, so a resumed job draws the same.
        key = f"{self._config.seed} {row} {turn}".encode()
        answers = answer_batch(
            self._model,
            [encoding.ids for encoding in self._chat.encode(texts)],
            max_new_tokens=self._config.max_new_tokens,
            temperature=self._config.temperature,
            stop_ids=self._stops,
            seed=int.from_bytes(hashlib.sha256(key).digest()[:6]),
        )
        self.tokens += sum(len(answer.token_ids) for answer in answers)
        return answers


def _read(config: RegenerateConfig) -> tuple[list[Conversation], list[dict[str, Any]]]:
    conversations: list[Conversation] = []
    dropped: list[dict[str, Any]] = []
    for row in RowReader(config.inputs):
        try:
            conversations.append(_conversation(parse(row), row.source, row.row))
        except RowError as error:
            dropped.append({"file": row.source, "row": row.row, "reason": error.reason, "detail": error.detail})
    return conversations, dropped


def _conversation(content: dict[str, Any], source: str, row: int) -> Conversation:
    conversation = check_question(content, source, row)
    if any(message["role"] == "tool" for message in conversation.messages):
        raise RowError("has_tool_turns", "a tool's reply does not fit a call that the target words anew")
    return conversation


def _questions(conversation: Conversation) -> list[list[dict[str, Any]]]:
    """The turns between answers: [[system, user], [user], …]."""
    questions: list[list[dict[str, Any]]] = [[]]
    for message in conversation.messages:
        if message["role"] == "assistant":
            questions.append([])
        else:
            questions[-1].append(message)
    return [question for question in questions if question]


def _row(conversation: Conversation, messages: list[dict[str, Any]], finished: bool) -> dict[str, Any]:
    row = {"id": _id(conversation), "source": conversation.slice_name, "finished": finished, "messages": messages}
    return row | ({"tools": conversation.tools} if conversation.tools else {})


def _id(conversation: Conversation) -> str:
    return f"{conversation.source}:{conversation.row}"


def _claim(config: RegenerateConfig) -> None:
    """Settings beside the output; an output made with others is not mixed with."""
    path = Path(f"{config.output}.config.json")
    inputs = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in config.inputs}
    settings = {**config.model_dump(mode="json", exclude={"output"}), "input_sha256": inputs}
    if config.output.exists() and config.output.stat().st_size:
        before = json.loads(path.read_text()) if path.exists() else None
        if before != settings:
            keys = [k for k in settings if before is None or before.get(k) != settings[k]]
            raise UserError(
                f"{config.output} was made with other settings ({', '.join(keys)}); going on would mix two data sets. "
                "Use the same settings, or another --output"
            )
    config.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(settings, indent=1) + "\n")


def _resume(output: Path, batches: list[list[Conversation]]) -> int:
    """Number of batches that lie complete in the output; what is behind them is cut off."""
    if not output.exists():
        return 0
    lines = output.read_bytes().splitlines(keepends=True)
    done = kept = 0
    for batch in batches:
        part = lines[kept : kept + len(batch)]
        if [_written_id(line) for line in part] != [_id(conversation) for conversation in batch]:
            break
        done, kept = done + 1, kept + len(batch)
    with output.open("r+b") as file:
        file.truncate(sum(len(line) for line in lines[:kept]))
    return done


def _written_id(line: bytes) -> str | None:
    try:
        return str(json.loads(line)["id"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
