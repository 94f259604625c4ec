"""Prompts, slices, the comparison with the target alone, and what is printed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console

from draftmill.errors import UserError
from draftmill.evaluate import measure
from draftmill.evaluate.config import EvaluateConfig, resolve_dtype
from draftmill.evaluate.measure import evaluate, stop_ids
from draftmill.evaluate.plots import report_png
from draftmill.evaluate.prompts import read_prompts
from draftmill.evaluate.table import print_table

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yes"}


class Letters:
    """A tokenizer whose template writes `role:content;` letter by letter."""

    chat_template = "letters"
    eos_token_id = None

    def apply_chat_template(self, messages: list[dict[str, Any]], *, mark: str = "", **_: Any) -> list[int]:
        text = mark + "".join(f"{m['role']}:{m['content']};" for m in messages)
        return [2 + ord(letter) % 90 for letter in text]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"messages": [USER, ANSWER, USER, ANSWER], "source": "chat"},
        {"conversations": [{"from": "human", "value": "Sum?"}], "source": "maths"},
        {"prompt": "Go", "source": "maths"},
    ]
    return write(tmp_path / "p.jsonl", rows)


def test_prompt_is_everything_before_the_last_answer(prompts: Path) -> None:
    chat, maths, short = read_prompts(prompts)
    assert chat.messages == [USER, ANSWER, USER]
    assert maths.messages == [{"role": "user", "content": "Sum?"}]
    assert short.messages == [{"role": "user", "content": "Go"}]
    assert [p.slice_name for p in (chat, maths, short)] == ["chat", "maths", "maths"]
    assert len(read_prompts(prompts, 2)) == 2


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("[1]", "not_an_object"),
        ("{", "not_json"),
        ("{}", "no_messages"),
        ('{"messages": [{"content": "x"}]}', "no_role"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no_user"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: str, what: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + row + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"line 3 .*{what}") as error:
        read_prompts(path)
    assert "\n" not in str(error.value)


def test_evaluation(prompts: Path, tmp_path: Path) -> None:
    config = EvaluateConfig(prompts=prompts, max_new_tokens=12)
    seen: list[tuple[int, int]] = []
    result = evaluate(
        tiny.llama(), Letters(), tiny.drafter(), config, {}, progress=lambda done, total: seen.append((done, total))
    )
    assert [part.name for part in result.slices] == ["all", "chat", "maths"]
    assert [part.prompts for part in result.slices] == [3, 1, 2]
    assert result.overall.tokens == 36
    assert result.overall.identical == 3
    assert result.overall.mismatches == ()
    assert seen == [(1, 3), (2, 3), (3, 3)]
    values = json.loads(json.dumps(result.to_dict()))
    assert values["dtype"] == "float32"
    assert len(values["slices"][0]["acceptance"]["slots"]) == 4
    assert values["slices"][0]["speed_up"] > 0
    out = io.StringIO()
    print_table(result, Console(file=out, width=110))
    assert all(word in out.getvalue() for word in ("maths", "identical", "3/3", "slot by slot"))


def test_sampling_is_not_compared(prompts: Path) -> None:
    config = EvaluateConfig(prompts=prompts, max_new_tokens=6, temperature=1.0)
    result = evaluate(tiny.llama(), Letters(), tiny.drafter(), config, {})
    assert result.overall.identical is None


def test_case_06_another_prompt_format_than_in_training_is_refused(prompts: Path) -> None:
    config = EvaluateConfig(prompts=prompts)
    recorded = {"enable_thinking": False}
    with pytest.raises(UserError, match="enable_thinking"):
        evaluate(tiny.llama(), Letters(), tiny.drafter(), config, {}, recorded_template_kwargs=recorded)


@pytest.mark.parametrize(("below", "tie"), [(0.0, True), (50.0, False)])
def test_a_mismatch_is_judged_by_its_gap(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, below: float, tie: bool
) -> None:
    """A differing token is a tie within rounding, or a fault."""
    model = tiny.llama()
    real = measure.decode

    def differing(*args: Any, **kwargs: Any) -> Any:
        out = real(*args, **kwargs)
        token = (out.tokens[4] + 1) % tiny.VOCAB
        tokens = (*out.tokens[:4], token, *out.tokens[5:])
        return type(out)(tokens, out.blocks, out.seconds)

    class Level(torch.nn.Module):
        """Makes the logits of two neighbouring tokens equal, or far apart, in the judging pass only."""

        def forward(self, _module: Any, _args: Any, output: Any) -> Any:
            best = int(output.logits[0, -1].argmax())
            output.logits[0, -1, (best + 1) % tiny.VOCAB] = output.logits[0, -1, best] - below
            return output

    judge = measure._mismatch

    def judged(*args: Any) -> Any:
        handle = model.register_forward_hook(Level().forward)
        try:
            return judge(*args)
        finally:
            handle.remove()

    monkeypatch.setattr(measure, "decode", differing)
    monkeypatch.setattr(measure, "_mismatch", judged)
    result = evaluate(model, Letters(), tiny.drafter(), EvaluateConfig(prompts=prompts, max_new_tokens=8, limit=1), {})
    (mismatch,) = result.overall.mismatches
    assert (mismatch.row, mismatch.position, mismatch.tie) == (1, 4, tie)
    assert mismatch.gap == pytest.approx(below, abs=1e-4)
    assert result.overall.identical == 0
    out = io.StringIO()
    print_table(result, Console(file=out, width=200))
    assert ("tie within rounding" if tie else "not lossless") in out.getvalue()


def test_stop_ids_of_model_and_tokenizer() -> None:
    model = tiny.llama()
    model.generation_config.eos_token_id = [3, 4]
    assert stop_ids(model, Letters()) == {3, 4}


def test_auto_is_full_precision_on_a_cpu() -> None:
    model = tiny.llama().to(torch.bfloat16)
    assert resolve_dtype("auto", model) == torch.float32
    assert resolve_dtype("bfloat16", model) == torch.bfloat16


def test_report_is_drawn_with_and_without_data(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 5 / s, "tau_teacher_forced": 1 + s / 50, "accuracy": s / 100} for s in range(1, 90)]
    overall = {"acceptance": {"tau": 2.5, "slots": [0.8, 0.6, None], "slots_unconditional": [0.8, 0.5, None]}}
    for number, (metrics, evaluation) in enumerate([(rows, {"slices": [overall]}), (rows[:1], None), ([], None)]):
        path = report_png(metrics, evaluation, tmp_path / f"{number}.png")
        assert path.read_bytes().startswith(b"\x89PNG")
