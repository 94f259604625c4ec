"""Speculative sampling keeps the target's distribution. Every test is seeded; a wrong rule fails by far."""

from __future__ import annotations

from itertools import product

import pytest
import tiny
import torch
from torch import Tensor, nn

from draftmill.evaluate.decode import decode
from draftmill.evaluate.plain import plain
from draftmill.evaluate.sampling import draw, probabilities, residual, verify_greedy, verify_sampled

MASK = 7


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Σ (observed − expected)² / expected, cells with an expectation below 5 joined into one."""
    total = counts.sum()
    wanted = expected * total
    rare = wanted < 5
    observed = torch.cat((counts[~rare], counts[rare].sum()[None])).double()
    wanted = torch.cat((wanted[~rare], wanted[rare].sum()[None])).double()
    kept = wanted > 0
    assert observed[~kept].sum() == 0
    return float(((observed - wanted)[kept] ** 2 / wanted[kept]).sum()) / max(int(kept.sum()) - 1, 1)


@pytest.mark.slow
def test_accept_and_resample_is_exact() -> None:
    """100,000 trials of two drafted tokens: the tokens that come out follow p, whatever q is."""
    generator = torch.Generator().manual_seed(0)
    vocab, trials = 5, 100_000
    p = probabilities(torch.randn(3, vocab, generator=generator), 0.7)
    q = probabilities(torch.randn(2, vocab, generator=generator), 0.7)
    first, second = torch.zeros(vocab), torch.zeros(vocab)
    drafted = torch.stack([torch.multinomial(row, trials, True, generator=generator) for row in q], dim=1)
    for pair in drafted:
        accepted, following = verify_sampled(pair, q, p, generator)
        out = [*pair[:accepted].tolist(), following]
        first[out[0]] += 1
        if len(out) > 1:
            second[out[1]] += 1
    assert chi_square(first, p[0]) < 3.5
    assert chi_square(second, p[1]) < 3.5
    assert chi_square(first, q[0]) > 50  # the test can tell


def test_equal_distributions_accept_everything() -> None:
    generator = torch.Generator().manual_seed(0)
    p = probabilities(torch.randn(4, 9, generator=generator), 1.0)
    for _ in range(200):
        assert verify_sampled(draw(p[:3], generator), p[:3], p, generator)[0] == 3


def test_residual_of_equal_distributions_is_the_target() -> None:
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(p, p), p)
    torch.testing.assert_close(residual(torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])), torch.tensor([0.0, 1.0]))


def test_an_impossible_token_never_stands() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    for _ in range(50):
        assert verify_sampled(torch.tensor([0]), q, p, generator) == (0, 1)


def test_greedy_takes_the_longest_prefix() -> None:
    logits = torch.eye(5)[[3, 1, 4, 2]]
    assert verify_greedy(torch.tensor([3, 1, 4]), logits) == (3, 2)
    assert verify_greedy(torch.tensor([3, 0, 4]), logits) == (1, 1)
    assert verify_greedy(torch.tensor([], dtype=torch.long), logits[:1]) == (0, 3)


def exact(model: nn.Module, ids: Tensor, temperature: float, length: int) -> Tensor:
    """P(first `length` new tokens), [V, …, V], by enumeration."""
    vocab = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    prefixes = torch.tensor(list(product(range(vocab), repeat=length - 1)))
    rows = torch.cat((ids.expand(len(prefixes), -1), prefixes), dim=1)
    with torch.no_grad():
        probs = probabilities(model(input_ids=rows, use_cache=False).logits[:, len(ids) - 1 :], temperature)
    joint = torch.ones(len(prefixes))
    for place in range(length - 1):
        joint = joint * probs[torch.arange(len(prefixes)), place, prefixes[:, place]]
    return (joint[:, None] * probs[:, -1]).flatten()


def test_whole_decoding_keeps_the_distribution() -> None:
    """First two new tokens of 500 sampled answers against exact enumeration over a vocabulary of 8."""
    target = tiny.llama(4, vocab_size=8, num_hidden_layers=2, initializer_range=0.5)
    drafter = tiny.drafter(vocab_size=8, mask_token_id=MASK, taps=(0, 1), num_target_layers=2, block_size=3)
    ids = torch.tensor([3, 5, 6])
    wanted = exact(target, ids, 1.5, 2)
    counts = torch.zeros(8 * 8)
    accepted: list[int] = []
    for seed in range(500):
        out = decode(target, drafter, ids, max_new_tokens=4, temperature=1.5, seed=seed)
        counts[out.tokens[0] * 8 + out.tokens[1]] += 1
        accepted += out.accepted
    assert 0.05 < sum(accepted) / len(accepted) < 1.9  # both branches were taken
    assert chi_square(counts, wanted) < 1.6


def test_same_seed_same_answer() -> None:
    target, ids = tiny.llama(), tiny.prompts(1)[0]
    once, again, other = (
        decode(target, tiny.drafter(), ids, max_new_tokens=20, temperature=2.0, seed=seed).tokens for seed in (1, 1, 2)
    )
    assert once == again != other
    assert len(plain(target, ids, max_new_tokens=20, temperature=2.0, seed=1).tokens) == 20
