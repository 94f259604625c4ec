from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from draftmill.data.read import Row, RowError, RowReader, parse, source_names, stem_of
from draftmill.errors import UserError

ROWS = [{"messages": [{"role": "user", "content": f"é {number} \u2028 " + "x" * 1000}]} for number in range(50)]
PLAIN = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def read(path: Path) -> list[dict[str, object]]:
    return [parse(row) for row in RowReader([path])]


def test_same_rows_from_every_format(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.jsonl", PLAIN)) == ROWS
    assert read(write(tmp_path / "a.jsonl.gz", gzip.compress(PLAIN))) == ROWS
    assert read(write(tmp_path / "a.jsonl.zst", zstandard.compress(PLAIN))) == ROWS
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ROWS


def test_zstd_with_several_frames_and_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftmill.data.read.BLOCK_BYTES", 7)
    frames = zstandard.compress(PLAIN[:333]) + zstandard.compress(PLAIN[333:])
    assert read(write(tmp_path / "a.jsonl.zst", frames)) == ROWS


def test_row_numbers_are_line_numbers_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"a": 1}\n\n  \n{"a": 2}')
    assert [(row.source, row.row) for row in RowReader([path])] == [("a.jsonl", 1), ("a.jsonl", 4)]


def test_position_reaches_size(tmp_path: Path) -> None:
    reader = RowReader([write(tmp_path / "a.jsonl", PLAIN), write(tmp_path / "b.jsonl.gz", gzip.compress(PLAIN))])
    assert len(list(reader)) == 100
    assert reader.position == reader.size


@pytest.mark.parametrize("line", [b"{", b"nonsense", b'{"a": "\xff"}', b"[" * 100_000, b'{"a": 1} {"b": 2}'])
def test_case_01_line_that_is_no_json(line: bytes) -> None:
    with pytest.raises(RowError) as caught:
        parse(Row("a.jsonl", 1, line))
    assert caught.value.reason == "not_json"


@pytest.mark.parametrize("line", [b"null", b"[]", b'"text"', b"1"])
def test_case_01_line_that_is_no_object(line: bytes) -> None:
    with pytest.raises(RowError) as caught:
        parse(Row("a.jsonl", 1, line))
    assert caught.value.reason == "not_an_object"


def test_missing_file_and_unknown_ending_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.jsonl is not a file"):
        RowReader([tmp_path / "gone.jsonl"])
    with pytest.raises(UserError, match=r"a\.csv has an unknown ending"):
        RowReader([write(tmp_path / "a.csv", b"")])


@pytest.mark.parametrize(("name", "packed"), [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)])
def test_truncated_file_is_an_error_not_an_end(tmp_path: Path, name: str, packed: object) -> None:
    whole = packed(PLAIN)  # type: ignore[operator]
    with pytest.raises(UserError, match="cannot be read to its end"):
        list(RowReader([write(tmp_path / name, whole[:-20])]))


def test_damaged_parquet(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read to its end"):
        list(RowReader([write(tmp_path / "a.parquet", b"PAR1 no")]))


def test_names() -> None:
    assert stem_of("x/chat.v2.jsonl.gz") == "chat.v2"
    assert source_names([Path("x/a.jsonl"), Path("y/a.jsonl"), Path("y/b.jsonl")]) == [
        "x/a.jsonl",
        "y/a.jsonl",
        "b.jsonl",
    ]
