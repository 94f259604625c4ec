"""The report page: right numbers from whatever the files hold, and nothing from outside or injected by a file."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import random
import re
import statistics
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import yaml
from matplotlib.image import imread

from draftmill.config import RunConfig
from draftmill.errors import UserError
from draftmill.run import report as report_module
from draftmill.run.files import RunFolder
from draftmill.run.ledger import read_ledger as count_batches
from draftmill.run.report import report
from draftmill.run.report_charts import Axis, running_mean, thin
from draftmill.run.report_files import read_ledger, read_run
from draftmill.run.report_html import Markup, join, tag
from draftmill.run.report_png import write_pictures
from draftmill.run.report_time import Span, budget, phase_marks, phase_spans

START = 1_800_000_000.0
LINES, EVERY, SLOTS = 40, 5, 3
SECOND_START = 30  # the line that is the first after a resumption
STOPPED = 1000.0  # seconds between the two sessions
LINE_SECONDS = 10.0


@dataclass
class Page(HTMLParser):
    """What a browser would make of it: elements, tiles and tables."""

    path: Path
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    tiles: dict[str, list[str]] = field(default_factory=dict)
    tables: list[list[list[str]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # text outside of style and script
    scripts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tile: list[str] | None = None
        self.html = self.path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)
        if dict(attrs).get("class") == "tile":
            self.tile = []
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif self.tile is not None and tag in ("span", "b"):
            self.tile.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"
        if tag == "div" and self.tile is not None:
            self.tiles[self.tile[0]] = self.tile[1:]
            self.tile = None

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            self.scripts += [data] if self.open[-1] == "script" else []
            return
        self.said.append(data)
        if self.tile is not None:
            self.tile[-1] += data
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.said).replace("\u00a0", " ")

    def table(self, heading: str) -> list[list[str]]:
        return next(table for table in self.tables if heading in table[0])

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def curve(self, title: str, label: str, way: int = 0) -> list[tuple[float, float]]:
        """A curve's points in the units of its axes. way: 0 over steps, 1 over time."""
        places = [i for i, (tag, a) in enumerate(self.tags) if tag == "svg" and a.get("aria-label") == title]
        chart = self.tags[places[way]][1]
        rest = [a for tag, a in self.tags[places[way] :] if tag == "path" and a.get("data-label") == label]
        ends = [[float(end) for end in str(chart[key]).split()] for key in ("data-x", "data-y")]
        x, y = (Axis(*pair, log=chart["data-log"] == "1" and n == 1) for n, pair in enumerate(ends))
        points = re.findall(r"([-0-9.]+),([-0-9.]+)", str(rest[0]["d"]))
        return [(_value(x, (float(a) - 46) / 346), _value(y, (180 - float(b)) / 172)) for a, b in points]


