"""Those who are told of a run beside its files hear all of it, and whatever becomes of them, the run goes on."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from mill import Mill, Run, split
from run_helpers import wait_for

from draftmill.config import TrackingConfig
from draftmill.errors import UserError
from draftmill.run import telemetry, tracking
from draftmill.run.console import noting
from draftmill.run.events import EventLog, tail
from draftmill.run.files import RunFolder
from draftmill.run.status import StatusWriter
from draftmill.run.telemetry import Meter, Telemetry, scalars
from draftmill.run.tracking import listening_socket, tracked
from draftmill.run.wandb_copy import Lines

DOCS = Path(__file__).parents[2] / "docs"
KEY = "a" * 40
WANDB = TrackingConfig.model_validate({"wandb": {"project": "p"}})


def row(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step, "loss": 1.0 / step, "slot_loss": [0.5, None], "waits": None, "skipped": 0,
        "tau_teacher_forced": 1.5, "context_tokens": 100 * step, "time": time.time(), **values,
    }  # fmt: skip


def append(folder: RunFolder, *rows: dict[str, Any]) -> None:
    with folder.metrics.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """Of a run in training, which is this process."""
    found = RunFolder(tmp_path / "run")
    found.root.mkdir()
    found.config.write_text(yaml.safe_dump({"train": {"lr": 0.003}}))
    found.provenance.write_text(json.dumps({"versions": {"torch": "2.11"}}))
    phase(found, "training")
    with noting(EventLog(found.events).warning):
        yield found


def phase(folder: RunFolder, name: str) -> None:
    folder.status.write_text(json.dumps({"pid": os.getpid(), "phase": name}))


def warnings(folder: RunFolder) -> list[str]:
    return [event["text"] for event in tail(folder.events) if event["kind"] == "warning"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# --- what wandb keeps on disk


def records(path: Path) -> Iterator[Any]:
    """Of a .wandb file: blocks of 32 KB, in them pieces with checksum, length and kind (whole, first, middle, last)."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def kept(folder: RunFolder) -> list[list[Any]]:
    """Records of each of wandb's sessions, in order."""
    return [list(records(path)) for path in sorted(folder.root.glob("wandb/*run-*/*.wandb"))]


def history(session: list[Any]) -> list[dict[str, Any]]:
    rows = [one.history.item for one in session if one.WhichOneof("record_type") == "history"]
    return [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items} for items in rows]


def without_own(sent: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sent.items() if not key.startswith("_")}


# --- a real run


@pytest.fixture(scope="module")
def deaf_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def real(
    tiny_target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory, deaf_server: str
) -> Iterator[tuple[Run, str]]:
    """A finished run of two processes whose wandb server is deaf, and what Prometheus got while its main process was
    stopped."""
    pytest.importorskip("wandb")
    pytest.importorskip("prometheus_client")
    port = free_port()
    keys = ("tracking.wandb.project=p", f"tracking.prometheus_port={port}", "decode_check_prompts=0")
    with (
        pytest.MonkeyPatch.context() as patch,
        Mill.opened(tmp_path_factory.mktemp("tracked"), tiny_target, prepared) as mill,
    ):
        patch.setenv("WANDB_BASE_URL", deaf_server)
        patch.setenv("WANDB_API_KEY", KEY)
        run = mill.start("run", *split(1, 1), "train.max_steps=30", *keys)
        run.await_rows(3)
        os.kill(run.process.pid, signal.SIGSTOP)
        try:
            served = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
        finally:
            os.kill(run.process.pid, signal.SIGCONT)
        assert run.end() == 0, run.said
        yield run, served


def names_in(page: Path, heading: str, column: int = 1) -> list[str]:
    """Names in one column of the first table below a heading, slots written out."""
    text = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    names = [name for cells in rows for name in re.findall(r"`([^`]+)`", cells[column])]
    return [name.replace("NN", f"{slot:02d}") for name in names for slot in (range(1, 4) if "NN" in name else [0])]


