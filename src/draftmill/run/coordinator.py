"""Who computes which batch, where its states land, and when the drafters may have it.

Pure bookkeeping: no processes, no I/O, no tensors, no clock. The supervisor calls it with the time in seconds of any
clock that never runs backwards, and does what the answers say.

A batch is missing → leased → published → delivered → released, and has a slot of its rank's pool from lease to release.
When a lease is lost (the worker is silent, or the drafters were rewound), the batch is missing again, but the slot
stays blocked until that worker reports or is dead, for it may still be writing there.

Why this never locks up: a later batch gets a slot only while all earlier ones hold theirs. So of a pool's slots at most
slots − 1 are with batches later than the smallest missing one; another is free, or blocked, or in training.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lease:
    """One worker's order to compute batch `index` into `slot` of the pool of drafter `rank`."""

    id: int  # unique over the whole run, never used again
    index: int
    rank: int
    slot: int
    worker: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """The states of batch `index` are in `slot` of the pool of drafter `rank`, which may train on them now."""

    rank: int
    index: int
    slot: int


@dataclass(slots=True)
class _Hold:
    """A lease that its worker has not ended yet."""

    lease: Lease
    since: float  # seconds; the worker's last sign of life
    lost: bool = False  # the batch was handed back: the lease only blocks its slot
    silent: bool = False  # ran out, so the worker may hang. A lease lost to a rewind is not silent


@dataclass(slots=True)
class _Pool:
    """The slots of one drafter rank and the batches in them; leased and blocked slots are in none of the three."""

    next: int  # the batch to deliver next; all earlier ones of this rank are delivered or released
    free: list[int]
    published: dict[int, int] = field(default_factory=dict)  # index → slot
    delivered: dict[int, int] = field(default_factory=dict)  # index → slot


