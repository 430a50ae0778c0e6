# SPDX-License-Identifier: Apache-2.0
"""Streams: whose is used, what waits for what, and that nothing else waits."""

import itertools
import time
import weakref

import numpy as np
import pytest

import flashplan as fp
from case import Case
from frameworks import CuPy, Jax, TorchCuda, bits
from gpu_cases import DEVICE, memory_in_use
from inputs import make_inputs
from solve import run_arguments

pytestmark = pytest.mark.gpu

CASE = Case((40, 1, 1), (40, 3000, 700), num_qo_heads=8, num_kv_heads=2, head_dim=128)
LONG = 400_000_000  # clock cycles: more than 0.2 s


class Work:
    """A planned Attention with its tensors, in torch."""

    def __init__(self, torch, case=CASE, seed=0, **options):
        self.case, self.inputs = case, make_inputs(case, seed)
        self.framework = TorchCuda(torch)
        self.attn = fp.Attention(**case.options() | {"device": DEVICE} | options)
        self.args, self.kwargs = run_arguments(case, self.inputs, self.framework)
        rows = int(self.inputs.qo_indptr[-1])
        shape = (rows, case.num_qo_heads, case.head_dims[1])
        self.out = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)
        self.plan()
        self.expected = self.attn.run(*self.args, **self.kwargs)
        torch.cuda.synchronize()

    def plan(self, **options):
        return self.attn.plan(*self.inputs.plan_args(), **options)

    def run(self, **options):
        self.attn.run(*self.args, **self.kwargs, out=self.out, **options)

    def is_right(self):
        return bool((self.out.view(-1) == self.expected.view(-1)).all())


@pytest.fixture
def work(torch):
    return Work(torch)


class CudaStreamProtocol:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


def forms(torch, cupy):
    """Ways to name a stream, each made of a torch stream."""
    return {
        "int": lambda s: s.cuda_stream,
        "torch": lambda s: s,
        "cupy": lambda s: cupy.cuda.ExternalStream(s.cuda_stream),
        "protocol": lambda s: CudaStreamProtocol(s.cuda_stream),
    }


@pytest.mark.parametrize("form", ["int", "torch", "cupy", "protocol"])
def test_explicit_stream(form, work, torch, cupy):
    """The work is on that stream: behind what is there already, and nothing before it ends."""
    stream = torch.cuda.Stream()
    named = forms(torch, cupy)[form](stream)
    before, after = (torch.cuda.Event(enable_timing=False) for _ in range(2))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        before.record()
    work.plan(stream=named)
    work.run(stream=named)
    assert not before.query(), "the call waited for its stream"
    after.record(stream)
    torch.cuda.current_stream().synchronize()  # another stream, which has nothing to wait for
    assert not after.query()
    stream.synchronize()
    assert work.is_right()


def test_legacy_default_stream_may_be_named(work, torch):
    work.plan(stream=0)
    work.run(stream=0)
    torch.cuda.synchronize()
    assert work.is_right()


@pytest.mark.parametrize("stream", ["fast", 1.5, object(), True, b"0"])
def test_what_is_no_stream_is_refused(stream, work):
    expected = (
        "^stream: expected an int or an object with __cuda_stream__, .ptr or .cuda_stream, "
        f"got {type(stream).__name__}$"
    )
    for call in (work.plan, work.run):
        with pytest.raises(TypeError, match=expected):
            call(stream=stream)
    work.run()
    assert work.is_right()


@pytest.mark.parametrize("stream", [-1, 1 << 70])
def test_numbers_that_are_no_handles_are_refused(stream, work):
    for call in (work.plan, work.run):
        with pytest.raises(ValueError, match="^stream: expected a handle, got"):
            call(stream=stream)


def test_current_stream_of_torch(work, torch):
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        work.plan()
        work.run()
        done.record()
    assert not done.query()
    torch.cuda.default_stream().synchronize()
    assert not done.query(), "the work is on the default stream"
    stream.synchronize()
    assert work.is_right()


def test_current_stream_of_cupy(work, torch, cupy):
    framework = CuPy(cupy)
    args, kwargs = run_arguments(work.case, work.inputs, framework)
    out = cupy.full(tuple(work.out.shape), 0xFFFF, cupy.uint16)
    cupy.cuda.Device().synchronize()
    torch_stream = torch.cuda.Stream()
    with torch.cuda.stream(torch_stream):
        torch.cuda._sleep(LONG)
    with cupy.cuda.ExternalStream(torch_stream.cuda_stream) as stream:
        work.attn.run(*args, **kwargs, out=out)
        work.plan()  # follows CuPy now
        work.attn.run(*args, **kwargs, out=out)
        assert not stream.done
        returned = work.attn.run(*args, **kwargs)
        stream.synchronize()
    for result in (out, returned):
        assert isinstance(result, cupy.ndarray)
        assert np.array_equal(result.get(), work.framework.array(work.expected).view(np.uint16))