def _value(axis: Axis, share: float) -> float:
    return axis.low * (axis.high / axis.low) ** share if axis.log else axis.low + share * (axis.high - axis.low)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a second each, and have tests of their own."""
    monkeypatch.setattr(report_module, "write_pictures", lambda runs, page: None)


def one(root: Path, name: str = "report.html") -> Page:
    return Page(report([root], root.parent / name))


def metrics_rows() -> list[dict[str, Any]]:
    draw = random.Random(5)
    rows = []
    for n in range(LINES):
        resumed = STOPPED if n >= SECOND_START else 0.0
        rows.append({
            "step": EVERY * (n + 1), "lr": 1e-3, "gradient_norm": None if n == 9 else 0.5 + draw.random(),
            "skipped": int(n >= 9), "loss": 5 - 0.05 * n + 0.1 * draw.random(), "accuracy": 0.01 * n,
            "tau_teacher_forced": 1 + 0.05 * n + 0.1 * draw.random(), "blocks": 20.0, "slot_loss": [1.0, 2.0, 3.0],
            **{key: [draw.random() for _ in range(SLOTS)] for key in SLOT_LISTS},
            "context_tokens": 1000 * (n + 1), "averaged_steps": 5,
            "tokens_per_second": None if n in (0, SECOND_START) else 100 + 10 * draw.random(),
            "waits": {"targets_wait": 0.25, "drafters_wait": 0.01 * n, "slots_in_use": 2},
            "time": START + 60 + LINE_SECONDS * (n + 1) + resumed,
        })  # fmt: skip
    return rows


SLOT_LISTS = ("slot_acceptance", "slot_top1", "slot_top4", "slot_top8")
END = START + 60 + LINE_SECONDS * LINES + STOPPED + 4


def events() -> list[dict[str, Any]]:
    resumed = START + 60 + LINE_SECONDS * SECOND_START + STOPPED
    phases = [
        (START, "loading"), (START + 50, "compiling"), (START + 60, "training"),
        (START + 60 + LINE_SECONDS * SECOND_START, "stopped: interrupted"),
        (resumed - 70, "loading"), (resumed - 10, "compiling"), (resumed, "training"), (END - 4, "checking"),
        (END, "finished"),
    ]  # fmt: skip
    found: list[dict[str, Any]] = [{"time": t, "kind": "phase", "text": text} for t, text in phases]
    found += [{"time": START + t, "kind": "phase", "text": text, "worker": name, "pid": 7} for t, text, name in WORKERS]
    found.append({"time": START + 100, "kind": "checkpoint", "text": "step 5", "step": 5, "seconds": 2.5})
    found += [{"time": START + t, "kind": kind, "text": f"{kind} text", "worker": name} for t, kind, name in TROUBLE]
    return [*found, {"time": START + 70, "kind": "warning", "text": "batch 3 failed once"}]


WORKERS = (
    (2, "loading", "target-0"), (52, "working", "target-0"), (2, "compiling", "drafter-0"),
    (62, "warming up", "drafter-0"), (68, "working", "drafter-0"),
)  # fmt: skip
TROUBLE = (
    (80, "stalled", "target-0"), (110, "moving", "target-0"),
    (120, "stalled", "target-1"), (125, "restart", "target-1"),
    (130, "stalled", "drafter-0"), (131, "recompiled", "drafter-0"), (132, "skipped", "drafter-0"),
)  # fmt: skip


def evaluation() -> dict[str, Any]:
    part = {
        "name": "all", "prompts": 12, "tokens": 600,
        "acceptance": {"blocks": 200, "tau": 2.875, "slots": [0.8, 0.7, None], "slots_unconditional": [0.8, 0.5, 0.0]},
        "tokens_per_second": 30.0, "plain_tokens_per_second": 20.0, "speed_up": 1.5, "identical": 12, "mismatches": [],
    }  # fmt: skip
    slices = [part, {**part, "name": "code", "prompts": 5}, {**part, "name": "chat", "prompts": 7}]
    return {
        "step": 200, "prompts_file": "held.jsonl", "dtype": "float32", "temperature": 0.0, "max_new_tokens": 64,
        "block_size": 4, "slices": slices,
    }  # fmt: skip


def config(root: Path, **train: Any) -> dict[str, Any]:
    return {
        "run_dir": str(root), "seed": 0, "devices": {"inline": ["cpu"]}, "drafter": {"layers": 1, "block_size": 4},
        "train": {"lr": 1e-3, "clip": 1.0, "accumulation": 2, **train},
    }  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def ledger() -> list[dict[str, Any]]:
    """400 batches; those from 100 on are trained a second time after drafters were lost."""
    first = [{"trained": n, "rank": 0, "target": f"target-{n % 2}", "time": START + 60 + n} for n in range(120)]
    again = [{"trained": n, "rank": 0, "target": "target-0", "time": START + 200 + n} for n in range(100, 400)]
    lost = {"from": 100, "reason": "drafter-0: killed by signal 9", "time": START + 190}
    return [{"from": 0, "time": START + 59}, *first, lost, *again, {"from": 400, "time": END - 4}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of two sessions, evaluated."""
    root = tmp_path / "mine"
    checkpoint = root / "checkpoints" / "step-00000200"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    check = {"blocks": 50, "tau_decoded": 2.25, "tau_training": 2.25, "blocks_agree": 1.0, "flagged": False}
    status = {
        "pid": 1, "started": START + 1000, "phase": "finished", "since": END, "updated": END, "total_steps": 200,
        "step": 200, "restarts": 1, "decode_check": check,
    }  # fmt: skip
    record = {
        "versions": {"torch": "2.11.0"}, "git_commit": "abc123", "platform": "Linux-x", "target": "models/tiny",
        "seed": 0, "spec": {"layer_types": ["full_attention"], "block_size": 4},
    }  # fmt: skip
    (root / "metrics.jsonl").write_text(lines(metrics_rows()) + '{"step": 205, "loss": 4')
    (root / "events.jsonl").write_text(lines(events()))
    (root / "ledger.jsonl").write_text(lines(ledger()) + '{"trained": 400, "ra')
    (root / "status.json").write_text(json.dumps(status))
    (root / "run.json").write_text(json.dumps(record))
    (root / "evaluation.json").write_text(json.dumps(evaluation()))
    (root / "config.yaml").write_text(yaml.safe_dump(config(root)))
    return root


