"""What the pipeline costs: a run of several processes against its sides alone, and the bandwidth of each queue.

    python bench/pipeline.py TARGET PREPARED [--targets cpu] [--drafters cpu] [--seconds 20] [--threads 1]
                             [--set KEY=VALUE ...]

TARGET: folder of a model; PREPARED: folder of `draftmill prepare` for it. First each side alone, in a process of its
own and on its own device, for --seconds: the target filling one buffer after another, the drafter training on states
that lie there already. Then `draftmill train` with both, for three times as many seconds, start-up excluded. Prints:

- batches and tokens a second of each side alone and of the run, and the run against the slower side (goal: 95 %);
- the share of time each side waited;
- host memory: what the slots should take, and the most that all processes held together;
- GB/s through each queue that these devices have.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from draftmill.config import RunConfig
from draftmill.data.plan import BatchPlan
from draftmill.handoff.copies import DeviceWriter
from draftmill.handoff.device import DeviceRing
from draftmill.handoff.interface import Reader, Writer
from draftmill.handoff.shared import RingShape, SharedRing, shared_reader, shared_writers
from draftmill.records import HiddenBatch
from draftmill.run.build import build
from draftmill.run.split import drafter_step
from draftmill.target.capture import Target


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seconds_each(call: Callable[[int], None], device: str, seconds: float) -> float:
    """Seconds a call takes, over at least `seconds` of them, warm-up excluded."""
    for index in range(2):
        call(index)
    synchronise(device)
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        call(calls)
        calls += 1
        synchronise(device)
    return (time.perf_counter() - started) / calls


def target_alone(config: RunConfig, device: str, seconds: float) -> float:
    built = build(config)
    target = Target(config.target, built.spec.taps, device=device)
    features = torch.zeros(built.plan.token_budget, target.features_width, dtype=target.dtype, device=device)
    return seconds_each(lambda index: target.capture(built.plan.batch(index), features), device, seconds)


def drafter_alone(config: RunConfig, device: str, seconds: float) -> float:
    built = build(config)
    target = Target(config.target, built.spec.taps, device=device)
    ready = [hidden(built.plan, target, index, device) for index in range(4)]
    step = drafter_step(config, built.spec, device, target.embedding, target.head)
    return seconds_each(lambda index: step(ready[index % len(ready)]), device, seconds)


def hidden(plan: BatchPlan, target: Target, index: int, device: str) -> HiddenBatch:
    features = torch.zeros(plan.token_budget, target.features_width, dtype=target.dtype, device=device)
    batch = plan.batch(index)
    target.capture(batch, features)
    return HiddenBatch(batch, features, target.fingerprint, target.taps)


def apart(measure: Callable[[RunConfig, str, float], float], config: RunConfig, device: str, seconds: float) -> float:
    """In a process of its own with the run's threads, as in the run."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_apart, args=(theirs, measure, config, device, seconds))
    process.start()
    theirs.close()
    try:
        result: float = ours.recv()
    except EOFError:
        raise SystemExit("a measurement failed, see above") from None
    process.join()
    return result


def _apart(connection: Any, measure: Any, config: RunConfig, device: str, seconds: float) -> None:
    torch.set_num_threads(config.threads or 1)
    connection.send(measure(config, device, seconds))