def test_jax_results_are_ready(work, torch, jax):
    """JAX has no current stream: its arrays are waited for, and so are the results."""
    framework = Jax(jax, "gpu")
    args, kwargs = run_arguments(work.case, work.inputs, framework)
    grown = jax.jit(lambda x: x * 1)(args[0])  # still being computed
    for _ in range(20):
        o = work.attn.run(grown, *args[1:], **kwargs)
        assert next(iter(o.devices())).platform == "gpu"
        assert np.array_equal(bits(framework.array(o)), bits(work.framework.array(work.expected)))
    handle = torch.cuda.Stream().cuda_stream
    o, lse = work.attn.run(*args, **kwargs, stream=handle, return_lse=True)
    assert lse.dtype == np.float32
    assert np.array_equal(bits(framework.array(o)), bits(work.framework.array(work.expected)))


def test_plan_and_run_on_different_streams(work, torch):
    """run() follows the plan, and the next plan follows the run, whatever the streams."""
    other = Case((1, 1, 1), (9, 800, 2500), num_qo_heads=8, num_kv_heads=2, head_dim=128)
    lens = make_inputs(other, 0).plan_args()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for a, b, c in itertools.permutations(streams):
        work.out.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(a):
            torch.cuda._sleep(LONG // 20)
        work.plan(stream=a)
        with torch.cuda.stream(b):
            torch.cuda._sleep(LONG // 20)
        work.run(stream=b)
        work.attn.plan(*lens, stream=c)  # must not overtake the run
        torch.cuda.synchronize()
        assert work.is_right()


def test_a_stream_lives_as_long_as_its_plan(work, torch):
    """The next plan waits for it, even if the caller has no reference to it any more."""
    stream = CudaStreamProtocol(torch.cuda.Stream().cuda_stream)
    gone = weakref.ref(stream)
    work.plan(stream=stream)
    del stream
    work.run()
    assert gone() is not None
    work.plan()
    assert gone() is None
    work.run()
    torch.cuda.synchronize()
    assert work.is_right()


def test_two_plans_on_two_streams(torch):
    """At the same time, each with its own memory."""
    works = [Work(torch, seed=seed) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in works]
    for _ in range(50):
        for work in works:
            work.out.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(4):
            for work, stream in zip(works, streams, strict=True):
                with torch.cuda.stream(stream):
                    work.plan()
                    work.run()
        torch.cuda.synchronize()
        assert all(work.is_right() for work in works)


def lengths(step):
    kv_lens = [100 + 997 * step, 3, 1500 - 250 * step]
    return np.array([0, 1, 2 + step, 8], np.int32), np.array(kv_lens, np.int32)


def test_four_plans_ahead_of_the_gpu(torch):
    """Four steps are planned and launched while the GPU is still busy with what came before."""
    work = Work(torch, Case((1, 1, 6), (4000,) * 3, num_qo_heads=8, head_dim=128))
    expected = []
    for step in range(4):
        work.attn.plan(*lengths(step))
        expected.append(work.attn.run(*work.args, **work.kwargs))
    outs = [torch.full_like(o, float("nan")) for o in expected]
    for _ in range(5):
        torch.cuda.synchronize()
        busy = torch.cuda.Event()
        torch.cuda._sleep(LONG)
        busy.record()
        start = time.perf_counter()
        for step, out in enumerate(outs):
            work.attn.plan(*lengths(step))
            work.attn.run(*work.args, **work.kwargs, out=out)
        elapsed = time.perf_counter() - start
        assert not busy.query(), f"waited for the GPU: {elapsed:.3f} s"
        torch.cuda.synchronize()
        for out, wanted in zip(outs, expected, strict=True):
            assert torch.equal(out, wanted)
            out.fill_(float("nan"))


def test_plan_neither_waits_nor_allocates(work, torch):
    for _ in range(8):  # so that whatever is made at first use is there
        work.plan()
        torch.cuda.synchronize()
    before = memory_in_use(torch)
    busy = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    busy.record()
    start = time.perf_counter()
    for _ in range(4):
        work.plan()
    elapsed = time.perf_counter() - start
    assert not busy.query(), f"plan() waited for the GPU: {elapsed:.3f} s"
    assert elapsed < 0.05
    torch.cuda.synchronize()
    assert memory_in_use(torch) == before
    work.run()
    assert work.is_right()


def test_run_neither_waits_nor_allocates(work, torch):
    work.run()
    torch.cuda.synchronize()
    before = memory_in_use(torch)
    busy = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    busy.record()
    for _ in range(100):
        work.run()
    assert not busy.query(), "run() waited for the GPU"
    torch.cuda.synchronize()
    assert memory_in_use(torch) == before
    assert work.is_right()


def test_host_time(torch, capsys):
    """Printed, with a bound that only a synchronisation or a hidden copy would break."""
    case = Case((1,) * 256, (500,) * 256, num_qo_heads=32, num_kv_heads=8, head_dim=128)
    work = Work(torch, case)

    def measure(call, count=200):
        times = []
        for _ in range(count):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return 1e6 * float(np.median(times))

    run, plan = measure(work.run), measure(work.plan)
    with capsys.disabled():
        print(f"\nhost time: run() {run:.1f} us, plan() of 256 requests {plan:.1f} us")
    assert run < 100
    assert plan < 200
