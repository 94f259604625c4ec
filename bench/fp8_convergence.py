"""The same drafter on the same batches in bf16, with the head in fp8, and all in fp8: where does training end?

    python bench/fp8_convergence.py CONFIG [--runs DIR] [--uses none head all] [KEY=VALUE …]

CONFIG and KEY=VALUE as for `draftmill train`, on one GPU; e.g. configs/quickstart.yaml train.max_steps=800. Prints for
each run loss, accuracy and teacher-forced τ over the last fifth of its log lines, τ decoded for real after training,
and seconds. Runs with another seed=… show how much of a difference is chance.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

KEYS = ("loss", "accuracy", "tau_teacher_forced")


def train(config: str, folder: Path, use: str, overrides: list[str]) -> float:
    """Seconds."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "draftmill", "train", config, f"run_dir={folder}", f"train.fp8={use}"]
    subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def ending(folder: Path) -> dict[str, float]:
    """Means over the last fifth of the log lines, the τ decoded, and how many steps there were."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = lines[-max(len(lines) // 5, 1) :]
    found = {key: sum(line[key] for line in last) / len(last) for key in KEYS}
    checked = json.loads((folder / "status.json").read_text())["decode_check"]
    return {**found, "tau_decoded": checked["tau_decoded"] if checked else float("nan"), "steps": lines[-1]["step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--runs", type=Path, default=Path("runs/fp8"))
    parser.add_argument("--uses", nargs="+", choices=["none", "head", "all"], default=["none", "head", "all"])
    arguments = parser.parse_intermixed_args()
    print("fp8    steps     loss  accuracy   τ forced  τ decoded  seconds")
    for use in arguments.uses:
        folder = arguments.runs / use
        seconds = train(arguments.config, folder, use, arguments.overrides)
        end = ending(folder)
        print(
            f"{use:5} {end['steps']:6,} {end['loss']:8.4f} {end['accuracy']:9.4f} {end['tau_teacher_forced']:10.3f} "
            f"{end['tau_decoded']:10.3f} {seconds:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
