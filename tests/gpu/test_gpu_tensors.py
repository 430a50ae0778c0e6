# SPDX-License-Identifier: Apache-2.0
"""Tensors on GPUs: what is accepted, where results are, and what is refused with which words."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
import reference
import test_append
import test_merge
from flashplan.options import to_cuda_device
from frameworks import NumPy, TorchCuda, bits
from gpu_cases import CASE, DEVICE, memory_in_use, planned
from inputs import make_inputs
from solve import run_arguments

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(CASE, seed=0)


@pytest.fixture
def attn(inputs):
    return planned(inputs)


@pytest.fixture
def expected(attn, inputs, torch):
    args, kwargs = run_arguments(CASE, inputs, TorchCuda(torch))
    return attn.run(*args, **kwargs).clone()


def test_defaults_to_the_first_gpu(inputs, torch):
    attn = fp.Attention(4, 2, 64)
    attn.plan(*inputs.plan_args())
    args, kwargs = run_arguments(CASE, inputs, TorchCuda(torch))
    assert attn.run(*args, **kwargs).device == torch.device(DEVICE)


def test_devices_of_frameworks(torch, cupy, jax):
    assert to_cuda_device(torch.device("cuda", 0)) == 0
    assert to_cuda_device(cupy.cuda.Device(0)) == 0
    assert to_cuda_device(jax.devices("gpu")[0]) == 0


def test_outputs_are_of_the_framework(inputs, attn, expected, gpu_framework, torch):
    args, kwargs = run_arguments(CASE, inputs, gpu_framework)
    o, lse = attn.run(*args, **kwargs, return_lse=True)
    assert isinstance(o, gpu_framework.tensor_type)
    assert isinstance(lse, gpu_framework.tensor_type)
    wanted = TorchCuda(torch).array(expected)
    assert np.array_equal(bits(gpu_framework.array(o)), bits(wanted))


def test_cupy_arrays_of_bfloat16(inputs, attn, expected, cupy, torch):
    """Where CuPy has the dtype, the result has it too."""
    try:
        q = cupy.asarray(inputs.q)
    except (TypeError, ValueError) as error:
        pytest.skip(f"this CuPy has no bfloat16: {error}")
    k, v, table = (cupy.asarray(x) for x in (inputs.k, inputs.v, inputs.block_table))
    o = attn.run(q, k, v, block_table=table)
    assert o.dtype == ml_dtypes.bfloat16
    assert np.array_equal(o.get().view(np.int16), expected.view(torch.int16).cpu().numpy())


def test_frameworks_may_be_mixed(inputs, attn, expected, torch, cupy):
    """CuPy's current stream and torch's are both the default one here."""
    args, kwargs = run_arguments(CASE, inputs, TorchCuda(torch))
    table = cupy.asarray(inputs.block_table)
    assert torch.equal(attn.run(*args, block_table=table), expected)
    out = cupy.full(tuple(expected.shape), 0xFFFF, cupy.uint16)
    assert attn.run(*args, **kwargs, out=out) is out
    assert np.array_equal(out.get(), expected.view(torch.uint16).cpu().numpy())


@pytest.mark.parametrize("kind", ["torch.uint8", "torch.float32", "torch.matrix", "cupy"])
def test_workspace_of_any_framework_and_dtype(kind, inputs, expected, torch, cupy):
    size = planned(inputs).workspace_bytes + 256
    memory = {
        "torch.uint8": lambda: torch.empty(size, dtype=torch.uint8, device=DEVICE)[1:],
        "torch.float32": lambda: torch.empty(size // 4 + 1, device=DEVICE),
        "torch.matrix": lambda: torch.empty((4, size // 16 + 1), device=DEVICE),
        "cupy": lambda: cupy.empty(size // 8 + 1, cupy.float64),
    }[kind]()
    attn = planned(inputs, workspace=memory)
    args, kwargs = run_arguments(CASE, inputs, TorchCuda(torch))
    assert torch.equal(attn.run(*args, **kwargs), expected)


def test_wrong_workspaces_are_refused(torch, cupy, jax):
    size = 1 << 24
    options = CASE.options() | {"device": DEVICE}
    wrong = [
        (np.zeros(size, np.uint8), TypeError, "expected a tensor on cuda:0, got one on cpu"),
        (torch.zeros(size), TypeError, "expected a tensor on cuda:0, got one on cpu"),
        (torch.zeros((2, size), device=DEVICE)[:, ::2], ValueError, "contiguous memory"),
        (cupy.zeros((4, size), cupy.uint8).T, ValueError, "contiguous memory"),
        (jax.device_put(np.zeros(size), jax.devices("gpu")[0]), TypeError, "JAX array"),
        ("many", TypeError, "expected a tensor"),
    ]
    for memory, exception, words in wrong:
        with pytest.raises(exception, match=rf"^workspace: .*{words}"):
            fp.Attention(**options, workspace=memory)
    # (Without batch_invariant any workspace will do: with less of it there are fewer splits.)
    with pytest.raises(ValueError, match=r"^workspace: expected >= \d+ bytes, got"):
        fp.Attention(
            **options | {"batch_invariant": True}, workspace=torch.zeros(16, device=DEVICE)
        )
    with pytest.raises(TypeError, match="^workspace: expected a tensor on cpu, got one on cuda:0"):
        fp.Attention(**CASE.options(), workspace=torch.zeros(size, device=DEVICE))


@pytest.mark.parametrize("name", ["q", "k", "v", "block_table", "out", "lse"])
def test_host_tensors_are_refused(name, inputs, attn, expected, torch):
    args, kwargs = run_arguments(CASE, inputs, TorchCuda(torch))
    tensors = dict(zip(("q", "k", "v"), args, strict=True)) | kwargs
    tensors["out"] = torch.full_like(expected, float("nan"))
    tensors["lse"] = torch.zeros(expected.shape[:2], device=DEVICE)
    for host in (tensors[name].cpu(), tensors[name].cpu().pin_memory()):
        message = f"^{name}: expected a tensor on cuda:0, got one on cpu"
        with pytest.raises(TypeError, match=message):
            attn.run(**tensors | {name: host})
    torch.cuda.synchronize()
    assert tensors["out"].isnan().all()
    attn.run(**tensors)
    assert torch.equal(tensors["out"], expected)


def test_numpy_arrays_are_refused(inputs, attn):
    args, kwargs = run_arguments(CASE, inputs, NumPy())
    with pytest.raises(TypeError, match="^q: expected a tensor on cuda:0, got one on cpu"):
        attn.run(*args, **kwargs)


def test_gpu_tensors_are_refused_on_the_cpu(inputs, torch):
    attn = fp.Attention(**CASE.options())
    attn.plan(*inputs.plan_args())
    args, kwargs = run_arguments(CASE, inputs, TorchCuda(torch))
    with pytest.raises(TypeError, match="^q: expected a tensor on cpu, got one on cuda:0"):
        attn.run(*args, **kwargs)


def test_lengths_on_the_gpu_are_refused(inputs, attn, torch):
    lens = [torch.from_numpy(x).to(DEVICE) for x in inputs.plan_args()]
    with pytest.raises(TypeError, match="^kv_lens: expected host memory, got .* cuda:0"):
        attn.plan(*lens)


def test_narrow_block_tables_are_refused(inputs, attn, expected, torch):
    """How wide a table is, the host knows; the longest request (71 keys, pages of 16) is asked."""
    args, kwargs = run_arguments(CASE, inputs, TorchCuda(torch))
    table = kwargs.pop("block_table")
    out = torch.full_like(expected, float("nan"))
    message = r"^block_table: expected >= 5 columns for kv_lens\[1\] = 71, got 4$"
    with pytest.raises(ValueError, match=message):
        attn.run(*args, **kwargs, block_table=table[:, :4], out=out)
    torch.cuda.synchronize()
    assert out.isnan().all()
    attn.run(*args, **kwargs, block_table=table[:, :5], out=out)
    assert torch.equal(out, expected)
    attn.plan([0, 1], [64])
    attn.run(*args, **kwargs, block_table=table[1:2, :4])
    attn.plan([0], [])
    attn.run(*args, **kwargs, block_table=table[:0, :0])


def test_strides_of_single_elements_do_not_matter(torch, cupy):
    """One token, one head, one page of one slot: strides are what the framework likes."""
    attn = fp.Attention(1, 1, 64, page_size=1, q_dtype="float16", device=DEVICE)
    attn.plan([0, 1], [1])
    q, k, v = (torch.randn(64, device=DEVICE).half() for _ in range(3))
    torch.cuda.synchronize()  # CuPy has another current stream
    for strides in ((64, 64, 64), (3, 5, 7), (0, 1, 2)):
        shapes = [((1, 1, 64), (*strides[:2], 1)), *[((1, 1, 1, 64), (*strides, 1))] * 2]
        table = torch.as_strided(torch.zeros(8, dtype=torch.int32, device=DEVICE), (1, 1), (5, 3))
        rows = [torch.as_strided(x, *shape) for x, shape in zip((q, k, v), shapes, strict=True)]
        assert torch.equal(attn.run(*rows, block_table=table).flatten(), v)
        arrays = [
            cupy.lib.stride_tricks.as_strided(cupy.asarray(x), shape, [2 * s for s in stride])
            for x, (shape, stride) in zip((q, k, v), shapes, strict=True)
        ]
        o = attn.run(*arrays, block_table=cupy.zeros((1, 1), cupy.int32))
        assert torch.equal(torch.as_tensor(o, device=DEVICE).flatten(), v)


def test_jax_outputs_are_refused(inputs, attn, expected, jax):
    args, kwargs = run_arguments(CASE, inputs, NumPy())
    args = [jax.device_put(x, jax.devices("gpu")[0]) for x in args]
    table = jax.device_put(kwargs["block_table"], jax.devices("gpu")[0])
    frozen = jax.numpy.zeros_like(args[0])
    with pytest.raises(TypeError, match="^out: expected a writable tensor .*, got a JAX array"):
        attn.run(*args, block_table=table, out=frozen)
    assert not np.asarray(frozen).any()


def test_unknown_device_is_refused(torch):
    index = torch.cuda.device_count()
    with pytest.raises((ValueError, fp.UnsupportedError), match="^device: expected "):
        fp.Attention(4, 2, 64, device=f"cuda:{index}")


def test_float32_queries_have_no_kernel():
    supported, reason = fp.is_supported(4, 2, 64, q_dtype="float32", device=DEVICE)
    assert not supported
    assert reason.startswith("q_dtype: expected ")
    with pytest.raises(fp.UnsupportedError, match="^q_dtype: "):
        fp.Attention(4, 2, 64, q_dtype="float32", device=DEVICE)
    assert fp.is_supported(4, 2, 64, device=DEVICE) == (True, "")


def test_another_device_than_the_current_one(inputs, expected, torch):
    """cuda:1 is served while cuda:0 is current, which it stays; devices are not mixed."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    attn = planned(inputs, device="cuda:1")
    args, kwargs = run_arguments(CASE, inputs, TorchCuda(torch, "cuda:1"))
    with torch.cuda.device(0):
        attn.plan(*inputs.plan_args())
        o = attn.run(*args, **kwargs)
        assert torch.cuda.current_device() == 0
    assert o.device.index == 1
    assert torch.equal(o.cpu(), expected.cpu())
    wrong = args[0].to(DEVICE)
    with pytest.raises(TypeError, match="^q: expected a tensor on cuda:1, got one on cuda:0"):
        attn.run(wrong, *args[1:], **kwargs)
    with pytest.raises(TypeError, match="^k: expected a tensor on cuda:1, got one on cuda:0"):
        attn.run(args[0], args[1].to(DEVICE), args[2], **kwargs)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [("bfloat16",) * 2, ("float16", "float8_e5m2")])
