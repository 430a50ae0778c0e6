# SPDX-License-Identifier: Apache-2.0
"""Bound calls on a GPU: their stream, their bits, CUDA graphs, and memory that is kept."""

import pytest

from frameworks import gpu_framework
from gpu_cases import DEVICE
from solve import run_arguments
from test_gpu_graphs import AT_BOUNDS, DECODE, EMPTY, Server
from test_gpu_streams import LONG, Work

pytestmark = pytest.mark.gpu


@pytest.fixture
def work(torch):
    return Work(torch)


@pytest.fixture
def call(work):
    return work.attn.bind(*work.args, **work.kwargs, out=work.out)


@pytest.mark.parametrize("named", [False, True])
def test_stream(named, work, call, torch):
    """The current stream of the call, or the one that it is given; never that of bind()."""
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        if not named:
            work.plan()
            assert call() is work.out
    if named:
        work.plan(stream=stream)
        assert call(stream=stream) is work.out
    done.record(stream)
    assert not done.query(), "the call waited for its stream"
    torch.cuda.default_stream().synchronize()
    assert not done.query(), "the work is on the default stream"
    stream.synchronize()
    assert work.is_right()


@pytest.mark.parametrize("captured", [AT_BOUNDS, EMPTY], ids=["bounds", "empty"])
def test_captured_calls_serve_any_batch(captured, torch, seed):
    torch.manual_seed(seed)
    server = Server(torch, seed)
    tensors = {"block_table": server.block_table, "out": server.out, "lse": server.lse}
    call = server.attn.bind(server.q, server.k, server.v, **tensors)
    server.plan(captured)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lens in [DECODE, EMPTY, AT_BOUNDS] + [server.random_lens() for _ in range(10)]:
        for run in (graph.replay, call):
            server.plan(lens)
            server.shuffle()
            server.poison()
            run()
            server.assert_same_as_eager(lens)


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_tensors_of_a_framework(name, work, torch, request):
    framework = gpu_framework(name, request.getfixturevalue(name))
    args, kwargs = run_arguments(work.case, work.inputs, framework)
    call = work.attn.bind(*args, **kwargs, out=work.out)
    del args, kwargs
    for _ in range(3):
        work.out.fill_(float("nan"))
        torch.cuda.synchronize()
        call()
        torch.cuda.synchronize()
        assert work.is_right()


def test_freed_tensors_are_kept(work, torch):
    args = [x.clone() for x in work.args]
    call = work.attn.bind(*args, **work.kwargs, out=work.out)
    sizes = [x.shape for x in args]
    for x in args:
        x.set_()
    del args
    others = [torch.full(size, float("nan"), device=DEVICE).bfloat16() for size in sizes * 4]
    call()
    torch.cuda.synchronize()
    assert work.is_right()
    del others
