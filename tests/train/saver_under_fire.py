"""Saves checkpoints in a loop in child processes, kills each at a random moment and looks at what is on the disk.

    python saver_under_fire.py FOLDER KILLS SEED

A child goes on where the latest checkpoint says and fills all weights and moments with the step's number. Prints one
line of JSON per kill: the step found, the steps whose save had returned and those begun, and whether the values fit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from train_tiny import CONFIG, make_drafter

from draftmill.train.checkpoint import find_latest, optimizer_tensors, save_checkpoint
from draftmill.train.optim import make_optimizer


def save_for_ever(folder: Path, diary: int) -> None:
    latest, _ = find_latest(folder)
    step = 0 if latest is None else latest.step
    drafter = make_drafter()
    optimizer = make_optimizer(drafter.parameters(), CONFIG)
    while True:
        step += 1
        for parameter in drafter.parameters():
            parameter.data.fill_(step)
            optimizer.state[parameter] = {"exp_avg": torch.full_like(parameter, step), "step": torch.tensor(1.0 * step)}
        os.write(diary, f"begin {step}\n".encode())
        moments = optimizer_tensors(optimizer)
        save_checkpoint(folder, step, drafter.spec, drafter.state_dict(), moments, {"mark": step}, keep=2)
        os.write(diary, f"done {step}\n".encode())


def values_fit(path: Path, step: int) -> bool:
    tensors = load_file(path / "drafter.safetensors") | load_file(path / "optimizer.safetensors")
    return len(tensors) > 40 and all(bool((value == step).all()) for value in tensors.values())


def main() -> None:
    folder, kills, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    make_optimizer(make_drafter().parameters(), CONFIG)  # imports what the children would each import for themselves
    for _ in range(kills):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            save_for_ever(folder, write_end)
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            lines = [pipe.readline()]  # the first save has begun
            time.sleep(draw.uniform(0.0, 0.15))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            lines += pipe.readlines()
        steps: dict[str, int] = {"begin": 0, "done": 0}
        for line in lines:
            what, step = line.split()
            steps[what] = int(step)
        latest, rejected = find_latest(folder)
        found = 0 if latest is None else latest.step
        fits = latest is None or (latest.state["mark"] == found and values_fit(latest.path, found))
        print(json.dumps(steps | {"found": found, "fits": fits, "rejected": rejected}), flush=True)


if __name__ == "__main__":
    main()