def test_headline(run: Path) -> None:
    page, rows = one(run), metrics_rows()
    last = rows[-2:]  # a twentieth of 40 lines
    assert page.tiles["step"] == ["200", "100 % of 200"]
    assert page.tiles["loss"][0] == f"{rows[-1]['loss']:.3f}"
    assert page.tiles["loss"][1] == f"{sum(row['loss'] for row in last) / 2:.3f} over the last 2 lines"
    assert page.tiles["τ, teacher-forced"][0] == f"{rows[-1]['tau_teacher_forced']:.2f}"
    assert page.tiles["accuracy"][0] == "39.0\u00a0%"
    rates = [row["tokens_per_second"] for row in rows[SECOND_START + 1 :]]
    assert page.tiles["context tokens/s"] == [
        f"{statistics.median(rates):,.0f}", f"median of {len(rates)} lines since the last start"
    ]  # fmt: skip
    assert page.tiles["time in training"] == ["6 min 40 s"]  # 40 lines of 10 s, the stop left out
    assert page.tiles["last checkpoint"][0] == "step 200"
    assert page.tiles["τ, decoded"] == ["2.88", "evaluation, 12 prompts"]
    assert page.tiles["speed-up"][0] == "1.50×"
    assert page.tiles["τ, decode check"][0] == "2.25"
    assert (page.tiles["skipped updates"][0], page.tiles["restarts"][0]) == ("1", "1")
    assert "target models/tiny · drafter of 1 layer, blocks of 4" in page.text
    assert "finished 2027-01-15 08:24 UTC" in page.text


def test_curves_over_steps_and_over_time(run: Path) -> None:
    page, rows = one(run), metrics_rows()
    for way, xs in enumerate(([row["step"] for row in rows], [10 * (n + 1) / 60 for n in range(LINES)])):
        points = page.curve("Loss", "loss, each line", way)
        assert len(points) == LINES
        assert [x for x, _ in points] == pytest.approx(xs, abs=0.002 * max(xs))
        assert [y for _, y in points] == pytest.approx([row["loss"] for row in rows], abs=0.003)
    norms = [row["gradient_norm"] for row in rows if row["gradient_norm"] is not None]
    drawn = [y for _, y in page.curve("Gradient norm, before clipping", "norm, each line")]
    assert drawn == pytest.approx(norms, rel=0.003)
    assert [y for _, y in page.curve("Time spent waiting", "drafters, for a batch, each line")] == pytest.approx(
        list(range(LINES)), abs=0.1
    )
    assert "clipped above" in page.text
    marks = [a for a in page.named("path") if a.get("class") == "mark"]
    assert len(marks) == 2 * 8, "one resumption in each of eight charts, by steps and by time"


def test_slots(run: Path) -> None:
    page, last = one(run), metrics_rows()[-2:]
    table = page.table("top 4")
    assert table[0] == [
        "slot", "−log\u00a0q", "accepted, if reached", "top 1", "top 4", "top 8", "decoded, if reached",
        "decoded, of all blocks",
    ]  # fmt: skip
    for slot, cells in enumerate(table[1:]):
        means = [sum(row[key][slot] for row in last) / 2 for key in SLOT_LISTS]
        decoded = [["80.0", "80.0"], ["70.0", "50.0"], [None, "0.0"]][slot]
        expected = [f"{100 * mean:.1f}\u00a0%" for mean in means] + [f"{d}\u00a0%" if d else "–" for d in decoded]
        assert cells == [str(slot + 1), f"{slot + 1}.000", *expected]
    drawn = page.curve("By slot, last twentieth of the lines", "among the first 8")
    assert drawn == [
        pytest.approx((slot + 1, 50 * sum(row["slot_top8"][slot] for row in last)), abs=0.4) for slot in range(SLOTS)
    ]