class MemoryWatch(threading.Thread):
    """The most that a process and all below it held, each shared page counted once (PSS)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak = pid, 0

    def run(self) -> None:
        while True:
            try:
                main = psutil.Process(self.pid)
                tree = [main, *main.children(recursive=True)]
                self.peak = max(self.peak, sum(process.memory_full_info().pss for process in tree))
            except psutil.Error:
                if not psutil.pid_exists(self.pid):
                    return
            time.sleep(1.0)


def run_pipeline(config: RunConfig, folder: Path, seconds: float) -> tuple[float, dict[str, Any], int]:
    """(seconds a batch in steady state, waits, peak memory in bytes) of a real run of about `seconds`."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    process = subprocess.Popen([sys.executable, "-m", "draftmill", "train", str(path)], stdout=subprocess.DEVNULL)
    watch = MemoryWatch(process.pid)
    watch.start()
    if process.wait() != 0:
        raise SystemExit("the run failed")
    lines = [json.loads(line) for line in (config.run_dir / "ledger.jsonl").read_text().splitlines()]
    times = [line["time"] for line in lines if "trained" in line]
    steady = times[len(times) // 4 :]
    metrics = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    waits = {}
    for side in ("targets_wait", "drafters_wait"):
        shares = [row["waits"][side] for row in metrics[len(metrics) // 4 :] if row["waits"][side] is not None]
        waits[side] = statistics.mean(shares) if shares else None
    return (steady[-1] - steady[0]) / (len(steady) - 1), waits, watch.peak


def bandwidth(writer: Writer, reader: Reader, seconds: float = 2.0) -> float:
    """GB/s of features written on one side, carried, and available on the other."""
    moved, started = 0, time.perf_counter()
    source: torch.Tensor | None = None
    while time.perf_counter() - started < seconds:
        for slot in range(reader.slots):
            into = writer.begin(slot)
            source = torch.ones_like(into) if source is None else source
            into.copy_(source)
            writer.end(slot).wait()
            reader.fetch(slot)
            features = reader.features(slot)
            features.view(torch.uint8).sum() if features.device.type == "cuda" else features.clone()
            reader.done(slot).wait()
            moved += reader.slot_bytes
    return moved / (time.perf_counter() - started) / 1e9


def queues(shape: RingShape, target: str, drafter: str) -> dict[str, float]:
    ring = SharedRing(shape)
    found = {"host": bandwidth(shared_writers(ring, target)[0], shared_reader(ring, 0, drafter))}
    if target.startswith("cuda") and drafter.startswith("cuda"):
        direct = DeviceRing(shape, drafter)
        slots = [direct.features(slot) for slot in range(shape.slots)]
        staging = DeviceWriter.make_staging(slots[0], target)
        found["device"] = bandwidth(DeviceWriter(slots, staging), direct)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("prepared")
    parser.add_argument("--targets", default="cpu")
    parser.add_argument("--drafters", default="cpu")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, Path(folder))


def report(arguments: argparse.Namespace, folder: Path) -> None:
    from draftmill.config import load_run_config

    base = {"run_dir": str(folder / "run"), "threads": arguments.threads, "decode_check_prompts": 0,
            "data": {"prepared": arguments.prepared}, "target": {"model": arguments.target},
            "devices": {"targets": yaml.safe_load(arguments.targets), "drafters": yaml.safe_load(arguments.drafters)},
            "train": {"log_every": 1, "save_every": 100000, "epochs": 100000}}  # fmt: skip
    path = folder / "base.yaml"
    path.write_text(yaml.safe_dump(base))
    config = load_run_config(path, arguments.set)
    assert config.devices.targets is not None
    assert config.devices.drafters is not None
    target_device, drafter_device = config.devices.targets[0], config.devices.drafters[0]
    target = apart(target_alone, config, target_device, arguments.seconds) / len(config.devices.targets)
    drafter = apart(drafter_alone, config, drafter_device, arguments.seconds) / len(config.devices.drafters)
    steps = max(8, round(3 * arguments.seconds / max(target, drafter) / config.train.accumulation))
    config = load_run_config(path, [*arguments.set, f"train.max_steps={steps}"])
    built = build(config)
    run, waits, peak = run_pipeline(config, folder, 3 * arguments.seconds)
    shape = RingShape(built.placement.ranks, built.slots, config.data.token_budget, built.width, torch.bfloat16)
    tokens = config.data.token_budget * (1 - built.plan.padding_share)
    print(f"\n{built.placement.describe()}; {tokens:,.0f} tokens a batch; {arguments.threads} threads a process")
    print(f"{'':24} s/batch   tokens/s")
    for name, value in (("target side alone", target), ("drafter side alone", drafter), ("the run", run)):
        print(f"{name:24} {value:7.3f} {tokens / value:10,.0f}")
    print(f"the run against the slower side alone: {max(target, drafter) / run:.1%} (goal: 95 %)")
    print(f"the run against both in turn: {(target + drafter) / run:.2f} times as fast")
    for side, share in waits.items():
        print(f"{side.replace('_', ' ')}: {'–' if share is None else f'{share:.1%}'} of the time")
    print(
        f"host memory: slots {shape.total_bytes / 1e9:.3f} GB, all processes together at most {peak / 1e9:.2f} GB, "
        f"so {(peak - shape.total_bytes) / 1e9:.2f} GB of their own"
    )
    for name, rate in queues(shape, target_device, drafter_device).items():
        print(f"queue {name}: {rate:.1f} GB/s written, carried and read")


if __name__ == "__main__":
    main()
