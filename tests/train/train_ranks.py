"""Jobs that several ranks do together, in real processes over gloo, and the records they leave.

    python train_ranks.py FOLDER RANKS JOB …

A job is "kind:name": kind is alone, data or fsdp; name is one of RUNS (a training run) or of CHECKS. Every rank writes
a record of each job to FOLDER as it is done, so a job that fails takes only those behind it along.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from train_tiny import CONFIG, SETTINGS, FakeSource, hidden_batch, make_drafter, make_trainer, matrix

from draftmill.drafter.metrics import zero_sums
from draftmill.drafter.model import Drafter
from draftmill.records import HiddenBatch
from draftmill.train.checkpoint import load_drafter, open_checkpoint, optimizer_tensors
from draftmill.train.optim import make_optimizer
from draftmill.train.parallel import Alone, DataParallel, FullySharded, Parallel
from draftmill.train.step import micro_step
from draftmill.train.trainer import DivergedError, Trainer

Record = dict[str, Any]

SPAWN_SECONDS = 60.0
COLLECTIVE_SECONDS = 25  # shorter, so that a rank which waits in vain says where
NOWHERE = Path("/dev/null/nothing is saved")
SMALL_BUCKET = 3000  # bytes: the tiny drafter makes several


@dataclass(frozen=True)
class Run:
    """One training run. batches: anchor counts per document, of batch i % len. stop_after: batches each rank gets.
    go_on: the same trainer runs once more after a stop. resume: the checkpoint to go on from, in the folder of all."""

    batches: tuple[list[int], ...] = ([3, 2], [1], [6, 1], [0, 2, 2], [4], [1, 1], [5])
    accumulation: int = 4
    steps: int = 5
    broken: tuple[int, ...] = ()
    stop_after: tuple[int, ...] | None = None
    go_on: bool = False
    resume: str | None = None
    log_every: int = 1
    save_every: int = 1000


SECOND = "step-00000002"
RUNS = {
    "whole": Run(save_every=2),
    # case 24, two ranks: batch i is rank i % 2's
    "never": Run(([3, 2], [0]), accumulation=2),
    "alternate": Run(([3], [0], [0], [2]), accumulation=2),
    "tail": Run(([3], [2], [0], [4], [1], [5], [2], [0])),  # an anchor in the first micro-step, none in the last
    "none": Run(([3], [1], *([[0]] * 24)), accumulation=2, steps=13),
    "one_then_none": Run(([3], [1]), accumulation=2, steps=13, stop_after=(1, 1)),
    # states that are NaN: of one rank's batch in steps 1 and 3, and in every step from 2 on
    "broken": Run(broken=(5, 14)),
    "diverged": Run(accumulation=2, steps=50, broken=tuple(range(5, 100, 2))),
    "until_diverged": Run(accumulation=2, steps=50, stop_after=(2, 2)),
    # a stop after 2 whole steps and one of the third step's two batches
    "stopped": Run(stop_after=(5, 5)),
    "from_stopped": Run(resume="{kind}-stopped-0"),
    "stopped_and_on": Run(stop_after=(5, 5), go_on=True),
    "stopped_unevenly": Run(stop_after=(5, 4)),
    "from_stopped_unevenly": Run(resume="{kind}-stopped_unevenly-0"),
    # a log line that covers steps before and after the stop
    "rare_lines": Run(log_every=5),
    "rare_lines_stopped": Run(log_every=5, stop_after=(5, 5)),
    "rare_lines_resumed": Run(log_every=5, resume="{kind}-rare_lines_stopped-0"),
    # checkpoints of another kind of run
    "from_fsdp": Run(resume=f"fsdp-whole-0/{SECOND}"),
    "from_alone": Run(resume=f"alone-whole-0/{SECOND}"),
}


def the_drafter() -> Drafter:
    return make_drafter(intermediate_size=33)  # which no number of ranks divides


def make_parallel(kind: str) -> Parallel:
    if kind == "alone":
        return Alone()
    return DataParallel(SMALL_BUCKET) if kind == "data" else FullySharded()


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put together here and not by what is tested."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in tensors.items()}


def run_trainer(job: str, folder: Path) -> Record:
    """Train as RUNS says. Each rank has a folder of its own for checkpoints, to see who writes there."""
    kind, name = job.split(":")
    run, parallel = RUNS[name], make_parallel(kind)
    lines: list[dict[str, Any]] = []
    saves: list[float] = []
    trainer = make_run(run, kind, parallel, folder / f"{kind}-{name}-{parallel.rank}", lines, saves)
    error, finished = "", None
    try:
        finished = trainer.run()
        if run.go_on:
            assert isinstance(trainer.source, FakeSource)
            trainer.source.should_stop = lambda: False
            finished = trainer.run()
    except DivergedError as diverged:
        error = str(diverged)
    return report(trainer) | {"lines": lines, "saves": len(saves), "error": error, "finished": finished}


def make_run(
    run: Run, kind: str, parallel: Parallel, own: Path, lines: list[dict[str, Any]], saves: list[float]
) -> Trainer:
    source = FakeSource(list(run.batches), set(run.broken))
    if run.stop_after is not None:
        limit = run.stop_after[parallel.rank]
        source.should_stop = lambda: sum(what == "take" for what, _ in source.diary) >= limit
    changes = {"accumulation": run.accumulation, "log_every": run.log_every, "save_every": run.save_every, "keep": 9}
    checkpoint = None if run.resume is None else open_checkpoint(own.parent / run.resume.format(kind=kind))
    trainer = make_trainer(
        own, source, run.steps, config=CONFIG.model_copy(update=changes), parallel=parallel, on_log=lines.append,
        on_save=saves.append, drafter=the_drafter() if checkpoint is None else load_drafter(checkpoint),
    )  # fmt: skip
    if checkpoint is not None:
        trainer.resume(checkpoint)
    return trainer


def report(trainer: Trainer) -> Record:
    p = trainer.progress
    assert isinstance(trainer.source, FakeSource)
    return {
        "weights": whole(trainer.drafter.state_dict()),
        "moments": whole(optimizer_tensors(trainer.optimizer)),
        "left": [name for name, parameter in trainer.drafter.named_parameters() if parameter.grad is not None],
        "diary": trainer.source.diary,
        "progress": {
            "step": p.step,
            "skipped": p.count()["skipped"],
            "in_a_row": p.count()["skipped_in_a_row"],
            "tokens": p.count()["context_tokens"],
        },
    }


# Documents by number, one batch each: their valid anchors. The last has states that are NaN.
DOCUMENTS = (1, 1, 4, 4, 0, 0)
SPLITS = {
    "alike": ((0, 2), (1, 3)),
    "apart": ((0, 1), (2, 3)),
    "uneven": ((0,), (1, 2, 3)),  # for kinds whose ranks do not wait for each other in their layers
    "twice": ((3, 2), (3, 2)),
    "one_of_two": ((3, 2), (4, 4)),
    "one_of_two_and_nan": ((3, 2), (5, 4)),
    "none_of_two": ((4, 4), (5, 4)),
}


def document_batch(number: int) -> HiddenBatch:
    batch = hidden_batch([DOCUMENTS[number]], first=number, index=number)
    return replace(batch, features=batch.features * torch.nan) if number == len(DOCUMENTS) - 1 else batch


def gradient(parallel: Parallel, documents: tuple[int, ...]) -> Record:
    """The gradient of all ranks together, one micro-step per document of this rank."""
    drafter = the_drafter()
    parallel.prepare(drafter, by_autograd=True)
    sums = zero_sums(drafter.spec.block_size)
    for place, number in enumerate(documents):
        with parallel.micro_step(last=place == len(documents) - 1):
            sums = sums + micro_step(
                drafter, document_batch(number), embedding=matrix(), head=matrix(), settings=SETTINGS,
                always_run=parallel.always_run,
            )  # fmt: skip
    sums, _ = parallel.total(sums, torch.tensor(0))
    found = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    return {"gradient": whole(found), "weight": float(sums.totals[1])}


def check_splits(kind: str) -> Record:
    names = [name for name in SPLITS if name != "uneven" or kind == "data"]
    return {name: gradient(make_parallel(kind), SPLITS[name][dist.get_rank()]) for name in names}


def check_shards(kind: str) -> Record:
    """Numbers of weights, of gradients and of moments of each parameter that lie on this rank."""
    parallel = make_parallel(kind)
    trainer = make_run(replace(RUNS["whole"], steps=1), kind, parallel, NOWHERE, [], [])
    counts: dict[str, list[int]] = {}
    sums = trainer._accumulate()
    assert sums is not None
    for name, parameter in trainer.drafter.named_parameters():
        counts[name] = [parameter.numel(), held(parameter.data), held(parameter.grad)]
    trainer._update(*sums)
    for name, parameter in trainer.drafter.named_parameters():
        counts[name] += [held(trainer.optimizer.state[parameter][moment]) for moment in ("exp_avg", "exp_avg_sq")]
    return counts


def held(tensor: Tensor | None) -> int:
    assert tensor is not None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()


def check_sharded_sums(kind: str) -> Record:
    """How many parameters have a summed gradient behind each micro-step of a step."""
    assert kind == "fsdp"
    drafter, parallel = the_drafter(), FullySharded()
    parallel.prepare(drafter, by_autograd=True)
    counts = []
    for last in (False, False, True):
        with parallel.micro_step(last=last):
            batch, matrices = document_batch(2), {"embedding": matrix(), "head": matrix()}
            micro_step(drafter, batch, **matrices, settings=SETTINGS, always_run=True)
        counts.append(sum(parameter.grad is not None for parameter in drafter.parameters()))
    return {"counts": counts}


class Watch:
    """What happens when in a step: "backward", "complete NAME", ["NAME" …] a sum over the ranks begins, "end", "wait"
    for a sum, "totals". A sum is known by its values: those of the next parameters in the order they are to go in."""

    def __init__(self, drafter: Drafter) -> None:
        self.events: list[Any] = []
        self._parameters = list(reversed(list(drafter.named_parameters())))
        self._place = 0
        self._all_reduce, self._backward = dist.all_reduce, Tensor.backward
        for name, parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.events.append(f"complete {name}"))

    @contextmanager
    def on(self) -> Iterator[None]:
        def backward(tensor: Tensor) -> None:
            self.events.append("backward")
            self._backward(tensor)
            self.events.append("end")

        with patch.object(dist, "all_reduce", self._reduce), patch.object(Tensor, "backward", backward):
            yield

    def _reduce(self, tensor: Tensor, **options: Any) -> Any:
        if tensor.dtype == torch.float64:
            self.events.append("totals")
            self._place = 0
            return self._all_reduce(tensor, **options)
        self.events.append(self._names(tensor.flatten()))
        return Mock(wait=Mock(side_effect=partial(self._wait, self._all_reduce(tensor, **options))))

    def _wait(self, work: Any) -> None:
        self.events.append("wait")
        work.wait()

    def _names(self, flat: Tensor) -> list[str]:
        start, values = self._place, torch.empty(0)
        while len(values) < len(flat) and self._place < len(self._parameters):
            grad = self._parameters[self._place][1].grad
            values = torch.cat((values, torch.empty(0) if grad is None else grad.flatten()))
            self._place += 1
        return [name for name, _ in self._parameters[start : self._place]] if torch.equal(values, flat) else ["?"]


def check_watch(kind: str) -> Record:
    assert kind == "data"
    return {
        "whole": watched("whole", SMALL_BUCKET),
        "tail": watched("tail", SMALL_BUCKET),
        "whole, one bucket": watched("whole", 1 << 20),
        "tail, one each": watched("tail", 1),
    }


def watched(name: str, bucket_bytes: int) -> Record:
    """Two steps of a run, two micro-steps each."""
    drafter = the_drafter()
    watch, parallel = Watch(drafter), DataParallel(bucket_bytes)
    config = CONFIG.model_copy(update={"accumulation": 4})
    source = FakeSource(list(RUNS[name].batches))
    trainer = make_trainer(NOWHERE, source, 5, config=config, parallel=parallel, drafter=drafter)
    steps = []
    with watch.on():
        for _ in range(2):
            watch.events = []
            sums = trainer._accumulate()
            assert sums is not None
            trainer._update(*sums)
            steps.append(watch.events)
    return {"steps": steps, "weights": whole(drafter.state_dict())}


CHECKS: dict[str, Callable[[str], Record]] = {
    "splits": check_splits,
    "shards": check_shards,
    "sharded_sums": check_sharded_sums,
    "watch": check_watch,
}


def main() -> None:
    """One process a rank, forked once everything is imported: that takes longer than the jobs."""
    folder, ranks, jobs = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    make_optimizer(make_drafter().parameters(), CONFIG)  # which imports a lot
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=work, args=(folder, rank, ranks, jobs)) for rank in range(ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    sys.exit(any(child.exitcode for child in children))


def work(folder: Path, rank: int, ranks: int, jobs: list[str]) -> None:
    with stderr_of(folder, rank).open("wb") as log:
        os.dup2(log.fileno(), 2)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )  # fmt: skip
    for job in jobs:
        print(job, file=sys.stderr, flush=True)
        dist.barrier()  # a checkpoint of the job before is complete
        kind, name = job.split(":")
        record = run_trainer(job, folder) if name in RUNS else CHECKS[name](kind)
        torch.save(record, folder / f"{job}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def stderr_of(folder: Path, rank: int) -> Path:
    return folder / f"stderr.{rank}"


@dataclass(frozen=True)
class Ranks:
    """What came of a spawn. failure: empty, or how it ended with the last words of every rank."""

    folder: Path
    ranks: int
    failure: str

    def records(self, job: str) -> list[Record]:
        """One per rank. The test fails when a rank did not get that far."""
        paths = [self.folder / f"{job}.{rank}.pt" for rank in range(self.ranks)]
        if not all(path.exists() for path in paths):
            pytest.fail(f"{job} was not done by all ranks\n{self.failure}", pytrace=False)
        return [torch.load(path) for path in paths]


def spawn(folder: Path, ranks: int, jobs: list[str], *, seconds: float = SPAWN_SECONDS) -> Ranks:
    """All ranks end in time or are killed: no test waits for a rank that hangs."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder), str(ranks), *jobs]
    with (folder / "stderr").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=environment, start_new_session=True)
    try:
        status = process.wait(seconds)
        how = f"ended with {status}" if status else ""
    except subprocess.TimeoutExpired:
        how = f"not done within {seconds:g} s"
    finally:
        with suppress(ProcessLookupError):  # nobody left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ranks(folder, ranks, how and f"{how}\n{last_words(folder, ranks)}")


def last_words(folder: Path, ranks: int) -> str:
    logs = [folder / "stderr", *(stderr_of(folder, rank) for rank in range(ranks))]
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs if log.exists())


if __name__ == "__main__":
    main()