def test_heat_maps_hold_the_shares_at_their_place(run: Path) -> None:
    rows = metrics_rows()
    for n, row in enumerate(rows):
        row["slot_acceptance"] = [1.0, 0.0, n / LINES]
    (run / "metrics.jsonl").write_text(lines(rows))
    page = one(run)
    pictures = [str(a["href"]).removeprefix("data:image/png;base64,") for a in page.named("image")]
    assert len(pictures) == 2 * len(SLOT_LISTS)
    viridis = matplotlib.colormaps["viridis"]
    for picture in pictures[:2]:  # over steps, over time
        pixels = imread(io.BytesIO(base64.b64decode(picture)))
        assert pixels.shape[0] == SLOTS
        assert np.allclose(pixels[0, :, :3], viridis(1.0)[:3], atol=0.01)
        assert np.allclose(pixels[1, :, :3], viridis(0.0)[:3], atol=0.01)
        columns = pixels.shape[1]
        for column in (0, columns // 2, columns - 1):  # three columns to a line
            share = math.floor(column * LINES / columns) / LINES
            assert np.allclose(pixels[2, column, :3], viridis(share)[:3], atol=0.01)


def test_evaluation_time_and_interruptions(run: Path) -> None:
    page = one(run)
    assert page.table("target alone")[1:] == [
        [name, "2.88", "1.50×", f"12/{prompts}", str(prompts), "600", "30.0", "20.0"]
        for name, prompts in (("all", 12), ("code", 5), ("chat", 7))
    ]
    assert "Lossless: all 12 answers equal the target's own" in page.text
    shares = {row[0]: row[1:] for row in page.table("share")[1:]}
    total = END - START
    assert shares["starting and loading"] == ["1 min 50 s", f"{100 * 110 / total:.1f}\u00a0%"]
    assert shares["compiling"][0] == "22 s"  # of the run, and of the drafter's process behind it
    assert shares["drafters waiting for batches"][0] == "1 min 15 s"  # 10 s × n % of the lines but the first ones
    assert shares["first batch: warming up"][0] == "6 s"
    assert shares["training"][0] == "5 min 14 s"  # 314.5 s: 400 less 2, 6, 75 and the 2.5 that went into saving
    assert shares["saving checkpoints"][0] == "2 s"
    assert shares["decode check and closing"][0] == "4 s"
    assert shares["stopped or dead, between two starts"][0] == "15 min 30 s"
    assert shares["together"][0] == "24 min 24 s"
    assert "Waiting, mean of all lines: targets 25.0 %, drafters 19.5 %." in page.text
    assert "1 update skipped for a gradient that was not finite, noted in the lines of steps 50." in page.text
    assert "400 batches trained, each once." in page.text
    assert "Hidden states by target-0: 350, target-1: 50." in page.text
    assert page.table("reason")[1] == ["2027-01-15 08:03 UTC", "50", "drafter-0: killed by signal 9"]
    assert page.table("warning")[1][1] == "batch 3 failed once"
    said = "Stalled, from the notice until it moved again or was started anew: target-0 for 30 s, target-1 for 5 s, "
    assert said + "drafter-0 for good." in page.text
    assert [row[1:] for row in page.table("event")[1:]] == [[kind, f"{kind} text"] for _, kind, _ in TROUBLE]
    assert page.table("process") == [
        ["process", "compiling", "warming up", "working", "loading"],
        ["drafter-0", "1 min 00 s", "6 s", "4 min 52 s", "–"],  # working until the stop, 360 s after the start
        ["target-0", "–", "–", "5 min 08 s", "50 s"],
    ]
    assert "accumulation: 2" in page.text
    assert ["git_commit", "abc123"] in page.table("value")


def test_answers_that_differ_are_counted(run: Path) -> None:
    values = evaluation()
    values["slices"][0] |= {"identical": 9, "mismatches": [{"tie": True}, {"tie": True}, {"tie": False}]}
    values["step"] = 150
    (run / "evaluation.json").write_text(json.dumps(values))
    page = one(run)
    assert "9 of 12 answers equal the target's own. Of the others, rounding explains 2 (ties)" in page.text
    assert "does not explain 1." in page.text
    assert "There is a newer checkpoint, of step 200." in page.text
    values["slices"][0]["identical"] = None
    (run / "evaluation.json").write_text(json.dumps(values))
    assert "were not compared" in one(run).text


OURS = {
    "html", "head", "meta", "title", "style", "body", "input", "main", "h1", "h2", "h3", "p", "b", "span", "div",
    "label", "ul", "li", "table", "tr", "td", "th", "details", "summary", "pre", "svg", "path", "text", "image",
    "script",
}  # fmt: skip


def assert_self_contained(page: Page) -> None:
    for name, attributes in page.tags:
        assert name in OURS
        for key, value in attributes.items():
            assert not key.startswith("on"), f"{name} {key}"
            if key in ("src", "href", "xlink:href", "srcset", "data", "action"):
                assert str(value).startswith("data:image/png;base64,"), f"{name} {key}={value}"
    style = re.findall(r"<style>(.*?)</style>", page.html, re.DOTALL)
    assert len(style) == 1
    assert not re.search(r"url\(|@import", page.html)
    assert not re.search(r"https?:", style[0] + page.scripts[0])
    (code,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = next(a["content"] for a in page.named("meta") if "http-equiv" in a)
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_nothing_comes_from_outside(run: Path) -> None:
    page = one(run)
    assert_self_contained(page)
    assert not page.open, f"left open: {page.open}"
    assert {"light dark"} <= set(re.findall(r"color-scheme: ([a-z ]+);", page.html))
    assert any(a.get("name") == "viewport" for a in page.named("meta"))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))


