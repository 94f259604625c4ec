"""Style and script of the report page. The script only reads the charts' own numbers back under the pointer; without
it the page is complete."""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root { color-scheme: light dark; --bg: #f4f5f7; --card: #fff; --ink: #1b1f24; --soft: #59636e; --line: #dfe3e8;
  --good: #1f7a4d; --bad: #b3261e; --c0: #2563a8; --c1: #d26a1e; --c2: #2a8a57; --c3: #b13a6b; --c4: #7459c4;
  --c5: #84690f; --c6: #16808f; --c7: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --bg: #101317; --card: #191d23; --ink: #e6e8eb; --soft: #9aa4b1;
  --line: #2f363f; --good: #5cc58c; --bad: #ff8a80; --c0: #6aa9f0; --c1: #f0985a; --c2: #5cc58c; --c3: #ec7fae;
  --c4: #ab93f2; --c5: #d6b656; --c6: #4fc3d1; --c7: #a3adba; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 20px 16px 40px; max-width: 1280px; background: var(--bg); color: var(--ink);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 18px; margin: 28px 0 10px; } h3 { font-size: 14px; margin: 0; }
p { margin: 4px 0; } .soft, .note { color: var(--soft); } .note { font-size: 13px; max-width: 85ch; }
code, pre { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; }
pre { overflow-x: auto; overflow-wrap: normal; margin: 8px 0 0; }
.state { font-size: 14px; font-weight: 600; border: 1px solid; border-radius: 99px; padding: 1px 10px;
  margin-left: 6px; vertical-align: 3px; color: var(--soft); white-space: nowrap; }
.state.finished, .state.running, .good { color: var(--good); } .state.failed, .state.died, .bad { color: var(--bad); }
.bar { height: 6px; border-radius: 3px; background: var(--line); margin: 12px 0; overflow: hidden; }
.bar div { height: 100%; background: var(--c0); }
.tiles { display: grid; gap: 10px; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); margin: 12px 0; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 8px 12px; } .tile b { display: block; font-size: 20px; line-height: 1.25; }
.tile span { color: var(--soft); font-size: 13px; display: block; }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); }
.card { padding: 10px 12px; min-width: 0; } .card > p { font-size: 13px; color: var(--soft); margin: 0; }
.wide { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; margin-top: 4px; touch-action: pan-y; }
svg text { font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--soft); }
.end { text-anchor: end; } .mid, .unit { text-anchor: middle; }
.grid, .frame, .mark, .level, .hair { stroke: var(--line); stroke-width: 1; fill: none; }
.frame { stroke: var(--soft); } .mark { stroke: var(--soft); stroke-dasharray: 1 3; }
.level { stroke: var(--soft); stroke-dasharray: 5 3; }
.level + text { paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
.hair { stroke: var(--ink); opacity: .5; }
image { image-rendering: pixelated; }
.curve { fill: none; stroke-width: 1.7; stroke-linejoin: round; stroke-linecap: round; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
.c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); } .c6 { stroke: var(--c6); } .c7 { stroke: var(--c7); }
.faint { stroke-width: 1; opacity: .35; } .d1 { stroke-dasharray: 7 3; } .d2 { stroke-dasharray: 2 3; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--soft); }
.legend.strong { color: var(--ink); font-size: 14px; margin: 8px -16px; padding: 4px 16px; position: sticky; top: 0;
  max-height: 30vh; overflow: auto; background: var(--bg); z-index: 1; }
svg.key { display: inline-block; width: 22px; height: 10px; margin: 0 5px 0 0; vertical-align: middle; }
.ramp { display: inline-block; width: 120px; height: 10px; margin: 0 6px; vertical-align: middle; border-radius: 2px; }
table { border-collapse: collapse; font-size: 14px; background: var(--card); }
th, td { text-align: left; padding: 4px 12px 4px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { vertical-align: bottom; font-weight: 600; font-size: 13px; color: var(--soft); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; overflow-wrap: normal; }
td.w { overflow-wrap: break-word; max-width: 60ch; } th { overflow-wrap: normal; }
td.w:first-child { min-width: 8em; } th.n { white-space: normal; }
tr:last-child td { border-bottom: 0; }
.budget { display: flex; height: 14px; border-radius: 4px; overflow: hidden; margin: 0 0 10px; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px;
  margin: 10px 0; }
summary { cursor: pointer; font-weight: 600; }
details.run { background: none; } details.run > summary { font-size: 17px; }
.switch { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: baseline; margin: 28px 0 10px; }
.switch h2 { margin: 0; } label { cursor: pointer; color: var(--soft); font-size: 14px; padding: 2px 0; }
input { position: absolute; opacity: 0; pointer-events: none; }
label span { border: 1px solid var(--line); border-radius: 99px; padding: 2px 10px; background: var(--card); }
#by-step:checked ~ main label[for=by-step] span, #by-time:checked ~ main label[for=by-time] span {
  color: var(--card); background: var(--c0); border-color: var(--c0); }
