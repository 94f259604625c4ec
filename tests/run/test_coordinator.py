"""The coordinator against a plain model under any order of events, and by example."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftmill.run.coordinator import Coordinator, Delivery, Lease

LEASE_SECONDS = 10.0
WORKERS = ["w0", "w1", "w2"]


def coordinator(**changes: Any) -> Coordinator:
    numbers: dict[str, Any] = {
        "first": 0, "end": 8, "ranks": 1, "slots": 8, "batches_per_step": 1, "lease_seconds": LEASE_SECONDS
    }  # fmt: skip
    return Coordinator(**(numbers | changes))


def grant(c: Coordinator, worker: str = "w0", now: float = 0.0) -> Lease:
    lease = c.grant(worker, now)
    assert lease is not None
    return lease


def grant_all(c: Coordinator, worker: str = "w0", now: float = 0.0) -> list[Lease]:
    leases = []
    while (lease := c.grant(worker, now)) is not None:
        leases.append(lease)
    return leases


def indices(items: list[Delivery] | list[Lease]) -> list[int]:
    return [item.index for item in items]


# Grants


def test_grants_are_in_order_each_in_the_pool_of_its_rank() -> None:
    leases = grant_all(coordinator(ranks=2, slots=2, batches_per_step=4))
    assert [(lease.index, lease.rank, lease.slot) for lease in leases] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert [lease.id for lease in leases] == [0, 1, 2, 3]


def test_a_resumed_run_starts_at_its_first_batch() -> None:
    c = coordinator(first=4, end=8, ranks=2, batches_per_step=4)
    assert indices(grant_all(c)) == [4, 5, 6, 7]
    assert c.next_index == 8


def test_no_later_batch_is_granted_while_the_smallest_has_no_slot() -> None:
    c = coordinator(ranks=2, slots=1, batches_per_step=2)
    leases = grant_all(c)
    assert indices(leases) == [0, 1]
    c.complete(leases[0].id)
    c.complete(leases[1].id)
    c.deliver()
    c.release(1, 1)
    assert c.next_index == 2
    assert c.grant("w0", 0) is None, "batch 3 has a free slot, but batch 2 has not"
    c.release(0, 0)
    assert indices(grant_all(c)) == [2, 3]


def test_a_returned_batch_goes_out_before_fresh_ones() -> None:
    c = coordinator()
    leases = [grant(c) for _ in range(4)]
    for lease in (leases[2], leases[0], leases[3]):
        c.fail(lease.id)
    assert [grant(c).index for _ in range(4)] == [0, 2, 3, 4]


def test_a_rank_that_never_releases_stops_grants_at_its_slots() -> None:
    c = coordinator(slots=3)
    for lease in grant_all(c):
        c.complete(lease.id)
        c.deliver()
    assert c.in_flight == 3
    assert c.grant("w0", 0) is None
    assert c.blocking() == set(), "nobody is silent: this is back-pressure"


def test_ids_are_not_used_again() -> None:
    c = coordinator(slots=1)
    seen = []
    for _ in range(5):
        seen.append(grant(c).id)
        c.fail(seen[-1])
    assert seen == [0, 1, 2, 3, 4]


# Lost leases


def test_a_silent_workers_slot_is_blocked_until_its_late_result() -> None:
    c = coordinator(slots=2)
    lost = grant(c, "silent")
    assert c.expire(LEASE_SECONDS - 0.1) == []
    assert c.expire(LEASE_SECONDS) == [lost]
    assert c.expire(LEASE_SECONDS) == [], "it is lost once"
    again = grant(c, "w0", LEASE_SECONDS)
    assert again.index == lost.index
    assert again.slot != lost.slot
    assert c.grant("w0", LEASE_SECONDS) is None, "the other slot is blocked"
    assert (c.in_flight, c.outstanding("silent"), c.outstanding("w0")) == (2, 0, 1)
    assert not c.complete(lost.id)
    assert c.deliver() == [], "the late result is dropped"
    assert c.in_flight == 1
    assert grant(c, "w0", LEASE_SECONDS).slot == lost.slot


def test_a_late_result_is_dropped_even_if_nobody_took_the_batch_yet() -> None:
    c = coordinator(slots=2)
    lost = grant(c)
    c.expire(LEASE_SECONDS)
    assert not c.complete(lost.id)
    assert grant(c).index == lost.index


def test_a_sign_of_life_keeps_the_leases_of_that_worker_only() -> None:
    c = coordinator()
    kept = [grant(c, "alive"), grant(c, "alive", 3.0)]
    lost = grant(c, "silent")
    c.renew("alive", 9.0)
    c.renew("unknown", 9.0)
    assert c.expire(18.9) == [lost]
    assert c.expire(19.0) == kept


def test_a_grant_is_no_sign_of_life() -> None:
    c = coordinator()
    first, second = grant(c, now=0.0), grant(c, now=6.0)
    assert c.expire(LEASE_SECONDS) == [first]
    assert c.expire(6.0 + LEASE_SECONDS) == [second]


def test_a_sign_of_life_does_not_bring_a_lost_lease_back() -> None:
    c = coordinator()
    lost = grant(c)
    c.expire(LEASE_SECONDS)
    c.renew("w0", LEASE_SECONDS)
    assert not c.complete(lost.id)


def test_silent_workers_block_only_when_the_smallest_missing_batch_has_no_slot() -> None:
    c = coordinator(ranks=2, slots=1, batches_per_step=2)
    grant(c, "a")
    grant(c, "b")
    assert c.blocking() == set()
    c.expire(LEASE_SECONDS)
    assert c.blocking() == {"a"}, "batch 0 waits for the slot of a; b blocks the other pool"
    assert c.died("a") == [], "its batch was handed back before"
    assert c.blocking() == set()
    grant(c, "w0", LEASE_SECONDS)
    assert c.blocking() == {"b"}


def test_a_blocked_pool_is_freed_by_killing() -> None:
    c = coordinator(slots=2)
    grant(c, "a")
    grant(c, "b")
    c.expire(LEASE_SECONDS)
    assert c.grant("w0", LEASE_SECONDS) is None
    assert c.blocking() == {"a", "b"}
    c.died("b")
    assert grant(c, "w0", LEASE_SECONDS).index == 0


def test_death_gives_slots_and_batches_back_at_once() -> None:
    c = coordinator(slots=4)
    leases = [grant(c, worker) for worker in ("dead", "w0", "dead", "dead")]
    c.complete(leases[3].id)
    assert c.died("dead") == [0, 2]
    assert (c.in_flight, c.outstanding("dead"), c.next_index) == (2, 0, 0)
    assert indices([grant(c), grant(c)]) == [0, 2]
    assert c.died("dead") == []
    assert c.died("unknown") == []


def test_words_of_the_dead_change_nothing() -> None:
    c = coordinator()
    lease = grant(c, "dead")
    c.died("dead")
    again = grant(c)
    assert not c.complete(lease.id)
    assert c.fail(lease.id) == 0
    assert (c.in_flight, c.delivered(0)) == (1, 0)
    assert c.complete(again.id)
    assert not c.complete(again.id), "told twice"
    assert (c.in_flight, c.delivered(0)) == (1, 0)


def test_failures_are_counted_for_each_batch() -> None:
    c = coordinator(slots=4)
    other = [grant(c), grant(c)][1]
    assert c.fail(0) == 1
    assert c.fail(grant(c, "b").id) == 2
    assert c.fail(other.id) == 1
    lost = grant(c, "silent")
    c.expire(LEASE_SECONDS)
    assert lost.index == 0
    assert c.fail(lost.id) == 2, "a lost lease adds nothing"
    assert c.in_flight == 0
    assert c.fail(grant(c, "b").id) == 3


# Deliveries


def test_delivery_is_in_order_for_each_rank() -> None:
    c = coordinator(ranks=2, slots=4, batches_per_step=8)
    leases = grant_all(c)
    for n in (2, 3, 1):
        c.complete(leases[n].id)
    assert c.deliver() == [Delivery(1, 1, leases[1].slot), Delivery(1, 3, leases[3].slot)]
    assert c.deliver() == []
    c.complete(leases[0].id)
    assert c.deliver() == [Delivery(0, 0, leases[0].slot), Delivery(0, 2, leases[2].slot)]
    assert c.in_flight == 8


def test_the_last_round_waits_for_the_whole_step_and_goes_together() -> None:
    c = coordinator(end=12, ranks=2, slots=6, batches_per_step=6)
    leases = grant_all(c)
    for n in (0, 2, 4, 6, 1, 5):
        c.complete(leases[n].id)
    assert indices(c.deliver()) == [0, 2, 1], "4 and 5 wait for 3, and 6 waits for 4"
    c.release(0, 0)
    c.complete(leases[3].id)
    assert sorted(indices(c.deliver())) == [3, 4, 5, 6]


def test_with_one_round_a_step_all_ranks_wait_for_each_other() -> None:
    c = coordinator(ranks=4, batches_per_step=4)
    leases = grant_all(c)
    for n in (3, 0, 1):
        c.complete(leases[n].id)
        assert c.deliver() == []
    c.complete(leases[2].id)
    assert indices(c.deliver()) == [0, 1, 2, 3]


def test_the_run_is_finished_when_all_is_released() -> None:
    c = coordinator(first=2, end=4)
    for lease in grant_all(c):
        c.complete(lease.id)
    c.deliver()
    c.release(0, 2)
    assert (c.trained, c.finished) == (1, False)
    c.release(0, 3)
    assert (c.trained, c.finished, c.in_flight) == (2, True, 0)
    assert coordinator(first=4, end=4).finished


# Stop


def test_stop_in_the_middle_of_a_step_returns_the_whole_steps() -> None:
    c = coordinator(first=8, end=24, ranks=2, batches_per_step=4)
    leases = grant_all(c)
    for n in range(6):
        c.complete(leases[n].id)
    assert len(c.deliver()) == 6
    assert c.stop() == 3, "steps 0 and 1 were trained before, step 2 is delivered, step 3 half"
    c.complete(leases[6].id)
    c.complete(leases[7].id)
    c.fail(leases[8].id)
    assert c.deliver() == []
    assert c.grant("w0", 0) is None
    assert c.stop() == 3
    for index in (8, 9, 10, 11):
        c.release(index % 2, index)


def test_stop_before_anything_is_delivered_returns_the_steps_trained_before() -> None:
    c = coordinator(first=4, ranks=2, batches_per_step=4)
    c.complete(grant(c).id)
    assert c.stop() == 1


def test_nobody_is_killed_for_a_stopped_run() -> None:
    c = coordinator(slots=1)
    grant(c)
    c.expire(LEASE_SECONDS)
    assert c.blocking() == {"w0"}
    c.stop()
    assert c.blocking() == set()


# Rewind


def test_rewind_computes_everything_from_there_again() -> None:
    c = coordinator(ranks=2, slots=3, batches_per_step=2)
    leases = grant_all(c)  # 0 … 5
    for n in range(5):
        c.complete(leases[n].id)
    assert indices(c.deliver()) == [0, 2, 1, 3]
    c.release(0, 0)
    c.release(1, 1)
    c.release(1, 3)
    assert c.trained == 3
    c.rewind(2)
    after = (c.trained, c.next_index, c.delivered(0), c.in_flight)
    assert after == (2, 2, 0, 1), "the lease of batch 5 blocks its slot"
    assert not c.complete(leases[5].id)
    again = grant_all(c)
    assert indices(again) == [2, 3, 4, 5, 6, 7]
    assert min(lease.id for lease in again) > max(lease.id for lease in leases)
    for lease in again:
        c.complete(lease.id)
    assert sorted(indices(c.deliver())) == [2, 3, 4, 5, 6, 7]


def test_rewind_counts_what_came_before_as_released() -> None:
    c = coordinator(slots=2)
    for lease in grant_all(c):
        c.complete(lease.id)
    c.deliver()
    c.rewind(1)
    assert (c.trained, c.in_flight) == (1, 0), "batch 0 is in the checkpoint; its drafter had no time to release it"
    with pytest.raises(AssertionError, match="released batch 0"):
        c.release(0, 0)


def test_rewind_forgets_batches_that_were_handed_back() -> None:
    c = coordinator(slots=3)
    for lease in grant_all(c):
        c.fail(lease.id)
    c.rewind(0)
    assert indices(grant_all(c)) == [0, 1, 2]


def test_workers_at_work_are_not_killed_for_a_rewind() -> None:
    c = coordinator(slots=1)
    lost = grant(c, "busy")
    c.rewind(0)
    assert c.grant("w0", 1.0) is None
    assert c.blocking() == set()
    c.renew("busy", 5.0)
    assert c.expire(14.9) == []
    assert c.blocking() == set()
    assert c.expire(15.0) == [], "the lease was lost before"
    assert c.blocking() == {"busy"}
    assert c.fail(lost.id) == 0
    assert (c.blocking(), grant(c).index) == (set(), 0)


def test_rewind_to_the_end_of_what_is_delivered_keeps_it() -> None:
    c = coordinator(slots=2)
    for lease in grant_all(c):
        c.complete(lease.id)
    c.deliver()
    c.rewind(2)
    assert (c.trained, c.next_index, c.in_flight) == (2, 2, 0)


# Misuse


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slots": 0}, "1 or more: .*slots=0"),
        ({"ranks": 0}, "1 or more: ranks=0"),
        ({"batches_per_step": 0}, "1 or more: .*batches_per_step=0"),
        ({"ranks": 3, "batches_per_step": 4}, r"batches_per_step \(4\) must be a multiple of ranks \(3\)"),
        ({"first": 2, "batches_per_step": 4}, "multiples of batches_per_step=4 .* first=2"),
        ({"end": 6, "batches_per_step": 4}, "multiples of batches_per_step=4 .* end=6"),
        ({"first": 9}, "first <= end: first=9, end=8"),
        ({"first": -1}, "first=-1"),
        ({"lease_seconds": 0}, r"lease_seconds \(0\) must be above 0"),
        ({"lease_seconds": float("nan")}, "above 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        coordinator(**changes)


def test_release_of_what_was_not_delivered_is_a_bug() -> None:
    c = coordinator(ranks=2, batches_per_step=2)
    leases = grant_all(c)
    for index in (0, 1):
        c.complete(leases[index].id)
    with pytest.raises(AssertionError, match="rank 0 released batch 0"):
        c.release(0, 0)  # published only
    c.deliver()
    with pytest.raises(AssertionError, match="rank 1 released batch 0"):
        c.release(1, 0)
    c.release(0, 0)
    with pytest.raises(AssertionError, match="rank 0 released batch 0"):
        c.release(0, 0)  # twice


def test_a_lease_that_was_never_granted_is_a_bug() -> None:
    c = coordinator()
    for call in (c.complete, c.fail):
        for lease_id in (0, -1):
            with pytest.raises(AssertionError, match="never granted"):
                call(lease_id)


def test_rewind_needs_a_step_that_was_reached() -> None:
    c = coordinator(first=2, ranks=1, batches_per_step=2)
    for lease in grant_all(c)[:3]:
        c.complete(lease.id)
    c.deliver()
    for first in (0, 3, 6):
        with pytest.raises(ValueError, match="from 2 to 4"):
            c.rewind(first)
    c.rewind(4)


# The module


def test_the_module_imports_no_torch() -> None:
    code = "import sys, draftmill.run.coordinator; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_call_costs_the_same_in_a_long_run() -> None:
    """60,000 batches, every eleventh lost once: well below a millisecond a batch even on a slow machine."""
    c = coordinator(end=60_032, ranks=8, slots=32, batches_per_step=64)
    started = time.monotonic()
    queue: list[Lease] = []
    while not c.finished:
        queue += grant_all(c, f"w{len(queue) % 16}")
        for n, lease in enumerate(queue):
            if n % 11 == 3:
                c.fail(lease.id)
            else:
                c.complete(lease.id)
        queue = []
        for delivery in c.deliver():
            c.release(delivery.rank, delivery.index)
    assert c.in_flight == 0
    assert time.monotonic() - started < 30


# Any order of events


class Model:
    """The plain reference: the state of every batch and every lease, searched from end to end on each question."""

    def __init__(self, first: int, end: int, ranks: int, slots: int, batches_per_step: int) -> None:
        self.first, self.end, self.ranks, self.slots, self.batches_per_step = first, end, ranks, slots, batches_per_step
        self.state = dict.fromkeys(range(first, end), "missing")
        self.slot: dict[int, int] = {}  # of published and delivered batches
        self.leases: dict[int, Lease] = {}
        self.since: dict[int, float] = {}
        self.lost: set[int] = set()
        self.silent: set[int] = set()
        self.failures = dict.fromkeys(range(first, end), 0)
        self.stopped = False

    def of(self, worker: str) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.worker == worker]

    def holders(self) -> list[tuple[int, int]]:
        """(rank, slot) of everything that uses a slot."""
        leased = [(lease.rank, lease.slot) for lease in self.leases.values()]
        return leased + [(index % self.ranks, slot) for index, slot in self.slot.items()]

    def in_use(self, rank: int) -> int:
        return sum(holder[0] == rank for holder in self.holders())

    def missing(self) -> int:
        return min((index for index, state in self.state.items() if state == "missing"), default=self.end)

    def grantable(self) -> int | None:
        index = self.missing()
        free = index < self.end and not self.stopped and self.in_use(index % self.ranks) < self.slots
        return index if free else None

    def drop(self, lease: Lease) -> None:
        """The worker no longer touches the slot."""
        del self.leases[lease.id]
        if lease.id not in self.lost:
            self.state[lease.index] = "missing"

    def blocking(self) -> set[str]:
        index = self.missing()
        if self.stopped or index == self.end or self.grantable() is not None:
            return set()
        silent = [self.leases[lease_id] for lease_id in self.silent & self.leases.keys()]
        return {lease.worker for lease in silent if lease.rank == index % self.ranks}

    def deliverable(self) -> set[int]:
        """Walks the ranks' queues until nothing moves; the gate looks at the whole step."""
        gone = {index for index, state in self.state.items() if state in ("delivered", "released")}
        there = gone | {index for index, state in self.state.items() if state == "published"}
        for index in sorted(self.state):
            step = index // self.batches_per_step
            batches = range(step * self.batches_per_step, (step + 1) * self.batches_per_step)
            is_last = index + self.ranks not in batches
            in_order = index - self.ranks in gone or index - self.ranks < self.first
            if index in there and in_order and (not is_last or there.issuperset(batches)):
                gone.add(index)
        return set() if self.stopped else {index for index in gone if self.state[index] == "published"}

    def whole_steps(self) -> int:
        for step in range(self.first // self.batches_per_step, self.end // self.batches_per_step):
            batches = range(step * self.batches_per_step, (step + 1) * self.batches_per_step)
            if any(self.state[index] not in ("delivered", "released") for index in batches):
                return step
        return self.end // self.batches_per_step


class AnyOrder(RuleBasedStateMachine):
    """Every call goes to the coordinator and to the model. At the end the run is driven home."""

    @initialize(
        ranks=st.integers(1, 3),
        rounds=st.integers(1, 3),
        slots=st.integers(1, 3),
        first_step=st.integers(0, 2),
        steps=st.integers(1, 4),
        workers_report=st.booleans(),
    )
    def start(self, ranks: int, rounds: int, slots: int, first_step: int, steps: int, workers_report: bool) -> None:
        step = ranks * rounds
        self.m = Model(first_step * step, (first_step + steps) * step, ranks, slots, step)
        self.c = Coordinator(
            first=self.m.first,
            end=self.m.end,
            ranks=ranks,
            slots=slots,
            batches_per_step=step,
            lease_seconds=LEASE_SECONDS,
        )
        self.workers_report = workers_report
        self.now = 0.0
        self.ids: set[int] = set()
        self.with_rank: list[list[int]] = [[] for _ in range(ranks)]  # delivered, in order of delivery
        self.trained: list[list[int]] = [[] for _ in range(ranks)]  # in order of training, net of rewinds

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 9))
    def grant_some(self, worker: str, count: int) -> None:
        for _ in range(count):
            self.grant(worker)

    def grant(self, worker: str) -> Lease | None:
        expected = self.m.grantable()
        lease = self.c.grant(worker, self.now)
        assert (lease and lease.index) == expected
        if lease is None:
            return None
        assert lease.id not in self.ids
        assert lease.worker == worker
        assert lease.rank == lease.index % self.m.ranks
        assert 0 <= lease.slot < self.m.slots
        assert (lease.rank, lease.slot) not in self.m.holders(), "two holders of one slot"
        self.ids.add(lease.id)
        self.m.leases[lease.id], self.m.since[lease.id] = lease, self.now
        self.m.state[lease.index] = "leased"
        return lease

    def pick(self, data: st.DataObject) -> Lease:
        return self.m.leases[data.draw(st.sampled_from(sorted(self.m.leases)), "lease")]

    @precondition(lambda self: self.m.leases)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.complete_lease(self.pick(data))

    @precondition(lambda self: self.m.leases)
    @rule()
    def complete_all(self) -> None:
        for lease in list(self.m.leases.values()):
            self.complete_lease(lease)

    def complete_lease(self, lease: Lease) -> None:
        is_lost = lease.id in self.m.lost
        assert self.c.complete(lease.id) is not is_lost
        self.m.drop(lease)
        if not is_lost:
            self.m.state[lease.index] = "published"
            self.m.slot[lease.index] = lease.slot

    @precondition(lambda self: self.m.leases)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        lease = self.pick(data)
        self.m.failures[lease.index] += lease.id not in self.m.lost
        assert self.c.fail(lease.id) == self.m.failures[lease.index]
        self.m.drop(lease)

    @precondition(lambda self: self.ids - self.m.leases.keys())
    @rule(data=st.data(), fails=st.booleans())
    def repeat_old_words(self, data: st.DataObject, fails: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.ids - self.m.leases.keys())), "ended lease")
        if fails:
            assert self.c.fail(lease_id) == 0
        else:
            assert not self.c.complete(lease_id)

    @rule(worker=st.sampled_from(WORKERS), seconds=st.sampled_from([0.0, 6.0]))
    def renew(self, worker: str, seconds: float) -> None:
        self.now += seconds
        self.c.renew(worker, self.now)
        for lease in self.m.of(worker):
            self.m.since[lease.id] = self.now

    @rule(seconds=st.sampled_from([4.0, 6.0, LEASE_SECONDS]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        late = [lease for lease in self.m.leases.values() if self.now - self.m.since[lease.id] >= LEASE_SECONDS]
        expected = [lease for lease in late if lease.id not in self.m.lost]
        assert self.c.expire(self.now) == expected
        self.m.state |= {lease.index: "missing" for lease in expected}
        self.m.lost |= {lease.id for lease in late}
        self.m.silent |= {lease.id for lease in late}

    @rule(worker=st.sampled_from(WORKERS))
    def died(self, worker: str) -> None:
        leases = self.m.of(worker)
        assert self.c.died(worker) == sorted(lease.index for lease in leases if lease.id not in self.m.lost)
        for lease in leases:
            self.m.drop(lease)

    @rule()
    def deliver(self) -> None:
        expected = self.m.deliverable()
        deliveries = self.c.deliver()
        assert len(deliveries) == len(expected)
        assert {d.index for d in deliveries} == expected
        for d in deliveries:
            assert d.rank == d.index % self.m.ranks
            assert d.slot == self.m.slot[d.index]
            self.m.state[d.index] = "delivered"
            self.with_rank[d.rank].append(d.index)
            assert self.with_rank[d.rank] == sorted(set(self.with_rank[d.rank])), "not in order"
        self.check_that_ranks_meet()

    def check_that_ranks_meet(self) -> None:
        """Either all ranks can reach the all-reduce of a step or none, wherever a stop comes."""
        last = [index - index % self.m.ranks for rank in self.with_rank for index in rank if self.is_last(index)]
        assert all(last.count(index) in (0, self.m.ranks) for index in last)

    def is_last(self, index: int) -> bool:
        return index % self.m.batches_per_step >= self.m.batches_per_step - self.m.ranks

    @precondition(lambda self: "delivered" in self.m.state.values())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """The rank trains the oldest batch that is with it."""
        self.train(data.draw(st.sampled_from(self.ready()), "batch"))

    def train(self, index: int) -> None:
        rank = index % self.m.ranks
        self.c.release(rank, index)
        del self.m.slot[index]
        self.m.state[index] = "released"
        self.trained[rank].append(index)

    def ready(self) -> list[int]:
        delivered = [index for index, state in self.m.state.items() if state == "delivered"]
        oldest: dict[int, int] = {}
        for index in delivered:
            oldest.setdefault(index % self.m.ranks, index)
        return list(oldest.values())

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(self.m.first // self.m.batches_per_step, self.m.whole_steps()), "step")
        first = step * self.m.batches_per_step
        self.c.rewind(first)
        for index in self.m.state:
            self.m.state[index] = "released" if index < first else "missing"
        self.m.slot.clear()
        self.m.lost |= self.m.leases.keys()
        for rank in range(self.m.ranks):
            before = list(range(self.m.first + rank, first, self.m.ranks))
            assert self.trained[rank][: len(before)] == before[: len(self.trained[rank])]
            self.trained[rank], self.with_rank[rank] = list(before), list(before)

    @precondition(lambda self: len(self.ids) > 8)
    @rule()
    def stop(self) -> None:
        steps = self.m.whole_steps()
        assert self.c.stop() == steps
        self.m.stopped = True

    @invariant()
    def agrees_with_the_model(self) -> None:
        holders = self.m.holders()
        assert len(set(holders)) == len(holders), "two holders of one slot"
        assert all(self.m.in_use(rank) <= self.m.slots for rank in range(self.m.ranks))
        assert self.c.in_flight == len(holders)
        assert self.c.next_index == self.m.missing()
        assert self.c.blocking() == self.m.blocking()
        states = list(self.m.state.values())
        assert self.c.trained == states.count("released")
        assert self.c.finished is (set(states) <= {"released"})
        with_ranks = [index % self.m.ranks for index, state in self.m.state.items() if state == "delivered"]
        assert [self.c.delivered(rank) for rank in range(self.m.ranks)] == [*map(with_ranks.count, range(self.m.ranks))]
        for worker in WORKERS:
            assert self.c.outstanding(worker) == sum(lease.id not in self.m.lost for lease in self.m.of(worker))

    def teardown(self) -> None:
        """The run can end: all workers report, or all hang and those that block are killed. One more does the rest."""
        if not hasattr(self, "m"):
            return
        if self.workers_report:
            self.complete_all()
        for _ in range(3 * (self.m.end - self.m.first) + 10):
            self.expire(LEASE_SECONDS)
            for worker in sorted(self.c.blocking()):
                self.died(worker)
            while (lease := self.grant("last")) is not None:
                self.complete_lease(lease)
            self.deliver()
            while ready := self.ready():
                self.train(ready[0])
            self.agrees_with_the_model()
            if self.c.finished or self.m.stopped:
                break
        for worker in WORKERS:
            self.died(worker)
        self.check_the_end()

    def check_the_end(self) -> None:
        self.agrees_with_the_model()
        if self.m.stopped:
            assert self.c.in_flight == list(self.m.state.values()).count("published")
            end = self.c.stop() * self.m.batches_per_step
            assert all(self.m.state[index] == "released" for index in range(self.m.first, end))
            return
        assert self.c.finished
        assert self.c.in_flight == 0
        for rank in range(self.m.ranks):
            assert self.trained[rank] == list(range(self.m.first + rank, self.m.end, self.m.ranks))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_whole_rounds_go_out_together_when_ranks_meet_in_every_micro_step() -> None:
    """Two ranks, three rounds a step. Without whole_rounds rank 0's first batch would go alone."""
    for whole_rounds, early in ((False, [0]), (True, [])):
        coordinator = Coordinator(
            first=0, end=12, ranks=2, slots=3, batches_per_step=6, lease_seconds=10.0, whole_rounds=whole_rounds
        )
        leases = [coordinator.grant("t", 0.0) for _ in range(6)]
        assert all(leases)
        coordinator.complete(leases[0].id)
        assert [delivery.index for delivery in coordinator.deliver()] == early
        coordinator.complete(leases[2].id)  # rank 0's second round
        coordinator.complete(leases[1].id)
        delivered = early + [delivery.index for delivery in coordinator.deliver()]
        assert sorted(delivered) == ([0, 1, 2] if not whole_rounds else [0, 1])
        for lease in leases[3:]:
            coordinator.complete(lease.id)
        delivered += [delivery.index for delivery in coordinator.deliver()]
        assert sorted(delivered) == [0, 1, 2, 3, 4, 5]


@given(data=st.data(), ranks=st.integers(1, 3), rounds=st.integers(1, 3), slots=st.integers(1, 3))
def test_whole_rounds_never_give_one_rank_more_than_another(
    data: st.DataObject, ranks: int, rounds: int, slots: int
) -> None:
    step = ranks * rounds
    coordinator = Coordinator(
        first=0, end=3 * step, ranks=ranks, slots=slots, batches_per_step=step, lease_seconds=1e9, whole_rounds=True
    )
    leased: list[Lease] = []
    delivered: dict[int, int] = dict.fromkeys(range(ranks), 0)
    held: list[tuple[int, int]] = []
    while not coordinator.finished:
        while lease := coordinator.grant("t", 0.0):
            leased.append(lease)
        if leased and (not held or data.draw(st.booleans())):
            coordinator.complete(leased.pop(data.draw(st.integers(0, len(leased) - 1))).id)
        elif held:
            coordinator.release(*held.pop(0))
        for delivery in coordinator.deliver():
            delivered[delivery.rank] += 1
            held.append((delivery.rank, delivery.index))
        assert len(set(delivered.values())) == 1