HOSTILE = "</pre></td></title></style><script>alert(1)</script><img src=http://x/ onerror=alert(2)>\"'&\ud800\u0000"


NAME = '<b>&\'" onclick=alert(3) x="'


def hostile(value: Any) -> Any:
    """Every string and every tenth number replaced."""
    if isinstance(value, dict):
        return {key: hostile(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [hostile(inner) for inner in value]
    return HOSTILE if isinstance(value, str) else value


def test_text_from_files_stays_text(run: Path) -> None:
    keep = {"kind": str, "phase": str}
    for name in ("status.json", "run.json", "evaluation.json"):
        values = json.loads((run / name).read_text())
        (run / name).write_text(
            json.dumps(hostile(values) | {k: v for k, v in values.items() if k in keep} | {HOSTILE: 1})
        )
    status = json.loads((run / "status.json").read_text()) | {"phase": "failed", "reason": HOSTILE}
    (run / "status.json").write_text(json.dumps(status))
    for name in ("events.jsonl", "ledger.jsonl"):
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()[:-1]]
        (run / name).write_text(lines([hostile(row) | {k: v for k, v in row.items() if k in keep} for row in rows]))
    with (run / "metrics.jsonl").open("a") as file:
        strange = {
            "step": 1000,
            "loss": HOSTILE,
            "accuracy": [],
            "slot_top1": {"a": HOSTILE},
            "waits": HOSTILE,
            "time": HOSTILE,
        }
        file.write("\n" + json.dumps(strange) + "\n")
    visible = HOSTILE.replace("\ud800", "?").replace("\u0000", "")
    (run / "config.yaml").write_text(yaml.safe_dump({"key": visible}) + f"# {visible}\n")
    strange_root = run.rename(run.with_name(NAME))
    for page in (
        one(strange_root),
        Page(report([strange_root, one_line_run(run.with_name("b"))], run.parent / "two.html")),
    ):
        assert_self_contained(page)
        assert not page.open
        assert page.text.count("<script>alert(1)</script>") >= 8
        assert NAME in page.text


def test_markup_is_only_what_was_made_as_such() -> None:
    assert tag("p", "<i>", Markup("<br>"), class_='"><b>') == '<p class="&quot;&gt;&lt;b&gt;">&lt;i&gt;<br></p>'
    assert join("&", tag("b", "x")) == "&amp;<b>x</b>"


def one_line_run(root: Path, **train: Any) -> Path:
    root.mkdir()
    (root / "metrics.jsonl").write_text(lines(metrics_rows()[:1]))
    (root / "config.yaml").write_text(yaml.safe_dump(config(root, **train)))
    return root


def test_a_run_of_one_line(tmp_path: Path) -> None:
    """Without status, events, ledger: what is not known is said."""
    page = one(one_line_run(tmp_path / "run"))
    assert page.tiles["loss"][0] == f"{metrics_rows()[0]['loss']:.3f}"
    assert page.tiles["context tokens/s"][0] == "–"
    assert page.tiles["last checkpoint"] == ["none yet"]
    assert page.curve("Loss", "loss") == [pytest.approx((5, metrics_rows()[0]["loss"]), abs=0.1)]
    assert "how the run ended is unknown" in page.text
    assert "Unknown: there is no events.jsonl" in page.text
    assert "Not evaluated yet" in page.text
    assert "run.json is not there yet" in page.text
    assert_self_contained(page)


def test_a_run_without_a_line(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with RunFolder(root).locked():
        (root / "status.json").write_text(json.dumps({"pid": 1, "phase": "loading", "total_steps": 100}))
        page = one(root)
    assert "running" in page.said
    assert "No line of metrics.jsonl yet." in page.text
    assert page.tiles["step"] == ["–", ""]
    assert "died while loading" in one(root).text, "the lock is free now, and no end was written"


DAMAGES = {
    "empty": lambda text: b"",
    "half": lambda text: text[: len(text) // 2],
    "noise": lambda text: bytes(range(256)) * 3,
    "list": lambda text: b"[1, [2]]\n",
    "null": lambda text: b"null\n",
    "odd": lambda text: (
        b'{"step": true, "slices": [3], "time": 1e999, "phase": [], "spec": "x", "trained": "a", "from": {}}\n'
    ),
    "huge": lambda text: (
        b'{"step": 1' + b"0" * 400 + b', "time": 1e90, "loss": -1e308, "from": 1e80, "kind": "phase"}\n'
    ),
    "deep": lambda text: b'{"a": ' * 5000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_do_not_break_it(run: Path, damage: str) -> None:
    """Each file in turn, then all at once."""
    names = [
        "metrics.jsonl",
        "events.jsonl",
        "ledger.jsonl",
        "status.json",
        "run.json",
        "evaluation.json",
        "config.yaml",
    ]
    sound = {name: (run / name).read_bytes() for name in names}
    for name in [*names, ""]:
        for other in names:
            text = sound[other]
            (run / other).write_bytes(DAMAGES[damage](text) if name in (other, "") else text)
        page = one(run)
        assert not page.open, name
        if name not in ("metrics.jsonl", ""):
            assert page.tiles["loss"][0] == f"{metrics_rows()[-1]['loss']:.3f}", name
    write_pictures([read_run(run, "all of it damaged", END)], run / "report.html")


def test_lines_that_were_made_again_count_once(run: Path) -> None:
    """As when the run dies between the write of a resumed line and anything else."""
    rows = metrics_rows()
    again = [{**row, "loss": 1.5} for row in rows[20:]]
    (run / "metrics.jsonl").write_text(lines(rows) + lines(again))
    points = one(run).curve("Loss", "loss, each line")
    assert len(points) == LINES
    assert [y for _, y in points[20:]] == pytest.approx([1.5] * 20, abs=0.02)


def test_long_runs_keep_their_spikes_and_stay_small(tmp_path: Path) -> None:
    some = metrics_rows()
    rows = [{**some[n % LINES], "step": n + 1, "loss": 2.0, "time": START + n} for n in range(2000)]
    rows[234]["loss"], rows[1210]["loss"] = 9.0, 0.5
    roots = []
    for n in range(8):
        roots.append(tmp_path / f"run-{n}")
        roots[-1].mkdir()
        (roots[-1] / "metrics.jsonl").write_text(lines(rows))
    points = one(roots[0]).curve("Loss", "loss, each line")
    assert 100 < len(points) <= 1000
    assert [round(x) for x, y in points if y > 5] == [pytest.approx(235, abs=4)]
    assert [round(x) for x, y in points if y < 1] == [pytest.approx(1211, abs=4)]
    assert report(roots, tmp_path / "all.html").stat().st_size < 2_000_000


def test_several_runs(run: Path) -> None:
    other = one_line_run(run.with_name("other"), lr=3e-4)
    page = Page(report([run, other], run.parent / "two.html"))
    assert_self_contained(page)
    table = page.table("skipped")
    found = [dict(zip(table[0], row, strict=True)) for row in table[1:]]
    assert [row["run"] for row in found] == ["mine", "other"]
    assert [row["step"] for row in found] == ["200 of 200", "5 of –"]
    assert found[0]["loss"] == f"{sum(row['loss'] for row in metrics_rows()[-2:]) / 2:.3f}"
    assert (found[0]["τ, decoded"], found[0]["identical"]) == ("2.88", "12/12")
    assert [row["context tokens"] for row in found] == ["40,000", "1,000"]
    assert [row["τ, decoded"] for row in found] == ["2.88", "–"]
    differing = [row for row in page.table("key") if row[0] == "config.yaml"]
    assert differing == [["config.yaml", "train.lr", "0.001", "0.0003"]]
    assert ["run.json", "git_commit", "abc123", "–"] in page.table("key")
    times = {row[0]: row[1:] for row in next(table for table in page.tables if table[0] == ["", "mine"])}
    assert (times["compiling"], times["together"]) == (["22 s"], ["24 min 24 s"]), "of the one that has events"
    assert ["code", "2.88", "–"] in next(table for table in page.tables if table[0][0] == "slice")
    assert len(page.curve("Loss", "mine")) == LINES
    assert len(page.curve("Loss", "other")) == 1


def test_pictures_beside_the_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are drawn as they are: a dollar sign begins no formula."""
    odd = read_run(run.rename(run.with_name("a$b$c{")), "a$b$c{", END)
    other = read_run(one_line_run(run.with_name("other")), "other", END)
    monkeypatch.undo()
    report([odd.root], None)
    write_pictures([odd, other], run.parent / "two.html")
    assert (odd.root / "report-curves.png").exists()
    for name, rows in (("two-curves.png", 3), ("two-slots.png", 1)):
        height, width, _ = imread(run.parent / name).shape
        assert width / height == pytest.approx(3 * 4.6 / (rows * 3.0), rel=0.01)
    slots = imread(odd.root / "report-slots.png")
    assert len(np.unique(slots.reshape(-1, slots.shape[-1]), axis=0)) > 200, "shares of many sizes"


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        one_line_run(tmp_path / folder / "run")
    page = Page(report([tmp_path / "a" / "run", tmp_path / "b" / "run"], tmp_path / "two.html"))
    assert [row[0] for row in page.table("skipped")[1:]] == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_what_cannot_be_reported_is_said(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", tmp_path / "missing", run / "metrics.jsonl"):
        with pytest.raises(UserError, match="holds no run"):
            report([nothing], tmp_path / "page.html")
    with pytest.raises(UserError, match="given twice"):
        report([run, run / "." / "checkpoints" / ".."], tmp_path / "page.html")
    with pytest.raises(UserError, match="cannot be written"):
        report([run], tmp_path / "no" / "page.html")
    assert report([run], None) == run / "report.html"
    monkeypatch.chdir(tmp_path)
    other = one_line_run(tmp_path / "other")
    assert report([run, other], None).resolve() == tmp_path / "report.html"
    assert not list(tmp_path.rglob(".*.partial"))


# --- pieces


def test_the_ledger_is_read_as_the_run_reads_it(run: Path) -> None:
    path = run / "ledger.jsonl"
    assert Counter(dict.fromkeys(read_ledger(path).makers, 1)) == count_batches(path)
    assert not read_ledger(path).repeated
    with path.open("a") as file:
        file.write("\n" + lines([{"trained": 7}, {"trained": 8}, {"trained": 8}]))
    assert read_ledger(path).repeated == {7, 8}
    assert {n for n, count in count_batches(path).items() if count > 1} == {7, 8}


def spans(events: list[tuple[float, str, bool]], signs: list[float], end: float) -> list[Span]:
    return phase_spans(phase_marks(events), sorted(signs), end)


def test_a_killed_session_lasts_until_its_last_sign() -> None:
    events = [(0.0, "loading", False), (10.0, "training", False), (100.0, "loading", False), (110.0, "training", False)]
    signs = [0, 10, 20, 30, 31, 100, 110, 150]
    assert spans(events, signs, 160.0) == [
        Span("loading", 0, 10), Span("training", 10, 31), Span("loading", 100, 110), Span("training", 110, 160)
    ]  # fmt: skip
    assert dict(budget(spans(events, signs, 160.0), 5.0)) == {
        "loading": 20, "training": 66, "saving": 5, "between": 69
    }  # fmt: skip


def test_a_workers_own_phases_do_not_count() -> None:
    events = [
        (0.0, "loading", False), (1.0, "loading", True), (10.0, "training", False), (11.0, "working", True),
        (40.0, "checking", False), (41.0, "checking", True), (50.0, "finished", False),
    ]  # fmt: skip
    assert spans(events, [0, 1, 10, 11, 40, 41, 50], 50.0) == [
        Span("loading", 0, 10), Span("training", 10, 40), Span("checking", 40, 50)
    ]  # fmt: skip
    assert spans(events[:2], [0, 1], 9.0) == [Span("loading", 0, 9)], "its workers are loading just now"


def test_running_means() -> None:
    assert running_mean([1.0, None, 4.0, 7.0], 3) == [1.0, 2.5, 5.5, 5.5]
    assert running_mean([None, None], 3) == [None, None]
    assert running_mean([1.0, 100.0, 0.0], 3, log=True) == pytest.approx([10.0, 10.0, 100.0])


def test_thinning_keeps_extremes_and_gaps() -> None:
    draw = random.Random(3)
    ys: list[float | None] = [draw.random() for _ in range(5000)]
    ys[2000:2500] = [None] * 500
    xs, thinned = thin(list(range(5000)), ys, 200)
    assert len(xs) <= 200
    assert xs == sorted(xs)
    known = [y for y in ys if y is not None]
    assert {min(known), max(known)} <= set(thinned)
    assert all(ys[round(x)] == y for x, y in zip(xs, thinned, strict=True))
    assert None in thinned


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (Axis(0.0, 10.0), [0, 2, 4, 6, 8, 10]),
        (Axis(0.5, 3.5, whole=True), [1, 2, 3]),
        (Axis(0.05, 6.0, log=True), [0.1, 0.3, 1, 3]),
        (Axis(1e-9, 1e9, log=True), [1e-9, 1e-6, 1e-3, 1, 1e3, 1e6, 1e9]),
    ],
    ids=["plain", "whole", "log", "wide"],
)
def test_ticks_are_round(axis: Axis, expected: list[float]) -> None:
    assert axis.ticks(6) == pytest.approx(expected)


@pytest.fixture(scope="module")
def real_run(tiny_target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from draftmill.run.train import train

    root = tmp_path_factory.mktemp("real") / "run"
    values = {
        "run_dir": root, "threads": 1, "decode_check_prompts": 0, "devices": "cpu",
        "data": {"prepared": prepared, "token_budget": 192}, "target": {"model": str(tiny_target)},
        "drafter": {"layers": 1, "block_size": 4},
        "train": {"max_steps": 6, "accumulation": 2, "anchors": 24, "log_every": 1, "save_every": 3},
    }  # fmt: skip
    assert train(RunConfig.model_validate(values), resume=False) == 0
    return root


@pytest.mark.slow
def test_a_real_run(real_run: Path) -> None:
    page = one(real_run)
    rows = [json.loads(line) for line in (real_run / "metrics.jsonl").read_text().splitlines()]
    assert page.tiles["step"] == ["6", "100 % of 6"]
    assert page.tiles["loss"][0] == f"{rows[-1]['loss']:.3f}"
    assert page.tiles["last checkpoint"][0] == "step 6"
    assert [y for _, y in page.curve("Loss", "loss")] == pytest.approx([row["loss"] for row in rows], abs=0.01)
    assert [row[0] for row in page.table("top 4")[1:]] == ["1", "2", "3"]
    assert "12 batches trained, each once." in page.text
    phases = [row[0] for row in page.table("share")[1:]]
    assert {"starting and loading", "training", "together"} <= set(phases)
    assert_self_contained(page)