#by-step:focus-visible ~ main label[for=by-step] span, #by-time:focus-visible ~ main label[for=by-time] span {
  outline: 2px solid var(--ink); outline-offset: 1px; }
#by-step:checked ~ main .by-time, #by-time:checked ~ main .by-step { display: none; }
#tip { position: absolute; display: none; pointer-events: none; background: var(--card); color: var(--ink);
  border: 1px solid var(--soft); border-radius: 6px; padding: 4px 8px; font-size: 13px; max-width: 260px; z-index: 2; }
@media (max-width: 600px) { body { padding: 14px 10px 30px; } .tiles { grid-template-columns: 1fr 1fr; }
  .tile b { font-size: 17px; } svg text { font-size: 12.5px; } th, td { padding: 4px 8px 4px 6px; }
  td.w:first-child { min-width: 7em; } }
@media print { details { break-inside: avoid; } }
""".strip()

SCRIPT = """
(() => {
  const REACH = 12;
  const left = LEFT, right = RIGHT, top = TOP, bottom = BOTTOM, tip = document.getElementById("tip");
  const points = new Map();
  const read = (curve) => {
    if (!points.has(curve)) {
      const pairs = [...curve.getAttribute("d").matchAll(/([-0-9.]+),([-0-9.]+)/g)];
      points.set(curve, pairs.map((pair) => [Number(pair[1]), Number(pair[2])]));
    }
    return points.get(curve);
  };
  const value = (ends, log, share) =>
    log ? ends[0] * Math.pow(ends[1] / ends[0], share) : ends[0] + share * (ends[1] - ends[0]);
  const text = (number, unit) => {
    const shown = Math.abs(number) >= 1000 ? Math.round(number).toLocaleString("en") : String(+number.toPrecision(3));
    return unit ? shown + " " + unit : shown;
  };
  const nearest = (list, x) => list.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
  const hide = (chart) => {
    tip.style.display = "none";
    chart.querySelectorAll(".hair").forEach((line) => line.remove());
  };
  const show = (chart, event) => {
    hide(chart);
    const curves = [...chart.querySelectorAll(".curve")].filter((curve) => read(curve).length);
    if (!curves.length) return;
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
    const ends = (name) => chart.dataset[name].split(" ").map(Number);
    const x = nearest(curves.map((curve) => nearest(read(curve), at.x)), at.x)[0];
    const hair = document.createElementNS(chart.namespaceURI, "path");
    hair.setAttribute("class", "hair");
    hair.setAttribute("d", "M" + x + "," + top + "V" + bottom);
    chart.append(hair);
    const unit = chart.dataset.yunit === "%" ? "%" : "";
    const lines = [chart.dataset.xunit + ": " + text(value(ends("x"), false, (x - left) / (right - left)), "")];
    for (const curve of curves) {
      const [own, y] = nearest(read(curve), x);
      if (Math.abs(own - x) > REACH) continue;
      const log = chart.dataset.log === "1";
      lines.push(curve.dataset.label + ": " + text(value(ends("y"), log, (bottom - y) / (bottom - top)), unit));
    }
    tip.replaceChildren(...lines.flatMap((line) => [document.createTextNode(line), document.createElement("br")]));
    tip.style.display = "block";
    const space = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = Math.max(4, Math.min(event.pageX + 14, space)) + "px";
    tip.style.top = event.pageY + 14 + "px";
  };
  for (const chart of document.querySelectorAll("svg.chart")) {
    chart.addEventListener("pointermove", (event) => show(chart, event));
    chart.addEventListener("pointerdown", (event) => show(chart, event));
    chart.addEventListener("pointerleave", () => hide(chart));
  }
})();
""".strip()


def script(left: float, right: float, top: float, bottom: float) -> str:
    """For charts whose frame lies there, in user units."""
    frame = {"LEFT": left, "RIGHT": right, "TOP": top, "BOTTOM": bottom}
    found = SCRIPT
    for name, value in frame.items():
        found = found.replace(name, f"{value:g}", 1)
    return found


def policy(code: str) -> str:
    """Content-Security-Policy: nothing is loaded from anywhere, and no other script than this one runs."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
