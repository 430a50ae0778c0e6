# SPDX-License-Identifier: Apache-2.0
"""speculative_verify() on the GPU: the CPU's tokens, and the tests of the CPU."""

import numpy as np
import pytest

import flashplan as fp
import test_speculative
from frameworks import TorchCuda
from speculative_cases import TREES
from test_speculative import SHARP, random_drafts, random_parents, verify

pytestmark = pytest.mark.gpu
VOCABULARIES = (1, 37, 5000, 8193, 50257, 128256, 262144)


@pytest.fixture
def cuda(torch):
    return TorchCuda(torch)


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("sharp", SHARP)
@pytest.mark.parametrize("tree", TREES)
def test_distribution(cuda, rng, tree, sharp):
    test_speculative.check_distribution(rng, cuda, tree, sharp, 1 << 18)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_cpu_s_tokens(cuda, rng, vocab, dtype):
    """Of chains and trees; rows that are held in shared memory, and longer ones."""
    for n in (1, 5):
        given = random_drafts(rng, 6, n, vocab, dtype)
        seeds, offsets = (rng.integers(-(2**63), 2**63 - 1, 6) for _ in range(2))
        for parents in (None, random_parents(rng, n), [-1] * n):
            options = {"seed": seeds, "offset": offsets}
            tensors = {name: cuda.tensor(x) for name, x in options.items()}
            actual = verify(cuda, *given, parents, **tensors)
            nodes = np.full(given[0].shape, -7, np.int32)
            if parents is not None:
                options["draft_parents"] = np.array(parents, np.int32)
            wanted = [*fp.speculative_verify(*given, nodes=nodes, **options), nodes]
            for a, b in zip(actual, wanted, strict=True):
                assert np.array_equal(a, b)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_cpu_s_tokens_of_drafts_that_were_looked_up(cuda, rng, vocab):
    tokens, _, targets = random_drafts(rng, 6, 5, vocab)
    for parents in (None, random_parents(rng, 5), np.full(5, -1, np.int32)):
        trees = [None if parents is None else f(parents) for f in (np.asarray, cuda.tensor)]
        wanted = fp.speculative_verify(tokens, None, targets, draft_parents=trees[0], seed=9)
        tensors = cuda.tensor(tokens), None, cuda.tensor(targets)
        results = fp.speculative_verify(*tensors, draft_parents=trees[1], seed=9)
        for actual, expected in zip(results, wanted, strict=True):
            assert np.array_equal(cuda.array(actual), expected)


def test_many_drafts(cuda, rng):
    given = random_drafts(rng, 3, 512, 40)
    parents = random_parents(rng, 512)
    for a, b in zip(
        verify(cuda, *given, parents, seed=1),
        fp.speculative_verify(*given, draft_parents=parents, seed=1),
    ):
        assert np.array_equal(a, b)


def test_requests_with_errors(cuda, torch, rng):
    tokens, draft_probs, target_probs = random_drafts(rng, 7, 3, 9000)
    tokens[:] = 5
    tokens[1, 2], tokens[2, 0] = 9000, -2
    target_probs[:, 0, 5] = 0  # the first draft is rejected
    target_probs[3, 0, 8999] = np.nan
    target_probs[4, 0, 7] = -0.1
    draft_probs[5, 0] *= 0.5
    parents = np.tile(np.arange(-1, 2, dtype=np.int32), (7, 1))
    parents[6, 1] = 1
    status = torch.full((7,), -7, dtype=torch.int32, device=cuda.device)
    nodes = torch.full((7, 3), -7, dtype=torch.int32, device=cuda.device)
    tensors = [cuda.tensor(x) for x in (tokens, draft_probs, target_probs)]
    out, num_accepted = fp.speculative_verify(
        *tensors, draft_parents=cuda.tensor(parents), status=status, nodes=nodes
    )
    assert status.tolist() == [0, 8, 8, 7, 7, 7, 8]
    assert not num_accepted.any()
    assert (nodes == -1).all()
    assert (out[1:] == -1).all()
    assert out[0, 0] >= 0


def test_graph(cuda, torch, rng):
    """Everything is read at each replay."""
    given = random_drafts(rng, 4, 3, 30000)
    tensors = [cuda.tensor(x) for x in given]
    seeds = torch.zeros(4, dtype=torch.int64, device=cuda.device)
    out = torch.empty((4, 4), dtype=torch.int32, device=cuda.device)
    count = torch.empty(4, dtype=torch.int32, device=cuda.device)
    outputs = {"out": out, "num_accepted": count}
    fp.speculative_verify(*tensors, seed=seeds, **outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp.speculative_verify(*tensors, seed=seeds, **outputs)
    for step in range(3):
        seeds.fill_(step)
        graph.replay()
        wanted = fp.speculative_verify(*given, seed=np.full(4, step))
        assert np.array_equal(cuda.array(out), wanted[0])
        assert np.array_equal(cuda.array(count), wanted[1])
