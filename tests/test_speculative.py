# SPDX-License-Identifier: Apache-2.0
"""speculative_verify(): the tokens are distributed as the target's."""

import os

import numpy as np
import pytest

import flashplan as fp
from frameworks import NumPy
from sampling_cases import chi_square, limit
from speculative_cases import TREES, Model, assert_follows, distributions, drafts, draw

DRAWS = int(os.environ.get("FLASHPLAN_TEST_DRAWS", 1 << 14))
SHARP = {"alike": (1.0, 1.0), "sharp": (4.0, 1.0), "flat": (0.3, 4.0)}


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def seed_of(rng):
    return int(rng.integers(-(2**63), 2**63 - 1))


def verify(framework, tokens, draft_probs, target_probs, parents=None, **options):
    """(tokens, num_accepted, nodes) as arrays."""
    tensors = [framework.tensor(x) for x in (tokens, draft_probs, target_probs)]
    nodes = framework.tensor(np.full(tokens.shape, -7, np.int32))
    if parents is not None:
        options["draft_parents"] = framework.tensor(np.array(parents, np.int32))
    results = fp.speculative_verify(*tensors, nodes=nodes, **options)
    return [framework.array(x) for x in (*results, nodes)]


def check_distribution(rng, framework, tree, sharp, count, vocab=5):
    """Of the first two tokens. Where only one comes, the target model draws the second."""
    parents = TREES[tree] or list(range(-1, 2))
    of_target, of_draft = SHARP[sharp]
    target = Model(rng, vocab, len(parents) + 1, sharp=of_target, zeros=0.1)
    draft = Model(rng, vocab, len(parents) + 1, sharp=of_draft, zeros=0.1)
    given = drafts(rng, draft, target, parents, count)
    seeds = framework.tensor(rng.integers(-(2**63), 2**63 - 1, count))
    out, num_accepted, nodes = verify(framework, *given, TREES[tree], seed=seeds)
    assert_follows(parents, given[0], out, num_accepted, nodes, vocab)
    first, second = out[:, :1], out[:, 1]
    second = np.where(num_accepted > 0, second, draw(rng, target.of(first)))
    exact = target.after[0][:, None] * target.after[1]
    counts = np.bincount(first[:, 0] * vocab + second, minlength=vocab * vocab)
    exact = exact.astype(np.float64).ravel()
    assert chi_square(counts, exact / exact.sum()) < limit(len(TREES) * len(SHARP))


@pytest.mark.parametrize("sharp", SHARP)
@pytest.mark.parametrize("tree", TREES)
def test_distribution(rng, tree, sharp):
    check_distribution(rng, NumPy(), tree, sharp, DRAWS)


def test_as_many_are_accepted_as_can_be(rng):
    """Of one draft, the part that both distributions have in common."""
    p, q = distributions(rng, 2, 30).astype(np.float64)
    tokens = draw(rng, np.broadcast_to(q, (DRAWS, 30)))[:, None]
    rows = np.broadcast_to(np.float32(q), (DRAWS, 1, 30))
    targets = np.broadcast_to(np.float32(p), (DRAWS, 2, 30))
    _, num_accepted = fp.speculative_verify(tokens, rows, targets, seed=seed_of(rng))
    common = np.minimum(p / p.sum(), q / q.sum()).sum()
    counts = np.bincount(num_accepted, minlength=2)
    assert chi_square(counts, np.array([1 - common, common])) < limit(1)


def random_drafts(rng, batch, n, vocab, dtype="float32"):
    rows = distributions(rng, batch, 2 * n + 1, vocab, zeros=0.2)
    draft_probs, target_probs = rows[:, :n], rows[:, n:]
    tokens = draw(rng, draft_probs.reshape(-1, vocab)).reshape(batch, n)
    # Mostly alike, so that some are accepted.
    draft_probs = np.where(rng.random((batch, n, 1)) < 0.7, target_probs[:, :n], draft_probs)
    tokens[rng.random(tokens.shape) < 0.05] = -1
    return tokens, draft_probs.astype(dtype), target_probs.astype(dtype)


