from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pydantic import ValidationError

from draftmill.data.config import DataConfig, PrepareConfig
from draftmill.data.prepare import prepare
from draftmill.data.prepared import DOCUMENTS_FILE, DROPPED_FILE, FORMAT_VERSION, PreparedSet, write_info
from draftmill.data.preview import preview, print_preview
from draftmill.errors import UserError

WriteRows = Callable[..., Path]


def chat(number: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Add {number} and 1"}, {"role": "assistant", "content": f"{number + 1}."}]
    return {"messages": messages, **fields}


def end_process(config: PrepareConfig) -> None:
    """What the system does to a process when memory runs out."""
    os._exit(9)


MIXED: list[Any] = [
    chat(1),
    "{broken",
    chat(2, source="maths"),
    "",
    {"messages": []},
    {"messages": [{"role": "system", "content": "x"}]},
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "source": "own"},
    {"input_ids": [5], "loss_mask": [0, 1]},
    {"messages": [*chat(3)["messages"], {"role": "user", "content": "Thanks"}]},
    "[]",
]


def settings(inputs: list[Path], target: Path, **values: Any) -> PrepareConfig:
    output = values.pop("output", inputs[0].parent / "prepared")
    return PrepareConfig(**{"inputs": inputs, "output": output, "model": str(target), "workers": 1, **values})


def test_case_01_one_bad_row_never_stops_the_job_and_the_counts_add_up(make_target: Any, write_rows: WriteRows) -> None:
    config = settings([write_rows(MIXED)], make_target())
    info = prepare(config).info
    assert (info.rows, info.kept_rows, info.documents) == (9, 4, 4)
    assert info.dropped == {
        "not_json": 1,
        "empty_conversation": 1,
        "system_only": 1,
        "token_lengths_differ": 1,
        "not_an_object": 1,
    }
    assert info.rows == info.kept_rows + sum(info.dropped.values())
    assert info.trailing_turns_removed == 1
    assert info.slices == {"chat": 2, "maths": 1, "own": 1}
    dropped = [json.loads(line) for line in (config.output / DROPPED_FILE).read_text().splitlines()]
    assert [(drop["source"], drop["row"], drop["reason"]) for drop in dropped] == [
        ("chat.jsonl", 2, "not_json"),
        ("chat.jsonl", 5, "empty_conversation"),
        ("chat.jsonl", 6, "system_only"),
        ("chat.jsonl", 8, "token_lengths_differ"),
        ("chat.jsonl", 10, "not_an_object"),
    ]


def test_prepared_set_reads_back_what_was_prepared(make_target: Any, write_rows: WriteRows) -> None:
    config = settings([write_rows(MIXED)], make_target())
    report = prepare(config)
    prepared = PreparedSet.open(config.output)
    assert prepared.info == report.info
    assert len(prepared) == 4
    ids, mask = prepared.document(2)
    assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)
    assert (ids.tolist(), mask.tolist()) == ([5, 6, 7], [False, True, True])
    assert [prepared.slice(number) for number in range(4)] == ["chat", "maths", "own", "chat"]
    assert prepared.origin(2) == "chat.jsonl row 7"
    assert prepared.first_anchors[2] == 1
    documents = [prepared.document(number) for number in range(4)]
    assert prepared.lengths.tolist() == [len(ids) for ids, _ in documents]
    assert prepared.info.tokens == sum(len(ids) for ids, _ in documents)
    assert prepared.info.trained_tokens == sum(int(mask.sum()) for _, mask in documents)
    everything = np.concatenate([ids for ids, _ in documents])
    assert all(prepared.occurs(token) == (everything == token).sum() for token in range(prepared.info.vocab_size))
    assert prepared.occurs(10**9) == 0
    with pytest.raises(IndexError):
        prepared.document(4)


