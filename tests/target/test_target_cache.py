"""Cached states are the states, or they are not used: round trips, damage of every kind, limits, several processes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from target_models import HIDDEN, batch_of, captured, documents, load, save
from torch import Tensor

from draftmill.errors import UserError
from draftmill.records import TokenBatch
from draftmill.target import cache_files
from draftmill.target.cache import CacheIdentity, StateCache, open_cache, read_identity, target_files
from draftmill.target.capture import Target

IDENTITY = CacheIdentity("f" * 16, "a" * 16, "bfloat16", "packed", (0, 2), 4, "d" * 32, 6, 7)
WIDTH, BUDGET = 8, 6
SLOT = BUDGET * WIDTH * 2
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INTEGERS = {2: torch.int16, 4: torch.int32}


class Warnings(list[str]):
    def __call__(self, line: str) -> None:
        assert "\n" not in line
        self.append(line)


def opened(folder: Path, identity: CacheIdentity = IDENTITY, **changes: Any) -> tuple[StateCache, Warnings]:
    warnings = Warnings()
    settings: dict[str, Any] = {"slot_bytes": SLOT, "bins": 10, "limit_bytes": None, "warn": warnings}
    return open_cache(folder, identity, **(settings | changes)), warnings


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def random_states(tokens: int, dtype: torch.dtype = torch.bfloat16, width: int = WIDTH) -> Tensor:
    """Random bits: also NaN, infinity, −0 and subnormals must come back as they were."""
    integers = INTEGERS[dtype.itemsize]
    info = torch.iinfo(integers)
    return torch.randint(info.min, info.max, (tokens, width), dtype=integers).view(dtype)


def empty(dtype: torch.dtype = torch.bfloat16, tokens: int = BUDGET) -> Tensor:
    return torch.full((tokens, WIDTH), 77.0, dtype=dtype)


def assert_loads(cache: StateCache, bin: int, states: Tensor) -> None:
    into = empty(states.dtype)
    assert cache.load(bin, into)
    assert torch.equal(bits(into[: len(states)]), bits(states))
    assert not bits(into[len(states) :]).any(), "the padding must be zero"


def assert_refused(cache: StateCache, bin: int) -> None:
    into = empty()
    assert not cache.load(bin, into)
    assert torch.equal(into, empty()), "a refused load must leave the buffer alone"


def file_of(folder: Path, bin: int) -> Path:
    return folder / f"bin-{bin:08d}.safetensors"


def partials(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(".*.partial")]


# Round trips


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_come_back_bit_for_bit_with_zero_padding(tmp_path: Path, dtype: str) -> None:
    identity = replace(IDENTITY, dtype=dtype)
    states = {bin: random_states(tokens, DTYPES[dtype]) for bin, tokens in enumerate([1, 4, BUDGET])}
    cache, warnings = opened(tmp_path / "new" / "cache", identity)
    for bin, features in states.items():
        assert not cache.load(bin, empty(DTYPES[dtype]))
        cache.keep(bin, features)
    again, _ = opened(tmp_path / "new" / "cache", identity)
    for reader in (cache, again):
        for bin, features in states.items():
            assert_loads(reader, bin, features)
    size = 11 * WIDTH * DTYPES[dtype].itemsize
    assert (cache.hits, cache.misses, cache.bytes) == (3, 3, 2 * size)
    assert (again.hits, again.misses, again.bytes) == (3, 0, size)
    assert not warnings


def test_a_file_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    cache, _ = opened(tmp_path)
    states = random_states(5)
    cache.keep(3, states)
    (tensor,) = load_file(file_of(tmp_path, 3)).values()
    assert torch.equal(bits(tensor), bits(states))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin-00000003.safetensors", "cache.json", "cache.lock"]


def test_a_view_with_strides_is_written_and_filled_as_it_looks(tmp_path: Path) -> None:
    cache, _ = opened(tmp_path)
    wide = random_states(5, width=2 * WIDTH)
    cache.keep(0, wide[:, ::2])
    assert_loads(cache, 0, wide[:, ::2])
    into = torch.full((BUDGET, 2 * WIDTH), 77.0, dtype=torch.bfloat16)
    assert cache.load(0, into[:, WIDTH:])
    assert torch.equal(bits(into[:5, WIDTH:]), bits(wide[:, ::2]))
    assert (into[:, :WIDTH] == 77).all()


@pytest.mark.parametrize("wrong", [random_states(3, torch.float16), random_states(3, width=4), random_states(0)])
def test_tensors_that_are_not_of_this_cache_are_a_bug_of_the_caller(tmp_path: Path, wrong: Tensor) -> None:
    cache, _ = opened(tmp_path)
    for call in (cache.keep, cache.load):
        with pytest.raises(ValueError, match="bfloat16"):
            call(0, wrong)
    with pytest.raises(ValueError, match="bfloat16"):
        cache.keep_shared(random_states(5, width=4), random_states(5, width=8))


class FixedPlan:
    def __init__(self, budget: int) -> None:
        self.texts = [documents([9, 7], seed=0), documents([20], seed=1), documents([3, 3, 3], seed=2)]
        self.budget = budget

    def batch(self, index: int) -> TokenBatch:
        return batch_of(self.texts[index % 3], self.budget, index=index, bin=index % 3)


def identity_of(target: Target, folder: Path, dtype: str) -> CacheIdentity:
    files = target_files(str(folder))
    return CacheIdentity(
        target.fingerprint, files, dtype, target.isolation, target.taps, target.hidden_size, "d", 24, 0
    )


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("hybrid", "float32"), ("tied", "float16")])
def test_cached_states_equal_a_fresh_capture(tmp_path: Path, name: str, dtype: str) -> None:
    folder = save(tmp_path / "target", name)
    target, plan = load(folder, dtype=dtype), FixedPlan(24)
    fresh = [captured(target, plan.batch(index)) for index in range(3)]
    slot = fresh[0].nbytes
    identity = identity_of(target, folder, dtype)

    def run(limit: int | None) -> list[int]:
        """Two epochs as a training loop takes them; the batches for which the target ran."""
        cache, warnings = opened(tmp_path / "cache", identity, slot_bytes=slot, bins=3, limit_bytes=limit)
        ran = []
        for index in range(6):
            batch = plan.batch(index)
            features = torch.full_like(fresh[0], torch.nan)  # a slot may hold anything when it is used again
            if not cache.load(batch.bin, features):
                ran.append(index)
                target.capture(batch, features)
                cache.keep(batch.bin, features[: batch.tokens])
            assert torch.equal(bits(features), bits(fresh[index % 3])), index
        assert not warnings
        return ran

    assert run(2 * slot) == [0, 1, 2, 5]
    assert run(None) == [2], "the first run's bins are used by the second"
    assert run(None) == []
    assert len({t.numpy().tobytes() for t in map(bits, fresh)}) == 3


# Damage


def test_every_single_flipped_bit_is_harmless_or_found(tmp_path: Path) -> None:
    cache, warnings = opened(tmp_path)
    states = random_states(3)
    cache.keep(2, states)
    path = file_of(tmp_path, 2)
    whole = path.read_bytes()
    harmless = 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        cache._refused.clear()
        warnings.clear()
        into = empty()
        if cache.load(2, into):
            assert torch.equal(bits(into[:3]), bits(states))
            assert not into[3:].any()
            assert bit // 8 < len(whole) - states.nbytes, "a flipped bit of the states"
            harmless += 1
        else:
            assert torch.equal(into, empty())
            assert not path.exists()
            assert len(warnings) == 1
            assert str(path) in warnings[0]
    assert harmless < 20, "only the header's blanks may differ"


def test_a_file_cut_short_or_grown_is_refused(tmp_path: Path) -> None:
    cache, _ = opened(tmp_path)
    cache.keep(2, random_states(5))
    whole = file_of(tmp_path, 2).read_bytes()
    for damaged in [whole[:length] for length in range(len(whole))] + [whole + b"\0", whole + bytes(2 * WIDTH)]:
        file_of(tmp_path, 2).write_bytes(damaged)
        assert not cache.complete([2])
        assert_refused(cache, 2)
        assert not file_of(tmp_path, 2).exists()


def label(**changes: Any) -> cache_files.Label:
    settings = {"identity": IDENTITY.digest, "content": "bin 2", "names": ("features",)}
    return cache_files.Label(**(settings | {"dtype": torch.bfloat16, "width": WIDTH} | changes))


@pytest.mark.parametrize(
    ("wrong", "states", "reason"),
    [
        (label(identity=replace(IDENTITY, seed=8).digest), random_states(4), "identity"),
        (label(content="bin 5"), random_states(4), "content"),
        (label(content="shared matrices"), random_states(4), "content"),
        (label(names=("states",)), random_states(4), "states"),
        (label(width=4), random_states(8, width=4), "8 × 4"),
        (label(width=16), random_states(2, width=16), "2 × 16"),
        (label(dtype=torch.float16), random_states(4, torch.float16), "F16"),
        (label(), random_states(BUDGET + 1), "7 tokens"),
        (label(), random_states(4).flatten(), "32"),
    ],
)
def test_a_whole_file_of_something_else_is_refused(
    tmp_path: Path, wrong: cache_files.Label, states: Tensor, reason: str
) -> None:
    cache, warnings = opened(tmp_path)
    cache_files.write_tensors(file_of(tmp_path, 2), wrong, {wrong.names[0]: states})
    assert_refused(cache, 2)
    assert not file_of(tmp_path, 2).exists()
    (line,) = warnings
    assert str(file_of(tmp_path, 2)) in line
    assert reason in line
    assert "computed anew" in line
    states = random_states(4)
    cache.keep(2, states)
    assert_loads(cache, 2, states)


def test_a_file_copied_to_another_bins_name_is_refused(tmp_path: Path) -> None:
    cache, warnings = opened(tmp_path)
    cache.keep(1, random_states(4))
    shutil.copy(file_of(tmp_path, 1), file_of(tmp_path, 3))
    assert not cache.complete([1, 3])
    assert_refused(cache, 3)
    assert "'bin 1', not 'bin 3'" in warnings[0]
    assert cache.complete([1])


def test_a_file_that_cannot_be_read_is_named_once_and_left(tmp_path: Path) -> None:
    cache, warnings = opened(tmp_path)
    file_of(tmp_path, 2).mkdir()
    for _ in range(3):
        assert_refused(cache, 2)
        cache.keep(2, random_states(4))
    (line,) = warnings
    assert str(file_of(tmp_path, 2)) in line
    assert "left there" in line
    assert file_of(tmp_path, 2).is_dir()
    assert not partials(tmp_path)


def test_a_damaged_file_that_cannot_be_removed_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")  # what a disk turns to after errors

    cache, warnings = opened(tmp_path)
    cache.keep(2, random_states(4))
    whole = file_of(tmp_path, 2).read_bytes()
    file_of(tmp_path, 2).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in range(2):
        assert_refused(cache, 2)
    (line,) = warnings
    assert "checksum" in line
    assert "cannot be removed (Read-only file system), and its states must be computed anew" in line


# Limit and disk


def test_bins_beyond_the_limit_are_not_written_and_the_rest_is_used(tmp_path: Path) -> None:
    cache, warnings = opened(tmp_path, limit_bytes=4 * SLOT - 1)
    states = [random_states(4) for _ in range(10)]
    for bin, features in reversed(list(enumerate(states))):
        cache.keep(bin, features)
    assert cache.kept_bins == 3
    assert [cache.load(bin, empty()) for bin in range(10)] == [True] * 3 + [False] * 7
    assert_loads(cache, 2, states[2])
    assert cache.complete(range(3))
    assert not cache.complete(range(4))
    assert cache.complete([])
    assert not warnings
    assert cache.describe() == "cache: 3 of 10 bins kept (limit 3.83e-07 GB), 3 present"
    smaller, _ = opened(tmp_path, limit_bytes=2 * SLOT)
    assert smaller.kept_bins == 2
    assert smaller.describe().endswith("2 present and 1 of an earlier, larger limit")
    assert_loads(smaller, 2, states[2])
    assert opened(tmp_path)[0].describe() == "cache: 10 of 10 bins kept (no limit), 3 present"
    line = opened(tmp_path, slot_bytes=10**7, bins=480, limit_bytes=3_200_000_000)[0].describe()
    assert line == "cache: 320 of 480 bins kept (limit 3.2 GB), 3 present"


def test_a_limit_below_one_bin_is_said(tmp_path: Path) -> None:
    cache, warnings = opened(tmp_path, limit_bytes=SLOT - 1)
    assert cache.kept_bins == 0
    cache.keep(0, random_states(4))
    assert_refused(cache, 0)
    assert len(warnings) == 1
    assert "none is kept" in warnings[0]


def test_a_bin_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    cache, _ = opened(tmp_path)
    cache.keep(0, random_states(4))
    before = file_of(tmp_path, 0).stat()
    cache.keep(0, random_states(4))
    after = file_of(tmp_path, 0).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_full_disk_ends_keeping_but_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, warnings = opened(tmp_path)
    states = [random_states(4) for _ in range(4)]
    cache.keep(0, states[0])
    written = cache.bytes

    def half(file: Any, part: memoryview) -> None:
        file.write(part[: len(part) // 2])
        assert partials(tmp_path)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache_files, "_write_all", half)
        cache.keep(1, states[1])
    assert len(warnings) == 1
    assert str(file_of(tmp_path, 1)) in warnings[0]
    assert "No space left" in warnings[0]
    assert not partials(tmp_path)
    cache.keep(2, states[2])
    cache.keep_shared(random_states(9, width=4), random_states(9, width=4))
    assert len(warnings) == 1
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [file_of(tmp_path, 0).name]
    assert cache.bytes == written
    assert_loads(cache, 0, states[0])
    assert_refused(cache, 1)


def test_a_short_write_is_continued() -> None:
    class Slow:
        def __init__(self) -> None:
            self.data = b""

        def write(self, part: memoryview) -> int:
            self.data += bytes(part[:7])
            return min(7, len(part))

    slow = Slow()
    cache_files._write_all(slow, memoryview(bytes(range(50))))  # type: ignore[arg-type]
    assert slow.data == bytes(range(50))


def test_free_space_is_checked_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gigabyte = 10**9
    free = 20 * gigabyte
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    sizes: dict[str, Any] = {"slot_bytes": gigabyte, "bins": 60}
    with pytest.raises(UserError) as refused:
        opened(tmp_path, limit_bytes=30 * gigabyte, **sizes)
    message = str(refused.value)
    for part in (str(tmp_path), "30.000 GB", "20.000 GB are free", "cache_gb=20.000"):
        assert part in message
    cache, _ = opened(tmp_path, limit_bytes=20 * gigabyte, **sizes)
    cache.kept_bins = 60
    for bin in (0, 1, 25, 50):
        cache.keep(bin, random_states(4))
    opened(tmp_path, limit_bytes=22 * gigabyte, **sizes)  # two of them are there
    opened(tmp_path, limit_bytes=23 * gigabyte - 1, **sizes)
    with pytest.raises(UserError, match=r"the 56 .* 56\.000 GB.*cache_gb=22\.000"):
        opened(tmp_path, limit_bytes=60 * gigabyte, **sizes)
    free = 0
    with pytest.raises(UserError, match=r"cache_gb=2\.000"):
        opened(tmp_path, limit_bytes=None, **sizes)
    opened(tmp_path, limit_bytes=2 * gigabyte, **sizes)
    with pytest.raises(UserError, match="Not one bin fits"):
        opened(tmp_path / "other", limit_bytes=None, **sizes)


# Embedding and head


def shared(cache: StateCache, embedding: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    assert cache.load_shared() is None
    cache.keep_shared(embedding, head)
    loaded = cache.load_shared()
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_and_head_come_back(tmp_path: Path, dtype: str) -> None:
    one, two = (random_states(97, DTYPES[dtype], width=4) for _ in range(2))
    cache, warnings = opened(tmp_path, replace(IDENTITY, dtype=dtype), limit_bytes=0)
    warnings.clear()
    embedding, head = shared(cache, one, two)
    assert torch.equal(bits(embedding), bits(one))
    assert torch.equal(bits(head), bits(two))
    cache.keep_shared(two, one)  # they are there
    loaded = opened(tmp_path, replace(IDENTITY, dtype=dtype))[0].load_shared()
    assert loaded is not None
    assert torch.equal(bits(loaded[0]), bits(one))
    assert not warnings


def test_a_tied_matrix_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    target = load(save(tmp_path / "target", "tied"), dtype="bfloat16")
    identity = replace(IDENTITY, hidden_size=HIDDEN)
    cache, _ = opened(tmp_path / "cache", identity)
    embedding, head = shared(cache, target.embedding, target.head)
    assert embedding.data_ptr() == head.data_ptr()
    assert torch.equal(embedding, target.embedding)
    assert (tmp_path / "cache" / "shared.safetensors").stat().st_size < 1.5 * embedding.nbytes


def test_damaged_embedding_or_head_is_refused(tmp_path: Path) -> None:
    cache, warnings = opened(tmp_path)
    path = tmp_path / "shared.safetensors"
    one, two = (random_states(9, width=4) for _ in range(2))
    cache.keep_shared(one, two)
    whole = path.read_bytes()
    for place in (len(whole) - 1, len(whole) - one.nbytes - 1):  # in the head, in the embedding
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert cache.load_shared() is None
        assert not path.exists()
    path.write_bytes(whole[:-1])
    assert cache.load_shared() is None
    cache_files.write_tensors(path, label(content="shared matrices", names=("head",), width=4), {"head": one})
    assert cache.load_shared() is None
    assert str(path) in warnings[0]
    cache.keep_shared(two, one)
    loaded = cache.load_shared()
    assert loaded is not None
    assert torch.equal(bits(loaded[0]), bits(two))


# Whose folder it is


@pytest.mark.parametrize(
    ("change", "there", "here"),
    [
        ({"target_fingerprint": "0" * 16}, "f" * 16, "0" * 16),
        ({"target_files": "b" * 16}, "a" * 16, "b" * 16),
        ({"dtype": "float16"}, "bfloat16", "float16"),
        ({"isolation": "rows"}, "packed", "rows"),
        ({"taps": (0, 3)}, "(0, 2)", "(0, 3)"),
        ({"hidden_size": 8}, "4", "8"),
        ({"data_fingerprint": "e" * 32}, "d" * 32, "e" * 32),
        ({"token_budget": 12}, "6", "12"),
        ({"seed": 8}, "7", "8"),
    ],
)
def test_a_folder_of_other_states_is_refused(tmp_path: Path, change: dict[str, Any], there: str, here: str) -> None:
    opened(tmp_path)
    other = replace(IDENTITY, **change)
    assert other.digest != IDENTITY.digest
    with pytest.raises(UserError) as refused:
        opened(tmp_path, other)
    message = str(refused.value)
    assert f"({next(iter(change))}: {there} there, {here} in this run)" in message
    assert str(tmp_path) in message
    assert "another folder" in message
    assert "\n" not in message
    assert read_identity(tmp_path) == IDENTITY


@pytest.mark.parametrize("name", ["notes.txt", "bin-1.safetensors", "model.safetensors", ".hidden", "cache.json.bak"])
@pytest.mark.parametrize("used", [False, True])
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, name: str, used: bool) -> None:
    if used:
        opened(tmp_path)
    (tmp_path / name).write_text("mine")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=f"holds {name}, .* folder of its own"):
        opened(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_states_without_an_identity_are_refused(tmp_path: Path) -> None:
    cache, _ = opened(tmp_path)
    cache.keep(0, random_states(4))
    (tmp_path / "cache.json").unlink()
    assert read_identity(tmp_path) is None
    with pytest.raises(UserError, match=r"cache\.json is missing"):
        opened(tmp_path)


def test_the_identity_can_be_read_back_or_says_why_not(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert read_identity(folder) is None
    folder.mkdir()
    assert read_identity(folder) is None
    opened(folder)
    identity = read_identity(folder)
    assert identity == IDENTITY
    assert identity is not None
    assert identity.digest == IDENTITY.digest
    path = folder / "cache.json"
    good = path.read_text()
    lacking = json.loads(good)
    del lacking["identity"]["seed"]
    newer = json.dumps(json.loads(good) | {"format": 2})
    for text in (good[:-5], "", "[]", "{}", newer, json.dumps(lacking), good.replace("ffff", "fffe")):
        path.write_text(text)
        for call in (read_identity, opened):
            with pytest.raises(UserError, match=r"cache\.json is damaged or of another version"):
                call(folder)


def test_an_identity_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "cache.json").mkdir()  # stands for a file without rights, which would not stop root
    for call in (read_identity, opened):
        with pytest.raises(UserError, match=r"cache\.json cannot be read \(Is a directory\), .* another folder"):
            call(tmp_path)


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/draftmill-cache")):
        with pytest.raises(UserError, match="cannot be used"):
            opened(folder)


def test_target_files_tell_local_targets_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "b.safetensors").write_bytes(bytes(10))
        (folder / "a.safetensors").write_bytes(bytes(20))
    same = target_files(str(first))
    assert same == target_files(str(second))
    (second / "README.md").write_text("no part of it")
    assert same == target_files(str(second))
    changes: list[Callable[[], object]] = [
        lambda: (second / "config.json").write_text("{ }"),
        lambda: (second / "a.safetensors").write_bytes(bytes(21)),
        lambda: (second / "a.safetensors").write_bytes(bytes(20) + b"x"),
        lambda: (second / "a.safetensors").rename(second / "c.safetensors"),
        lambda: (second / "b.safetensors").unlink(),
    ]
    seen = {same}
    for change in changes:
        change()
        seen.add(target_files(str(second)))
    assert len(seen) == 6
    assert target_files("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    (second / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json"):
        target_files(str(second))


@pytest.mark.parametrize("place", [0, 100_000, 199_999])
def test_target_files_notice_other_weights_of_the_same_size(tmp_path: Path, place: int) -> None:
    weights = bytearray(200_000)  # more than one read, and few enough bytes that each of them is read
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(weights)
    before = target_files(str(tmp_path))
    weights[place] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert target_files(str(tmp_path)) != before


# Several processes

CHILD = """
import sys, time
from pathlib import Path
import torch
from draftmill.errors import UserError
from draftmill.target import cache as module, cache_files
from draftmill.target.cache import CacheIdentity, open_cache
folder, me = Path(sys.argv[1]), int(sys.argv[2])
def identity(seed=7):
    return CacheIdentity("f" * 16, "a" * 16, "bfloat16", "packed", (0, 2), 4, "d" * 32, 6, seed)
