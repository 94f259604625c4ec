"""Which documents form which batch: fixed bins, made once, in another order each epoch.

Everything here is a pure function of (data set, token budget, seed), so a run's place is one integer.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from draftmill.data.prepared import PreparedSet
from draftmill.errors import UserError
from draftmill.records import PADDING_DOCUMENT, TokenBatch

OPEN_BINS = 1024  # bounds the search for a place; more of them gains nothing measurable

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bins:
    """Groups of documents. Bin b holds members[starts[b] : starts[b + 1]], in this order.

    members [n] int64 document numbers, each once; starts [bins + 1] int64
    """

    members: Numbers
    starts: Numbers

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> Numbers:
        if not 0 <= number < len(self):
            raise IndexError(f"bin {number} of {len(self)}")
        return self.members[self.starts[number] : self.starts[number + 1]]


def seeded_order(count: int, *key: object) -> Numbers:
    """A permutation of 0…count−1 that depends on the key alone.

    Sorts raw Philox output: numpy keeps that stream the same in every version, which it does not promise for
    `Generator.permutation`.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    stream = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8"))
    return np.argsort(stream.random_raw(count), kind="stable").astype(np.int64)


def pack(lengths: Numbers, token_budget: int, seed: int) -> Bins:
    """Puts each document into one bin of at most token_budget tokens; longer ones count as token_budget.

    Online best fit over a seeded shuffle: each document goes into the open bin it fills best, or opens a new one. The
    shuffle mixes sources within a bin. O(n log OPEN_BINS).
    """
    order = seeded_order(len(lengths), "pack", seed)
    sizes = np.minimum(lengths, token_budget)[order].tolist()
    bin_of = np.empty(len(sizes), dtype=np.int64)
    open_bins: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    bins = 0
    for place, size in enumerate(sizes):
        slot = bisect_left(open_bins, (size, -1))
        if slot < len(open_bins):
            free, number = open_bins.pop(slot)
        else:
            free, number = token_budget, bins
            bins += 1
        bin_of[place] = number
        if free > size:
            insort(open_bins, (free - size, number))
            if len(open_bins) > OPEN_BINS:
                del open_bins[0]  # the fullest
    counts = np.bincount(bin_of, minlength=bins)
    members = order[np.argsort(bin_of, kind="stable")]
    return Bins(members, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


class BatchPlan:
    """The batches of a whole run, by index. Batch i is always the same documents in the same places.

    batches_per_epoch    number of bins
    padding_share        padding tokens / all tokens of an epoch
    cut_documents        documents longer than the budget, of which only the first token_budget tokens are used
    left_out_documents   documents with nothing to train within the budget; in no batch
    """

    def __init__(self, prepared: PreparedSet, token_budget: int, seed: int) -> None:
        self.prepared = prepared
        self.token_budget = token_budget
        self.seed = seed
        # The pair (first_anchor, first_anchor + 1) must lie within the budget.
        usable = np.flatnonzero(prepared.first_anchors + 1 < token_budget)
        if not len(usable):
            raise UserError(
                f"{prepared.folder}: no document has two trained tokens within {token_budget} tokens, so there is "
                f"no batch to train. Raise `data.token_budget` (longest document: {prepared.info.longest})."
            )
        lengths = prepared.lengths[usable]
        bins = pack(lengths, token_budget, seed)
        self._bins = Bins(usable[bins.members], bins.starts)
        self.left_out_documents = len(prepared) - len(usable)
        self.cut_documents = int((lengths > token_budget).sum())
        self.batches_per_epoch = len(bins)
        used_tokens = int(np.minimum(lengths, token_budget).sum())
        self.padding_share = 1 - used_tokens / (len(bins) * token_budget)
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def locate(self, index: int) -> tuple[int, int]:
        """(epoch, bin) of a batch of the run; any index ≥ 0."""
        if index < 0:
            raise ValueError(f"batch index {index} is negative")
        epoch, place = divmod(index, self.batches_per_epoch)
        return epoch, int(self._order(epoch)[place])

    def batch(self, index: int) -> TokenBatch:
        """The batch at this place of the run, all tensors on the CPU."""
        epoch, number = self.locate(index)
        members = self._bins[number]
        ids = np.zeros(self.token_budget, dtype=np.int32)
        mask = np.zeros(self.token_budget, dtype=np.bool_)
        positions = np.zeros(self.token_budget, dtype=np.int32)
        documents = np.full(self.token_budget, PADDING_DOCUMENT, dtype=np.int32)
        start = 0
        for place, member in enumerate(members):
            document_ids, document_mask = self.prepared.document(int(member))
            end = start + min(len(document_ids), self.token_budget)
            ids[start:end] = document_ids[: end - start]
            mask[start:end] = document_mask[: end - start]
            positions[start:end] = np.arange(end - start)
            documents[start:end] = place
            start = end
        return TokenBatch(
            input_ids=torch.from_numpy(ids),
            loss_mask=torch.from_numpy(mask),
            position_ids=torch.from_numpy(positions),
            document_ids=torch.from_numpy(documents),
            documents=tuple(members.tolist()),
            index=index,
            bin=number,
            epoch=epoch,
        )

    def _epoch_order(self, epoch: int) -> Numbers:
        return seeded_order(self.batches_per_epoch, "epoch", self.prepared.info.fingerprint, self.seed, epoch)