@pytest.mark.slow
def test_names_in_metrics_and_tensorboard_are_those_documented(real: tuple[Run, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = real
    rows = RunFolder(run.folder).read_metrics()
    assert sorted({key for one in rows for key in one}) == sorted(names_in(DOCS / "metrics.md", "metrics.jsonl"))
    board = EventAccumulator(str(run.folder / "tensorboard"))
    board.Reload()
    tags = board.Tags()["scalars"]
    assert sorted(tags) == sorted(names_in(DOCS / "metrics.md", "TensorBoard and wandb"))
    slots = [event.value for event in board.Scalars("slot_acceptance/02")]
    assert slots == pytest.approx([one["slot_acceptance"][1] for one in rows])


@pytest.mark.slow
def test_a_deaf_server_costs_the_run_nothing(real: tuple[Run, str], deaf_server: str) -> None:
    run, _ = real
    folder = RunFolder(run.folder)
    (said,) = [text for text in warnings(folder) if "wandb" in text]
    assert f"does not answer within 5 s ({deaf_server})" in said
    directory = Path(said.rpartition("wandb sync ")[2])
    assert directory.is_dir()
    assert run.said.count("wandb sync") >= 1
    (session,) = kept(folder)
    rows = folder.read_metrics()
    assert [one["step"] for one in rows] == list(range(1, 31))
    assert [without_own(sent) for sent in history(session)] == [{"step": one["step"], **scalars(one)} for one in rows]
    config = {item.key: item.value_json for one in session for item in one.run.config.update}
    assert json.loads(config["train"])["lr"] == 0.003
    assert "torch" in json.loads(config["run"])["versions"]
    assert any(one.WhichOneof("record_type") == "stats" for one in session), "system metrics"
    (ended,) = [one.exit for one in session if one.WhichOneof("record_type") == "exit"]
    assert ended.exit_code == 0


@pytest.mark.slow
def test_prometheus_is_answered_while_the_run_stands_still(real: tuple[Run, str]) -> None:
    _, served = real
    values = dict(line.rsplit(" ", 1) for line in served.splitlines() if not line.startswith("#"))
    assert float(values["draftmill_step"]) >= 1
    assert float(values["draftmill_total_steps"]) == 30
    assert float(values["draftmill_loss"]) > 0
    assert values['draftmill_phase{phase="training",worker="run"}'] == "1.0"
    assert {'draftmill_worker_stalled{worker="target-0"}', 'draftmill_worker_stalled{worker="drafter-0"}'} <= set(
        values
    )


# --- wandb


class Server(ThreadingHTTPServer):
    """As much of wandb's server as a run needs. lines: rows of history by run. deaf: answers nothing any more."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.deaf = threading.Event()
        self.over = threading.Event()

    def answer(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            rows = asked.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.lines[path.split("/")[-2]] += [json.loads(line) for line in rows]
            return {"exitcode": None, "limits": {}}
        query, name = asked.get("query", ""), asked.get("variables", {}).get("name")
        bucket = {"id": "b", "name": name, "displayName": "d", "config": "{}", "historyLineCount": 0}
        project = {"id": "c", "name": "p", "entity": {"id": "e", "name": "me"}}
        if "upsertBucket(" in query:
            inserted = name not in self.lines
            self.lines.setdefault(name, [])
            return {"data": {"upsertBucket": {"bucket": {**bucket, "project": project}, "inserted": inserted}}}
        if "RunResumeStatus" in query:
            return {"data": {"model": {**project, "bucket": self._progress(name, bucket)}}}
        return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}}

    def _progress(self, name: str, bucket: dict[str, Any]) -> dict[str, Any] | None:
        if name not in self.lines:
            return None
        tails = {"historyTail": json.dumps([json.dumps(one) for one in self.lines[name][-1:]]), "eventsTail": "[]"}
        counts = {"historyLineCount": len(self.lines[name]), "eventsLineCount": 0, "logLineCount": 0}
        return {**bucket, **tails, **counts, "summaryMetrics": "{}", "tags": [], "wandbConfig": '{"t": {}}'}


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if server.deaf.is_set():
            server.over.wait()
        text = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        try:
            answer = server.answer(self.path, json.loads(text))
        except ValueError:
            answer = {}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("wandb")
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{found.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield found
        found.over.set()
        found.shutdown()


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_one_and_no_line_is_lost_or_sent_twice(
    server: Server, folder: RunFolder
) -> None:
    """Resumed with lower steps: they are made again behind the checkpoint of step 3."""
    append(folder, *[row(step) for step in range(1, 7)])
    with tracked(WANDB, folder):
        wait_for(lambda: bool(server.lines))
        append(folder, row(7))
    folder.cut_metrics(3)
    with tracked(WANDB, folder):
        append(folder, *[row(step) for step in range(4, 9)])
    ((_, lines),) = server.lines.items()
    assert [one["step"] for one in lines] == [1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 8]
    own = [one["_step"] for one in lines]
    assert own == sorted(set(own)), "of wandb itself, which drops what does not rise"
    assert not warnings(folder)


@pytest.mark.slow
def test_what_was_kept_on_disk_is_sent_once_the_server_is_there(
    server: Server, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        for first in (1, 3):
            append(folder, *[row(step) for step in range(first, first + 2)])
            with tracked(WANDB, folder):
                pass
    assert [[one["step"] for one in history(session)] for session in kept(folder)] == [[1, 2], [3, 4]]
    own = [one["_step"] for session in kept(folder) for one in history(session)]
    assert own == [0, 1, 2, 3], "wandb's own step rises, so that both can be uploaded into one run"
    with tracked(WANDB, folder):
        append(folder, row(5))
    assert [one["step"] for lines in server.lines.values() for one in lines] == [1, 2, 3, 4, 5]
    assert not warnings(folder), "the user wanted it so"


@pytest.mark.slow
def test_a_server_that_falls_silent_does_not_hold_up_the_end(
    server: Server, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seconds = 6.0
    monkeypatch.setattr(tracking, "FINISH_SECONDS", seconds)
    with tracked(WANDB, folder):
        append(folder, row(1))
        wait_for(lambda: (folder.root / "wandb.json").exists() and bool(server.lines))
        server.deaf.set()
        append(folder, *[row(step) for step in range(2, 5)])
        time.sleep(2.0)  # for the lines to be taken
        ended = time.monotonic()
    assert time.monotonic() - ended < 2 * seconds + tracking.OVERTIME_SECONDS + 5.0
    (said,) = warnings(folder)
    assert f"wandb was not done {seconds:g} s after the run's end" in said
    directory = Path(said.rpartition("wandb sync ")[2])
    (session,) = [list(records(path)) for path in directory.glob("*.wandb")]
    assert [one["step"] for one in history(session)] == [1, 2, 3, 4]
    assert f"for at most {seconds:g} s" in capfd.readouterr().err


@pytest.mark.slow
def test_without_a_key_the_run_is_kept_on_disk(
    server: Server, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))  # no key there either
    append(folder, row(1))
    with tracked(WANDB, folder):
        pass
    (said,) = warnings(folder)
    assert "No API key" in said
    assert "kept on disk" in said
    assert [len(history(session)) for session in kept(folder)] == [1]


@pytest.mark.slow
def test_a_copy_that_is_killed_is_noticed_and_nothing_else_happens(folder: RunFolder) -> None:
    pytest.importorskip("wandb")
    with tracked(WANDB, folder):
        (copy,) = (c for c in psutil.Process().children() if "draftmill.run.wandb_copy" in c.cmdline())
        copy.kill()
        wait_for(lambda: bool(warnings(folder)), 30)
        append(folder, row(1))
    (said,) = warnings(folder)
    assert "wandb: the process that tells it of the run ended with code -9" in said


@pytest.mark.slow
def test_a_run_that_fails_before_it_trains_is_not_shown_and_not_held_up(
    folder: RunFolder, deaf_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", deaf_server)
    append(folder, row(1))  # of an earlier session
    (folder.root / "status.json").write_text(
        json.dumps({"pid": os.getpid(), "phase": "failed", "started": time.time()})
    )
    with tracked(WANDB, folder):
        time.sleep(1.5)  # for the server to be asked
        ended = time.monotonic()
    assert time.monotonic() - ended < 3.0
    assert not (folder.root / "wandb.json").exists()
    assert not warnings(folder)


HOLD = """
import sys, time
from pathlib import Path
from draftmill.config import TrackingConfig
from draftmill.run.files import RunFolder
from draftmill.run.tracking import tracked
values = {"wandb": {"project": "p"}, "prometheus_port": int(sys.argv[2])}
with tracked(TrackingConfig.model_validate(values), RunFolder(Path(sys.argv[1]))):
    print("entered", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_they_end_with_a_run_that_is_killed_and_wandb_has_all_of_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("WANDB_MODE", "offline")
    command = [sys.executable, "-c", HOLD, str(folder.root), str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "entered\n"
        folder.status.write_text(json.dumps({"pid": run.pid, "phase": "training"}))
        wait_for(lambda: (folder.root / "wandb.json").exists())
        children = psutil.Process(run.pid).children(recursive=True)
        assert len(children) >= 3, "ours, and wandb's own"
        append(folder, row(1), row(2))
        run.kill()
    wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children), 40)
    (session,) = kept(folder)
    assert [one["step"] for one in history(session)] == [1, 2]
    (ended,) = [one.exit for one in session if one.WhichOneof("record_type") == "exit"]
    assert ended.exit_code == 1


def test_new_lines_of_a_file_that_grows_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    assert lines.read() == []
    path.write_text('{"step": 1}\n{"ste')
    assert lines.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('p": 2}\n')
    assert lines.read() == [{"step": 2}]
    assert lines.read() == []
    other = tmp_path / "other"
    other.write_text('{"step": 1}\n{"step": 3}\n{"step": 4}\n')
    other.replace(path)
    assert [one["step"] for one in lines.read()] == [1, 3, 4]


# --- before anything is begun


def test_a_package_that_is_not_there_is_said_first(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for config, extra in (
        (WANDB, "draftmill[wandb]"),
        (TrackingConfig.model_validate({"prometheus_port": 9400}), "draftmill[prometheus]"),
    ):
        with pytest.raises(UserError, match=re.escape(f"pip install '{extra}'")), tracked(config, folder):
            pytest.fail("begun")


def test_a_port_in_use_is_said_first(folder: RunFolder) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("", 0)) as taken:
        config = TrackingConfig.model_validate({"prometheus_port": taken.getsockname()[1]})
        with pytest.raises(UserError, match=r"cannot be used .*choose another"), tracked(config, folder):
            pytest.fail("begun")


def test_prometheus_answers_this_machine_only_unless_it_is_told_otherwise(folder: RunFolder) -> None:
    pytest.importorskip("prometheus_client")
    with listening_socket(TrackingConfig().prometheus_host, 0) as own, listening_socket("0.0.0.0", 0) as all_:
        assert (own.getsockname()[0], all_.getsockname()[0]) == ("127.0.0.1", "0.0.0.0")
    config = TrackingConfig.model_validate({"prometheus_port": free_port(), "prometheus_host": "203.0.113.1"})
    with pytest.raises(UserError, match=r"203\.0\.113\.1:\d+ cannot be used"), tracked(config, folder):
        pytest.fail("begun")


def test_a_name_without_a_project_is_refused() -> None:
    with pytest.raises(ValueError, match=r"name one: tracking\.wandb\.project=NAME"):
        TrackingConfig.model_validate({"wandb": {"name": "x"}})


# --- Prometheus


def full_status() -> dict[str, Any]:
    worker = {"phase": "working", "since": 10.0, "pid": 2, "device": "cuda:0", "doing": "batch 3", "moved": 20.0}
    device = {
        "device": "cuda:0", "memory_used": 5, "memory_total": 9, "utilisation": 0.5, "power_watts": 300.0,
        "throttled": ["heat"],
    }  # fmt: skip
    host = {"memory_used": 1, "memory_total": 2, "own_rss": 3, "disk_free": 4}
    return {
        "pid": 1, "phase": "training", "since": 5.0, "updated": 30.0, "step": 7, "total_steps": 70, "loss": 2.5,
        "tau": 3.5, "tokens_per_second": 1000.0, "eta_seconds": 60.0, "skipped": 1, "restarts": 2, "slots_in_use": 3,
        "waits": {"targets_wait": 0.25, "drafters_wait": 0.5},
        "workers": {"target-0": {**worker, "stalled": "95 s in forward"}, "drafter-0": {**worker, "stalled": None}},
        "load": {"time": 1.0, "devices": [device], "host": host},
    }  # fmt: skip


def served(path: Path) -> dict[tuple[str, ...], float]:
    from draftmill.run.prometheus import StatusCollector

    samples = [sample for family in StatusCollector(path).collect() for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_names_served_are_those_documented(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    path = tmp_path / "status.json"
    path.write_text(json.dumps(full_status()))
    values = served(path)
    assert sorted({name for name, *_ in values}) == sorted(names_in(DOCS / "tracking.md", "Prometheus"))
    assert values["draftmill_tau",] == 3.5
    assert values["draftmill_drafters_wait_ratio",] == 0.5
    assert values["draftmill_phase", "run", "training"] == values["draftmill_phase", "target-0", "working"] == 1
    assert (values["draftmill_worker_stalled", "target-0"], values["draftmill_worker_stalled", "drafter-0"]) == (1, 0)
    assert values["draftmill_device_throttled", "cuda:0", "heat"] == 1
    assert values["draftmill_disk_free_bytes",] == 4


def test_what_is_unknown_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    path = tmp_path / "status.json"
    assert served(path) == {}, "before the run has written anything"
    path.write_text(json.dumps({"pid": 1, "phase": "loading", "since": 5.0, "updated": 6.0, "total_steps": None}))
    assert {name for name, *_ in served(path)} == {
        "draftmill_phase", "draftmill_phase_since_timestamp_seconds", "draftmill_updated_timestamp_seconds"
    }  # fmt: skip


# --- telemetry


@contextmanager
def telling(folder: RunFolder, total: int, start: int = 0) -> Iterator[Telemetry]:
    found = Telemetry(folder, StatusWriter(folder, total_steps=total), Meter(total), start)
    try:
        yield found
    finally:
        found.close()


def values(step: int, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in row(step, **more).items() if key != "time"}


def shown_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)/", text, re.MULTILINE)]


def test_lines_are_sparse_and_the_last_is_among_them(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: clock[0])
    with telling(folder, 60) as told:
        for step in range(1, 61):
            clock[0] += 1.0
            told.log(values(step))
        assert shown_steps(capfd.readouterr().err) == [1, 2, 3, 13, 23, 33, 43, 53, 60]
    assert capfd.readouterr().err == ""
    assert len(folder.read_metrics()) == 60
    with telling(folder, 100) as told:  # and of a run that is stopped
        for step in range(61, 70):
            told.log(values(step))
    assert shown_steps(capfd.readouterr().err) == [61, 62, 63, 69]


def test_skipped_updates_are_events(folder: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    append(folder, row(4, skipped=2))  # of the session before
    with telling(folder, 10, 4) as told:
        for step, skipped in ((5, 2), (6, 3), (7, 3), (8, 5)):
            told.log(values(step, skipped=skipped, loss=None))
    found = [event for event in tail(folder.events) if event["kind"] == "skipped"]
    assert [(event["step"], event["total"]) for event in found] == [(6, 3), (8, 5)]
    assert "1 update was skipped (3 in all)" in found[0]["text"]
    assert "lower train.lr" in found[0]["text"]
    assert capfd.readouterr().err.count("skipped: up to step") == 2


def test_time_left_is_of_this_sessions_steady_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [50.0]
    monkeypatch.setattr(telemetry.time, "perf_counter", lambda: clock[0])
    meter = Meter(200)  # resumed at step 100
    clock[0] += 500.0  # loading and compiling
    assert meter.read(110, 9000) == (None, None)
    for step in range(120, 201, 10):
        clock[0] += 20.0
        if step == 150:
            clock[0] += 300.0
            meter.pause(300.0)  # saving
        rate, left = meter.read(step, 90 * step)
        if step >= 130:
            assert left == pytest.approx(2.0 * (200 - step))
        assert left is not None
        assert left >= 0
        assert rate is not None
    assert meter.read(210, 90 * 210)[1] == 0, "behind the end of a schedule that was shortened"


def test_scalars() -> None:
    line = {"step": 3, "time": 1.0, "loss": None, "lr": 1e-3, "slot_loss": [1, None], "waits": {"slots_in_use": 2}}
    assert scalars(line) == {"lr": 1e-3, "slot_loss/01": 1.0, "waits/slots_in_use": 2.0}
