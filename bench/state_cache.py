"""How fast hidden states go to the disk and come back, against the file system alone.

    python bench/state_cache.py FOLDER [--megabytes 100] [--bins 20]

FOLDER: a new folder on the disk in question. Writes --bins bins of --megabytes through `StateCache.keep`, then reads
each through `StateCache.load` (from the page cache, most likely). Prints GB/s, the same for the checksum alone, and for
the time that flushing each file would have added.
"""

from __future__ import annotations

import argparse
import os
import time
import zlib
from pathlib import Path

import torch

from draftmill.target.cache import CacheIdentity, open_cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--bins", type=int, default=20)
    arguments = parser.parse_args()
    taps, hidden = (1, 2, 3, 4, 5), 1024
    tokens = arguments.megabytes * 10**6 // (len(taps) * hidden * 2)
    features = torch.randn(tokens, len(taps) * hidden).bfloat16()
    identity = CacheIdentity("bench", "bench", "bfloat16", "packed", taps, hidden, "bench", tokens, 0)
    cache = open_cache(
        arguments.folder, identity, slot_bytes=features.nbytes, bins=arguments.bins, limit_bytes=None, warn=print
    )
    total = features.nbytes * arguments.bins / 1e9
    keep = load = flush = checksum = 0.0
    for number in range(arguments.bins):
        started = time.perf_counter()
        cache.keep(number, features)
        kept = time.perf_counter()
        with (arguments.folder / f"bin-{number:08d}.safetensors").open("rb") as file:
            os.fsync(file.fileno())
        keep, flush = keep + kept - started, flush + time.perf_counter() - kept
    into = torch.empty_like(features)
    for number in range(arguments.bins):
        started = time.perf_counter()
        assert cache.load(number, into)
        loaded = time.perf_counter()
        zlib.crc32(memoryview(into.view(torch.uint8).numpy()))
        load, checksum = load + loaded - started, checksum + time.perf_counter() - loaded
    assert torch.equal(into, features)
    print(f"keep {total / keep:.2f} GB/s; with a flush of each file it would be {total / (keep + flush):.2f}")
    print(f"load {total / load:.2f} GB/s; the checksum alone {total / checksum:.2f}")


if __name__ == "__main__":
    main()