def opened(folder, seed=7):
    return open_cache(folder, identity(seed), slot_bytes=10**5, bins=100, limit_bytes=None, warn=print)
def states(bin):
    return torch.randn(4000, 8, generator=torch.Generator().manual_seed(bin)).bfloat16()
def meet(name):  # both are here: go on
    (folder.parent / f"{name}-{me}").touch()
    while not (folder.parent / f"{name}-{1 - me}").exists():
        time.sleep(0.0005)
"""
BOTH_WRITE = """
meet("start")
cache, write = opened(folder), cache_files.write_tensors
def write_together(path, label, tensors):
    if path.name == "bin-00000000.safetensors":
        meet("write")  # both have seen that it is not there
    write(path, label, tensors)
module.write_tensors = write_together
into = torch.empty(4000, 8, dtype=torch.bfloat16)
for bin in [0, *range(1, 20), *range(20 + 20 * me, 40 + 20 * me)]:
    cache.keep(bin, states(bin))
    assert cache.load(bin, into) and torch.equal(into, states(bin)), bin
"""
BOTH_OPEN = """
for round in range(30):
    meet(f"round-{round}")
    try:
        opened(folder / str(round), seed=me)
        print(round)
    except UserError as error:
        assert "seed" in str(error), error
"""
KILLED = """
def half(file, part):
    file.write(part[: len(part) // 2])
    print("half", flush=True)
    time.sleep(60)
cache = opened(folder)
cache.keep(1, states(1))
cache_files._write_all = half
cache.keep(2, states(2))
"""


def start(code: str, folder: Path, me: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD + code, str(folder), str(me)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def states_of(bin: int) -> Tensor:
    return torch.randn(4000, WIDTH, generator=torch.Generator().manual_seed(bin)).bfloat16()


def test_two_processes_write_the_same_and_different_bins(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    children = [start(BOTH_WRITE, folder, me) for me in range(2)]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert outputs == ["", ""], "no warning"
    cache, _ = opened(folder, bins=100)
    assert cache.complete(range(60))
    into = torch.empty(4000, WIDTH, dtype=torch.bfloat16)
    for bin in range(60):
        assert cache.load(bin, into)
        assert torch.equal(into, states_of(bin))
    assert not partials(folder)


def test_of_two_processes_with_other_identities_one_gets_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "caches"
    children = [start(BOTH_OPEN, folder, me) for me in range(2)]
    won = [set(map(int, child.communicate(timeout=60)[0].split())) for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert not won[0] & won[1]
    assert won[0] | won[1] == set(range(30))
    for me in range(2):
        for number in won[me]:
            identity = read_identity(folder / str(number))
            assert identity is not None
            assert identity.seed == me


def test_a_process_killed_while_writing_leaves_no_half_bin(tmp_path: Path) -> None:
    child = start(KILLED, tmp_path, 0)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    (partial,) = partials(tmp_path)
    assert f"-{child.pid}.partial" in partial
    opened(tmp_path)
    assert partials(tmp_path) == [partial], "its process lives"
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=30)
    child.stdout.close()
    assert partials(tmp_path) == [partial]
    assert not file_of(tmp_path, 2).exists()
    elsewhere = tmp_path / f".bin-00000009.safetensors.another-host-{child.pid}.partial"
    elsewhere.touch()
    cache, warnings = opened(tmp_path)
    assert partials(tmp_path) == [elsewhere.name], "whether a process of another host lives is not known here"
    into = torch.empty(4000, WIDTH, dtype=torch.bfloat16)
    assert not cache.load(2, into)
    assert cache.load(1, into)
    assert torch.equal(into, states_of(1))
    assert not warnings


def test_a_restarted_container_numbers_its_processes_anew(tmp_path: Path) -> None:
    opened(tmp_path)
    name = f".bin-00000002.safetensors.{socket.gethostname()}-{os.getpid()}.partial"
    (tmp_path / name).touch()
    opened(tmp_path)
    assert not partials(tmp_path)


def test_opening_is_quick_with_many_bins(tmp_path: Path) -> None:
    cache, _ = opened(tmp_path, bins=500)
    for bin in range(500):
        cache.keep(bin, random_states(4))
    started = time.perf_counter()
    again, _ = opened(tmp_path, bins=500)
    assert again.complete(range(500))
    assert time.perf_counter() - started < 2