def test_append_in_every_framework(dtype, cache_dtype, gpu_framework, torch):
    """To the bit as on the CPU. The cache of JAX arrays is another framework's."""
    problem = test_append.Problem(dtype, cache_dtype)
    scales = {"k_scale": np.full(1, 0.5, np.float32), "v_scale": np.float32([4, 0.5, 1.5])}
    wanted = problem.expected(**scales)
    owner = gpu_framework if gpu_framework.writable else TorchCuda(torch)
    caches = [owner.tensor(cache) for cache in problem.caches]
    problem.append(gpu_framework, caches, **scales, kv_dtype=cache_dtype)
    for cache, tensor, expected_cache in zip(problem.caches, caches, wanted, strict=True):
        owner.fetch(cache, tensor)
        assert np.array_equal(bits(cache), bits(expected_cache))


@pytest.mark.parametrize("dtype", test_merge.DTYPES)
def test_merge_in_every_framework(dtype, gpu_framework):
    o, lse = test_merge.states(3, dtype, (7, 3, 64))
    pair = [gpu_framework.tensor(x) for x in (o[0], lse[0], o[1], lse[1])]
    stack = [gpu_framework.tensor(x) for x in (o, lse)]
    for state, count in ((fp.merge_states(*pair), 2), (fp.merge_states(*stack), 3)):
        assert all(isinstance(x, gpu_framework.tensor_type) for x in state)
        merged = [gpu_framework.array(x) for x in state]
        test_merge.assert_merged(o[:count], lse[:count], *merged)