def random_parents(rng, n):
    return np.array([rng.integers(-1, i) if i else -1 for i in range(n)], np.int32)


def greedy(tokens, targets, parents):
    """What a model that always takes the likeliest token accepts."""
    path, node = [], -1
    while True:
        best = int(targets[node + 1].argmax())
        following = [
            i for i in range(node + 1, len(tokens)) if parents[i] == node and tokens[i] == best
        ]
        if not following:
            return [*path, best]
        node = following[0]
        path.append(best)


def test_greedy(rng):
    """Of one-hot rows there is no choice."""
    for n in (1, 3, 12):
        parents = random_parents(rng, n)
        targets = np.eye(4, dtype=np.float32)[rng.integers(0, 4, (40, n + 1))]
        tokens = rng.integers(0, 4, (40, n)).astype(np.int64)
        rows = np.eye(4, dtype=np.float32)[tokens]
        out, _ = fp.speculative_verify(tokens, rows, targets, draft_parents=parents)
        for i in range(40):
            wanted = greedy(tokens[i], targets[i], parents)
            assert out[i].tolist() == wanted + [-1] * (n + 1 - len(wanted))


def one_hot(tokens, vocab, dtype):
    """The distributions of drafts that were looked up."""
    return (tokens[..., None] == np.arange(vocab)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_drafts_that_were_looked_up_have_one_hot_rows(rng, dtype):
    for n in (1, 3, 12):
        parents = random_parents(rng, n)
        tokens, _, targets = random_drafts(rng, 40, n, 9, dtype)
        rows = one_hot(tokens, 9, dtype)
        rows[tokens == -1, 0] = 1
        seed = seed_of(rng)
        wanted = verify(NumPy(), tokens, rows, targets, parents, seed=seed)
        nodes = np.full(tokens.shape, -7, np.int32)
        results = fp.speculative_verify(
            tokens, None, targets, draft_parents=parents, nodes=nodes, seed=seed
        )
        for actual, expected in zip((*results, nodes), wanted, strict=True):
            assert np.array_equal(actual, expected)


@pytest.mark.parametrize("parents", [[-1], [-1, 0], [-1, -1, -1]])
def test_tokens_after_drafts_that_were_looked_up_are_the_target_s(rng, parents):
    n, vocab = len(parents), 7
    target = distributions(rng, vocab)
    tokens = np.broadcast_to(rng.integers(0, vocab, n), (DRAWS, n))
    targets = np.broadcast_to(target, (DRAWS, n + 1, vocab))
    out, num_accepted = fp.speculative_verify(
        tokens, None, targets, draft_parents=np.int32(parents), seed=seed_of(rng)
    )
    exact = target.astype(np.float64) / target.astype(np.float64).sum()
    assert chi_square(np.bincount(out[:, 0], minlength=vocab), exact) < limit(6)
    second = out[num_accepted > 0, 1]
    assert chi_square(np.bincount(second, minlength=vocab), exact) < limit(6)


def test_a_request_s_place_does_not_matter(rng):
    given = random_drafts(rng, 30, 6, 50)
    parents = np.array([random_parents(rng, 6) for _ in range(30)])
    seeds, offsets = (rng.integers(-(2**63), 2**63 - 1, 30) for _ in range(2))
    out, num_accepted = fp.speculative_verify(
        *given, draft_parents=parents, seed=seeds, offset=offsets
    )
    for i in range(30):
        one = slice(i, i + 1)
        alone, count = fp.speculative_verify(
            *(x[one] for x in given),
            draft_parents=parents[i],
            seed=int(seeds[i]),
            offset=int(offsets[i]),
        )
        assert np.array_equal(alone, out[one])
        assert np.array_equal(count, num_accepted[one])


def test_a_chain_is_a_tree(rng):
    given = random_drafts(rng, 50, 7, 20, "bfloat16")
    chain = np.arange(-1, 6, dtype=np.int32)
    seed = seed_of(rng)
    for a, b in zip(
        fp.speculative_verify(*given, seed=seed),
        fp.speculative_verify(*given, seed=seed, draft_parents=chain),
        strict=True,
    ):
        assert np.array_equal(a, b)


def test_missing_drafts_end_a_chain(rng):
    _, draft_probs, target_probs = random_drafts(rng, 20, 3, 10)
    tokens = np.full((20, 3), -1)
    out, num_accepted = fp.speculative_verify(tokens, draft_probs, target_probs)
    assert not num_accepted.any()
    assert (out[:, 1:] == -1).all()
    assert (target_probs[np.arange(20), 0, out[:, 0]] > 0).all()


def test_no_drafts(rng):
    targets = distributions(rng, 5, 1, 9)
    none = np.zeros((5, 0, 9), np.float32)
    out, num_accepted = fp.speculative_verify(np.zeros((5, 0), np.int32), none, targets)
    assert out.shape == (5, 1)
    assert not num_accepted.any()


def test_no_requests():
    out, num_accepted = fp.speculative_verify(
        np.zeros((0, 3), np.int32), np.zeros((0, 3, 9), np.float32), np.zeros((0, 4, 9), np.float32)
    )
    assert out.shape == (0, 4)
    assert num_accepted.shape == (0,)


def test_what_is_left_of_equal_rows(rng):
    """Where rounding leaves nothing of the target, tokens still come from it."""
    target = np.float32([[0.25, 0.75, 0], [0.25, 0.75, 0]])
    draft = np.nextafter(target[:1], np.float32(1))  # a little more of everything
    tokens = np.array([[2]], np.int32)
    for seed in range(20):
        out, num_accepted = fp.speculative_verify(tokens, draft[None], target[None], seed=seed)
        assert num_accepted[0] == 0
        assert out[0, 0] in (0, 1)


def test_outputs_and_memory(rng):
    given = random_drafts(rng, 9, 4, 30, "float16")
    parents = random_parents(rng, 4)
    wanted = verify(NumPy(), *given, parents, seed=5)
    wide = np.full((9, 9, 37), np.nan, np.float16)
    strided = [given[0].astype(np.int64), *(wide[:, :k, :30] for k in (4, 5))]
    memory = np.full((3, 9, 7), -7, np.int32)
    counts, status = np.full((2, 9), -7, np.int32)
    for target, source in zip(strided[1:], given[1:], strict=True):
        target = target.copy()
        target[...] = source
    rows = [np.ascontiguousarray(x) for x in given[1:]]
    out, num_accepted = fp.speculative_verify(
        strided[0],
        *rows,
        draft_parents=parents,
        seed=5,
        out=memory[0, :, :5],
        num_accepted=counts,
        nodes=memory[1, :, :4],
        status=status,
    )
    assert num_accepted is counts
    for actual, expected in zip((out, num_accepted, memory[1, :, :4]), wanted, strict=True):
        assert np.array_equal(actual, expected)
    assert not status.any()
    assert (memory[0, :, 5:] == -7).all()
    assert (memory[1, :, 4:] == -7).all()
    assert (memory[2] == -7).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_strided_rows(rng, dtype):
    given = random_drafts(rng, 7, 3, 33, dtype)
    wanted = fp.speculative_verify(*given, seed=1)
    buffer = np.full((7, 4, 2, 40), np.nan, dtype)
    draft_probs, target_probs = buffer[:, :3, 0, :33], buffer[:, :, 1, :33]
    draft_probs[...], target_probs[...] = given[1:]
    results = fp.speculative_verify(given[0], draft_probs, target_probs, seed=1)
    for actual, expected in zip(results, wanted, strict=True):
        assert np.array_equal(actual, expected)


def test_frameworks_give_the_same_tokens(rng, framework):
    given = random_drafts(rng, 8, 5, 200, "bfloat16")
    parents = random_parents(rng, 5)
    wanted = fp.speculative_verify(*given, draft_parents=parents, seed=3)
    tensors = [framework.tensor(x) for x in (*given, parents)]
    results = fp.speculative_verify(*tensors[:3], draft_parents=tensors[3], seed=3)
    for actual, expected in zip(results, wanted, strict=True):
        assert isinstance(actual, framework.tensor_type)
        assert np.array_equal(framework.array(actual), expected)