def test_same_documents_from_every_format(make_target: Any, write_rows: WriteRows, tmp_path: Path) -> None:
    rows = [chat(number) for number in range(20)]
    plain, target = write_rows(rows), make_target()
    (tmp_path / "chat.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "chat.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    prints = {
        prepare(settings([tmp_path / name], target, output=tmp_path / f"out-{name}")).info.fingerprint
        for name in ("chat.jsonl", "chat.jsonl.gz", "chat.jsonl.zst", "chat.parquet")
    }
    assert len(prints) == 1


def test_number_of_workers_does_not_change_the_files(
    make_target: Any, write_rows: WriteRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftmill.data.prepare.BYTES_PER_WORKER", 1)
    monkeypatch.setattr("draftmill.data.prepare.CHUNK_ROWS", 3)
    inputs, target = (
        [write_rows(MIXED * 3), write_rows([chat(number) for number in range(30)], "more.jsonl")],
        make_target(),
    )
    one = prepare(settings(inputs, target, output=tmp_path / "one", workers=1))
    two = prepare(settings(inputs, target, output=tmp_path / "two", workers=2))
    assert one.info == two.info
    assert sorted(path.name for path in one.output.iterdir()) == sorted(path.name for path in two.output.iterdir())
    for path in one.output.iterdir():
        assert path.read_bytes() == (two.output / path.name).read_bytes(), path.name


def test_worker_that_is_killed_is_a_user_error(
    make_target: Any, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftmill.data import prepare as module

    config = settings([write_rows([chat(1)])], make_target())
    monkeypatch.setattr(module, "_start_worker", end_process)
    with pytest.raises(UserError, match="Use fewer --workers"):
        list(module._make_chunks_in_workers(config, iter([[]]), 2))


def test_case_03_one_conversation_may_give_several_documents(make_target: Any, write_rows: WriteRows) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ m.content if loop.last or m.role == 'user' else '(cut)' }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = chat(1)["messages"] + chat(2)["messages"] + chat(3)["messages"]
    config = settings([write_rows([{"messages": messages}, chat(4)])], make_target(template))
    info = prepare(config).info
    assert (info.rows, info.kept_rows, info.documents) == (2, 2, 4)


def test_same_set_is_not_prepared_twice_and_another_is_not_overwritten(make_target: Any, write_rows: WriteRows) -> None:
    path, target = write_rows([chat(1)]), make_target()
    config = settings([path], target)
    first = prepare(config)
    again = prepare(config)
    assert (first.already_prepared, again.already_prepared) == (False, True)
    assert "nothing to do" in again.lines()[0]
    with pytest.raises(UserError, match="holds another prepared set"):
        prepare(settings([path], target, turns="last"))
    write_rows([chat(2)])
    with pytest.raises(UserError, match="holds another prepared set"):
        prepare(config)
    replaced = prepare(config, overwrite=True)
    assert replaced.info.fingerprint != first.info.fingerprint
    assert PreparedSet.open(config.output).info == replaced.info
    assert [item.name for item in config.output.parent.iterdir() if item.name.startswith(".")] == []


def test_folder_with_other_files_is_left_alone(make_target: Any, write_rows: WriteRows, tmp_path: Path) -> None:
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds other files"):
        prepare(settings([write_rows([chat(1)])], make_target()), overwrite=True)
    assert (tmp_path / "prepared" / "thesis.txt").exists()


def test_nothing_kept_lists_the_reasons_and_leaves_no_folder(make_target: Any, write_rows: WriteRows) -> None:
    config = settings([write_rows(["{", {"messages": []}, "{"])], make_target())
    with pytest.raises(UserError, match=r"none of 3 rows.*2 × not_json.*row 1.*1 × empty_conversation") as caught:
        prepare(config)
    assert "\n" not in str(caught.value)
    assert not config.output.exists()
    assert [item.name for item in config.output.parent.iterdir() if item.name.startswith(".")] == []
    with pytest.raises(UserError, match="no rows at all"):
        prepare(settings([write_rows([], "empty.jsonl")], make_target()))


def test_case_06_template_arguments_are_recorded(make_target: Any, write_rows: WriteRows) -> None:
    config = settings([write_rows([chat(1)])], make_target(), template_kwargs={"enable_thinking": False})
    prepare(config)
    assert PreparedSet.open(config.output).info.template_kwargs == {"enable_thinking": False}


def test_config_rejects_what_it_does_not_know() -> None:
    base = {"inputs": ["a.jsonl"], "output": "out", "model": "m"}
    for wrong in ({"max_length": 3}, {"inputs": []}, {"workers": 0}, {"template_kwargs": {"messages": []}}):
        with pytest.raises(ValidationError):
            PrepareConfig.model_validate({**base, **wrong})
    with pytest.raises(ValidationError):
        DataConfig(prepared=Path("x"), token_budget=15)
    for model in (PrepareConfig, DataConfig):
        assert all(field.description for field in model.model_fields.values())


@pytest.mark.parametrize(("name", "keep"), [("prepared.json", 0), (DOCUMENTS_FILE, 50), ("prepared.json", 40)])
def test_incomplete_set_is_refused(make_target: Any, write_rows: WriteRows, name: str, keep: int) -> None:
    config = settings([write_rows([chat(1)])], make_target())
    prepare(config)
    path = config.output / name
    content = path.read_bytes()[:keep]
    path.unlink()
    if keep:
        path.write_bytes(content)
    with pytest.raises(UserError, match="Prepare it again"):
        PreparedSet.open(config.output)


def test_newer_format_is_refused(make_target: Any, write_rows: WriteRows) -> None:
    config = settings([write_rows([chat(1)])], make_target())
    info = prepare(config).info
    write_info(config.output, replace(info, format_version=FORMAT_VERSION + 1))
    with pytest.raises(UserError, match="Update draftmill"):
        PreparedSet.open(config.output)


def test_preview_shows_what_is_trained(
    make_target: Any, write_rows: WriteRows, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = preview(settings([write_rows([chat(1), "{", chat(2)])], make_target()), 2)
    assert [(document.row, document.dropped[:8]) for document in documents] == [(1, ""), (2, "not_json")]
    assert documents[0].pieces == [
        ("<|im_start|>user\nAdd 1 and 1<|im_end|>\n<|im_start|>assistant\n", False),
        ("2.<|im_end|>", True),
        ("\n", False),
    ]
    print_preview(documents)
    assert "Add 1 and 1" in capsys.readouterr().out


def test_smollm2_answers(smollm2: Path, tmp_path: Path) -> None:
    """On-policy answers of the real target: every row kept, answers cut at the limit do not learn an end."""
    source = Path(__file__).parents[2] / "../shared/data/smollm2_greedy.jsonl"
    if not source.is_file():
        pytest.skip("the answers of SmolLM2 are not here")
    rows = source.read_text().splitlines()[:200]
    (tmp_path / "answers.jsonl").write_text("\n".join(rows))
    config = settings([tmp_path / "answers.jsonl"], smollm2)
    assert prepare(config).info.documents == 200
    prepared = PreparedSet.open(config.output)
    end = 2  # <|im_end|>
    for number, row in enumerate(map(json.loads, rows)):
        ids, mask = prepared.document(number)
        assert (ids[mask][-1] == end) == row["finished"]
