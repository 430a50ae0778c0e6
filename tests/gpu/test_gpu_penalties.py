# SPDX-License-Identifier: Apache-2.0
"""apply_penalties() on the GPU: the CPU's bits, and the tests of the CPU."""

import numpy as np
import pytest

import flashplan as fp
from frameworks import TorchCuda, bits
from test_penalties import DTYPES, check, each, problem

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda(torch):
    return TorchCuda(torch)


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties(cuda, rng, dtype, strided):
    for batch, vocab, max_len in ((1, 1, 5), (7, 8192, 0), (5, 8193, 9000), (9, 128256, 50)):
        sizes = (batch, vocab, max_len, dtype)
        check(rng, cuda, *sizes, (1.3, 0.5, 0.25), strided=strided)
        check(rng, cuda, *sizes, each(rng, batch), strided=strided)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_s_bits(cuda, rng, dtype):
    canary, history, lens = problem(rng, 12, 50000, 3000, dtype)
    numbers = each(rng, 12)
    logits = cuda.tensor(canary.view.copy())
    tensors = [cuda.tensor(x) for x in (history, lens, *numbers)]
    fp.apply_penalties(logits, *tensors)
    wanted = canary.view.copy()
    fp.apply_penalties(wanted, history, lens, *numbers)
    assert np.array_equal(bits(cuda.array(logits)), bits(wanted))


def test_what_is_out_of_range(cuda, torch):
    """Tokens are skipped, lengths end at the row's end, requests with bad numbers stay."""
    logits = torch.ones((5, 100), device=cuda.device)
    history = torch.tensor([[3, -1, 100, 2**40, -(2**62), 3]] * 5, device=cuda.device)
    lens = torch.tensor([6, 900, -4, 6, 6], dtype=torch.int32, device=cuda.device)
    repetition = torch.tensor([2.0, 2, 2, 0, float("nan")], device=cuda.device)
    fp.apply_penalties(logits, history, lens, repetition, 0.0, 0.25)
    wanted = torch.ones((5, 100))
    wanted[:2, 3] = 0
    assert torch.equal(logits.cpu(), wanted)


def test_graph(cuda, torch):
    """Lengths and tokens are read at each replay."""
    logits = torch.zeros((2, 1000), device=cuda.device)
    history = torch.zeros((2, 8), dtype=torch.int32, device=cuda.device)
    lens = torch.zeros(2, dtype=torch.int32, device=cuda.device)
    fp.apply_penalties(logits, history, lens, 1.0, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp.apply_penalties(logits, history, lens, 1.0, 1.0)
    history.fill_(7)
    lens.fill_(3)
    graph.replay()
    assert logits[:, 7].tolist() == [-1, -1]
    assert logits.count_nonzero() == 2