def test_appended_tokens_are_attended_to(torch):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((6, 2, 64), np.float32) for _ in range(3))
    q, k, v = (torch.from_numpy(x).half().to(DEVICE) for x in (q, k, v))
    caches = [torch.full((4, 4, 2, 64), float("nan"), device=DEVICE).half() for _ in range(2)]
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=DEVICE)
    attn = fp.Attention(2, 2, 64, page_size=4, q_dtype="float16", device=DEVICE)
    outputs = []
    for begin, end in ((0, 4), (4, 5), (5, 6)):
        lengths = ([0, end - begin], [end])
        on_gpu = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in lengths]
        fp.append_paged_kv(k[begin:end], v[begin:end], *caches, *on_gpu, block_table=table)
        attn.plan(*lengths)
        outputs.append(attn.run(q[begin:end], *caches, block_table=table))
    exact, _ = reference.attention(*(x.cpu().numpy() for x in (q, k, v)))
    np.testing.assert_allclose(torch.cat(outputs).cpu().numpy(), exact, atol=5e-3)


EXIT = """
import flashplan as fp, torch
attn = fp.Attention(4, 2, 64, page_size=None, device="cuda:0")
attn.plan([0, 1], [5])
q = torch.ones(1, 4, 64, dtype=torch.bfloat16, device="cuda:0")
k = torch.ones(5, 2, 64, dtype=torch.bfloat16, device="cuda:0")
fp.keep = attn.run(q, k, k), attn
"""


def test_exit_with_live_objects():
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr


def test_memory_is_given_back(torch):
    options = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "device": DEVICE}
    for _ in range(3):
        fp.Attention(**options).plan([0, 1], [100])
    before = memory_in_use(torch)
    for _ in range(100):
        fp.Attention(**options).plan([0, 1], [100])
    assert memory_in_use(torch) == before
