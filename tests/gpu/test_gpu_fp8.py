# SPDX-License-Identifier: Apache-2.0
"""8-bit queries on Hopper, which the kernels for 8-bit caches widen to bfloat16."""

import dataclasses

import pytest

import flashplan as fp
from frameworks import TorchCuda
from gpu_cases import WIDENED, without_hidden_values
from inputs import make_inputs
from solve import CudaRunner, assert_correct, solution

pytestmark = pytest.mark.gpu

E4M3 = "float8_e4m3fn"
HEADS, KV_HEADS = 8, 2


@pytest.fixture
def on_hopper(torch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("there are kernels for compute capability 9.0 alone")


def draw(torch, rows, heads, dim, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, heads, dim, generator=generator, device="cuda")
    return x.to(torch.float8_e4m3fn)


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"num_ctas": 7}], ids=str)
@pytest.mark.parametrize(
    "lens", [((300, 1, 70), (900, 4000, 71)), ((5, 40, 64), (333, 5000, 64))], ids=str
)
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
def test_results_have_the_bits_of_bfloat16_queries(dim, lens, options, torch, on_hopper):
    """Numbers of e4m3 are numbers of bfloat16, so queries lose nothing when they are widened."""
    qo_lens, kv_lens = lens
    indptr = [0, *(sum(qo_lens[: i + 1]) for i in range(len(qo_lens)))]
    q = draw(torch, sum(qo_lens), HEADS, dim, 0)
    k, v = (draw(torch, sum(kv_lens), KV_HEADS, dim, seed) for seed in (1, 2))
    results, names = [], []
    for queries in (q, q.bfloat16()):
        attn = fp.Attention(
            HEADS,
            KV_HEADS,
            dim,
            page_size=None,
            q_dtype=queries.dtype,
            kv_dtype=E4M3,
            kernels="hopper",
            device="cuda:0",
            **options,
        )
        attn.plan(indptr, kv_lens)
        results.append(attn.run(queries, k, v, return_lse=True))
        names.append(attn._plan.kernel_name)
    assert names[0] == names[1]
    assert names[0].startswith("sm90_widen")
    for narrow, wide in zip(*results, strict=True):
        assert narrow.dtype == wide.dtype
        assert torch.equal(narrow, wide)


CASES = [
    dataclasses.replace(case, q_dtype=E4M3, q_scale=0.7)
    for case in WIDENED
    if case.kv_dtype == E4M3 and not case.variant
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case, torch, on_hopper, seed):
    """Prompts, drafts and decodes, whole and cut, ragged and in pages, with all masks."""
    inputs = make_inputs(case, seed)
    runner = CudaRunner(case, torch, kernels="hopper")
    o, lse = runner.run(inputs, TorchCuda(torch))
    assert runner.attn._plan.kernel_name.startswith("sm90_widen")
    exact, twin = solution(case, inputs)
    if case.special:
        o = without_hidden_values(case, inputs, exact[0], o)
    assert_correct(case, inputs, exact, twin, o, lse)
