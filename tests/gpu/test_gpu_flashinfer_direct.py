# SPDX-License-Identifier: Apache-2.0
"""flashplan.flashinfer's prompts without plan(), rotations into 8 bits and pipelines on the GPU.
The CPU, whose results other tests compare with float64, gets the same tensors."""

import pytest

pytestmark = pytest.mark.gpu

LENS, PAGE = [300, 1, 70, 129], 32
LAYOUTS = ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"]
MASKS = [
    {},
    {"mask_mode": "sliding_window", "window_left": 40},
    {"mask_mode": "chunked", "chunked_attention_size": 64},
    {"mask_mode": "chunked", "chunked_attention_size": 16},  # a chunk begins inside a page
]


@pytest.fixture
def flashinfer(torch):
    import flashplan.flashinfer

    with torch.inference_mode():
        yield flashplan.flashinfer


def ends(torch, lens):
    return torch.tensor([0, *lens]).cumsum(0).int()


def inputs(torch, layout, dtype, heads, kv_heads, dim):
    """(qkv, block_tables), on the CPU."""
    tokens, columns = sum(LENS), -(-max(LENS) // PAGE)

    def normal(*shape):
        return torch.randn(shape).to(dtype)

    q = normal(tokens, heads, dim)
    if layout == "PACKED_QKV":
        return normal(tokens, 3, heads, dim), None
    if layout == "CONTIGUOUS_Q_KV":
        return (q, normal(tokens, 2, kv_heads, dim)), None
    if layout == "SEPARATE_Q_K_V":
        return (q, normal(tokens, kv_heads, dim), normal(tokens, kv_heads, dim)), None
    page = (PAGE, kv_heads, dim) if layout.endswith("NHD") else (kv_heads, PAGE, dim)
    table = torch.randperm(len(LENS) * columns).view(len(LENS), columns).int()
    return (q, normal(table.numel(), 2, *page)), table


def moved(x, device):
    if isinstance(x, tuple):
        return tuple(y.to(device) for y in x)
    return None if x is None else x.to(device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("named", MASKS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_prompts(cuda, torch, flashinfer, layout, named, dtype):
    qkv, table = inputs(torch, layout, getattr(torch, dtype), 8, 2, 128)
    lens = torch.tensor(LENS, dtype=torch.int32)
    results = []
    for device in ("cpu", cuda.device):
        begins = ends(torch, LENS).to(device)
        results.append(
            flashinfer.prefill.trtllm_fmha_v2_prefill(
                moved(qkv, device),
                layout,
                torch.zeros(16, dtype=torch.uint8, device=device),
                lens.to(device),
                max(LENS),
                max(LENS),
                128**-0.5,
                1.0,
                len(LENS),
                begins,
                begins,
                moved(table, device),
                out_dtype=torch.bfloat16,
                **named,
            ).float()
        )
    torch.testing.assert_close(results[1].cpu(), results[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("nope", [0, 64])
def test_rotations_into_8_bits(cuda, torch, flashinfer, kv_layout, nope):
    """Numbers that lie between two of 8 bits may differ by one step."""
    tokens, rope = 50, 64
    table = torch.randn(200, rope)
    rows = [torch.randn(tokens, heads, rope + nope).half() for heads in (8, 2, 2)]
    positions = torch.randperm(200)[:tokens]
    where = torch.arange(tokens, dtype=torch.int32)
    requests = torch.where(where % 7 == 3, -1, 0).int()
    pages = torch.randperm(8).int()
    page = (16, 2, rope + nope) if kv_layout == "NHD" else (2, 16, rope + nope)
    results = []
    for device in ("cpu", cuda.device):
        q, k, v = (x.to(device) for x in rows)
        caches = tuple(torch.zeros(8, *page, device=device).to(torch.float8_e4m3fn) for _ in "kv")
        q_rope, q_nope = flashinfer.rope_quantize_fp8_append_paged_kv_cache(
            q[..., :rope],
            k[..., :rope],
            q[..., rope:] if nope else None,
            k[..., rope:] if nope else None,
            v,
            table.to(device),
            positions.to(device),
            caches,
            pages.to(device),
            torch.tensor([0, 8], dtype=torch.int32, device=device),
            requests.to(device),
            where.to(device),
            quant_scale_kv=0.5,
            kv_layout=kv_layout,
        )
        results.append([x.float().cpu() for x in (q_rope, q_nope, *caches)])
    for got, expected in zip(results[1], results[0]):
        assert not (got != expected).float().mean() > 0.01  # False if there are none
        torch.testing.assert_close(got, expected, rtol=0.13, atol=2**-9)


def test_pipelines(cuda, torch, flashinfer):
    from flashplan.flashinfer.logits_processor import LogitsPipe, Sample, Softmax, Temperature, TopK

    logits = torch.randn(64, 5000, device=cuda.device)
    pipe = LogitsPipe([Temperature(), Softmax(), TopK(), Sample()])
    first, again = (torch.Generator(cuda.device).manual_seed(5) for _ in range(2))
    probs = flashinfer.softmax(logits, 0.7)
    expected = flashinfer.top_k_sampling_from_probs(probs, 20, generator=first)
    assert torch.equal(pipe(logits, temperature=0.7, top_k=20, generator=again), expected)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_queries_of_8_bits(cuda, torch, flashinfer, dtype, heads):
    """With a scale for each head. GPUs read those of e5m2, and heads with scales of their own, as
    bfloat16."""
    counts = heads[0], heads[1], heads[1]
    rows = [torch.randn(300, n, 128).to(getattr(torch, dtype)) for n in counts]
    scales = [torch.rand(n) + 0.5 for n in counts]
    results = [
        flashinfer.single_prefill_with_kv_cache(
            *(x.to(device) for x in (*rows, *scales)), o_dtype=torch.bfloat16, causal=True
        ).float()
        for device in ("cpu", cuda.device)
    ]
    torch.testing.assert_close(results[1].cpu(), results[0], rtol=3e-2, atol=3e-2)