class Coordinator:
    """Batches first … end − 1; batch i is of rank i % ranks and step i // batches_per_step. `slots` is per rank."""

    def __init__(
        self,
        *,
        first: int,
        end: int,
        ranks: int,
        slots: int,
        batches_per_step: int,
        lease_seconds: float,
        whole_rounds: bool = False,
    ) -> None:
        """ValueError if the numbers don't fit together.

        whole_rounds: the ranks meet in every micro-step, not only in the last of a step, so each round of `ranks`
        batches goes out together.
        """
        if min(ranks, slots, batches_per_step) < 1:
            raise ValueError(f"must be 1 or more: {ranks=}, {slots=}, {batches_per_step=}")
        if batches_per_step % ranks:
            raise ValueError(f"batches_per_step ({batches_per_step}) must be a multiple of ranks ({ranks})")
        if not 0 <= first <= end or first % batches_per_step or end % batches_per_step:
            raise ValueError(f"must be multiples of {batches_per_step=} with 0 <= first <= end: {first=}, {end=}")
        if not lease_seconds > 0:
            raise ValueError(f"lease_seconds ({lease_seconds}) must be above 0")
        self._first, self._end, self._ranks, self._slots = first, end, ranks, slots
        self._batches_per_step, self._lease_seconds = batches_per_step, lease_seconds
        self._pools = [_Pool(first + rank, list(reversed(range(slots)))) for rank in range(ranks)]
        self._fresh = first  # no batch from here on was ever granted (since the last rewind)
        self._returned: list[int] = []  # heap of batches below `_fresh` that nobody holds
        self._holds: dict[int, _Hold] = {}  # by lease id; at most slots × ranks, so that one may look through all
        self._failures: Counter[int] = Counter()  # by batch index
        self._next_id = 0
        self._whole_rounds = whole_rounds
        self._stopped = False

    def grant(self, worker: str, now: float) -> Lease | None:
        """The smallest missing batch, if its pool has a free slot; never a later one. None: nothing to do now."""
        index = self.next_index
        rank = index % self._ranks
        if self._stopped or index == self._end or not self._pools[rank].free:
            return None
        if self._returned:
            heapq.heappop(self._returned)
        else:
            self._fresh += 1
        lease = Lease(self._next_id, index, rank, self._pools[rank].free.pop(), worker)
        self._next_id += 1
        self._holds[lease.id] = _Hold(lease, since=now)
        return lease

    def renew(self, worker: str, now: float) -> None:
        """A sign of life: the worker's leases have `lease_seconds` again. What is lost stays lost."""
        for hold in self._holds_of(worker):
            hold.since = now

    def complete(self, lease_id: int) -> bool:
        """The states are in the slot. False if the lease was lost: the result is dropped and the slot is free."""
        hold = self._end_lease(lease_id)
        if hold and hold.lost:
            self._give_up(hold)
        elif hold:
            self._pools[hold.lease.rank].published[hold.lease.index] = hold.lease.slot
        return hold is not None and not hold.lost

    def fail(self, lease_id: int) -> int:
        """The worker could not compute it: slot free, batch handed back. Returns how often this batch has failed.

        A lost lease adds nothing to that count. 0 for a lease that has ended: a dead worker's last words.
        """
        hold = self._end_lease(lease_id)
        if not hold:
            return 0
        self._failures[hold.lease.index] += not hold.lost
        self._give_up(hold)
        return self._failures[hold.lease.index]

    def died(self, worker: str) -> list[int]:
        """The process is gone and writes no more: its slots are free. Returns the batches handed back, in order."""
        holds = self._holds_of(worker)
        for hold in holds:
            self._end_lease(hold.lease.id)
            self._give_up(hold)
        return sorted(hold.lease.index for hold in holds if not hold.lost)

    def expire(self, now: float) -> list[Lease]:
        """Takes leases without a sign of life for `lease_seconds` away and returns them. Their slots stay blocked."""
        late = [hold for hold in self._holds.values() if now - hold.since >= self._lease_seconds]
        lost = [hold.lease for hold in late if not hold.lost]
        for lease in lost:
            heapq.heappush(self._returned, lease.index)
        for hold in late:
            hold.lost = hold.silent = True
        return lost

    def blocking(self) -> set[str]:
        """Silent workers that block slots of the full pool where the smallest missing batch must land: kill them.

        A lease lost to a rewind counts only when it has run out as well: till then its worker may be about to report.
        """
        rank = self.next_index % self._ranks
        if self._stopped or self.next_index == self._end or self._pools[rank].free:
            return set()
        return {hold.lease.worker for hold in self._holds.values() if hold.silent and hold.lease.rank == rank}

    def deliver(self) -> list[Delivery]:
        """What may go to the drafters now, in order for each rank.

        The ranks meet in an all-reduce after their last batches of a step. So these are delivered together, and only
        when the whole step is there: a stop never leaves a rank waiting for others.
        """
        deliveries = []
        for rank, pool in enumerate([] if self._stopped else self._pools):
            while (index := pool.next) in pool.published and self._may_go(index):
                slot = pool.delivered[index] = pool.published.pop(index)
                pool.next += self._ranks
                deliveries.append(Delivery(rank, index, slot))
        return deliveries

    def release(self, rank: int, index: int) -> None:
        """The rank has trained on the batch: its slot is free. Only for what was delivered since the last rewind."""
        pool = self._pools[rank]
        assert index in pool.delivered, f"rank {rank} released batch {index}, which is not with it"
        pool.free.append(pool.delivered.pop(index))

    def stop(self) -> int:
        """Grants and deliveries end for good. Returns the number of whole steps delivered, counted from step 0."""
        self._stopped = True
        return self._whole_steps()

    def rewind(self, first: int) -> None:
        """The old drafters are gone; new ones start at batch `first`, and all from there on is computed again.

        What came before is in their checkpoint: it counts as released, even if the old ones had no time to say so.
        The caller drops late messages of theirs. ValueError unless `first` starts a step and all before is delivered.
        """
        last = self._whole_steps() * self._batches_per_step
        if first % self._batches_per_step or not self._first <= first <= last:
            raise ValueError(f"cannot rewind to {first}: only to a step's first batch from {self._first} to {last}")
        for rank, pool in enumerate(self._pools):
            pool.free += [*pool.published.values(), *pool.delivered.values()]
            pool.next, pool.published, pool.delivered = first + rank, {}, {}
        for hold in self._holds.values():
            hold.lost = True
        self._returned.clear()
        self._fresh = first

    @property
    def next_index(self) -> int:
        """The smallest batch that nobody holds; `end` if there is none."""
        return self._returned[0] if self._returned else self._fresh

    @property
    def in_flight(self) -> int:
        """Slots in use over all pools: leased, blocked, published or delivered."""
        return sum(self._slots - len(pool.free) for pool in self._pools)

    @property
    def trained(self) -> int:
        """Batches released since `first`, net of rewinds."""
        return sum((pool.next - self._first) // self._ranks - len(pool.delivered) for pool in self._pools)

    @property
    def finished(self) -> bool:
        """Whether every batch is released."""
        return self.trained == self._end - self._first

    def delivered(self, rank: int) -> int:
        """Batches that are with the rank."""
        return len(self._pools[rank].delivered)

    def outstanding(self, worker: str) -> int:
        """Leases the worker has and has not lost."""
        return sum(not hold.lost for hold in self._holds_of(worker))

    def _holds_of(self, worker: str) -> list[_Hold]:
        return [hold for hold in self._holds.values() if hold.lease.worker == worker]

    def _end_lease(self, lease_id: int) -> _Hold | None:
        """None if it has ended before: the last words of a worker may be read after its death."""
        assert 0 <= lease_id < self._next_id, f"lease {lease_id} was never granted"
        return self._holds.pop(lease_id, None)

    def _give_up(self, hold: _Hold) -> None:
        """Frees the slot and hands the batch back, unless that was done when the lease was lost."""
        self._pools[hold.lease.rank].free.append(hold.lease.slot)
        if not hold.lost:
            heapq.heappush(self._returned, hold.lease.index)

    def _may_go(self, index: int) -> bool:
        start = index - index % self._batches_per_step
        needed = range(start, start + self._batches_per_step)
        if index + self._ranks in needed:  # not the last round
            first = index - index % self._ranks
            needed = range(first, first + self._ranks if self._whole_rounds else first)
        return all(map(self._is_complete, needed))

    def _is_complete(self, index: int) -> bool:
        pool = self._pools[index % self._ranks]
        return index < pool.next or index in pool.published

    def _whole_steps(self) -> int:
        return min(pool.next for pool in self._pools) // self._batches_per_step
