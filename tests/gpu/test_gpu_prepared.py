# SPDX-License-Identifier: Apache-2.0
"""Prepared keys: which batches have them, graphs, programmatic dependent launch, and a workspace
without room for them. Results are tested as those of all cases: gpu_schedule_cases.PREPARED."""

import numpy as np
import pytest

import flashplan as fp
from gpu_cases import DEVICE
from gpu_schedule_cases import PREPARED
from inputs import make_inputs

pytestmark = pytest.mark.gpu

NAN = float("nan")
HEADS = {"num_qo_heads": 16, "num_kv_heads": 2, "head_dim": 128}
MAX_BATCH, MAX_TOKENS, MAX_KEYS = 4, 2100, 4000
OPTIONS = {
    "gather": {"page_size": 1},
    "rope": {"page_size": 16, "rope": fp.Rope()},
    "widen": {"page_size": 16, "kv_dtype": "float8_e4m3fn"},
}
# (queries, keys) of each request.
PROMPTS = ((800, 2000), (800, 1500))
OTHER_PROMPTS = ((1, 1500), (1700, 1700), (300, 3000))
DECODES = ((1, 4000), (1, 3), (1, 700), (1, 90))
SHORT = ((3, 9), (20, 400), (1, 2500))
BATCHES = [PROMPTS, SHORT, OTHER_PROMPTS, DECODES, (), PROMPTS, DECODES, OTHER_PROMPTS, SHORT]


def is_hopper(torch):
    return torch.cuda.get_device_capability(DEVICE)[0] == 9


@pytest.mark.parametrize("case", PREPARED, ids=str)
def test_cases_are_prepared(case, torch, seed):
    inputs = make_inputs(case, seed)
    plan = fp.Attention(**case.options() | {"device": DEVICE}).plan(
        *inputs.plan_args(), **inputs.plan_options()
    )
    if is_hopper(torch):
        what = "keys" if case.rope else "keys and values"
        assert f"\n{what} prepared, in " in plan.describe()
    else:
        assert "prepared" not in plan.describe()


@pytest.mark.parametrize("head_dim, num_tiles", [(128, 128), (256, 256)])
def test_a_chunk_of_a_long_prompt_is_prepared_beside_decodes(head_dim, num_tiles, torch):
    options = {"q_dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "page_size": 16}
    bounds = {"max_batch_size": 129, "max_qo_tokens": 640}
    attn = fp.Attention(32, 8, head_dim, **options, **bounds, device=DEVICE)
    qo_indptr = np.cumsum([0, 512] + [1] * 128, dtype=np.int32)
    plan = attn.plan(qo_indptr, np.array([16384] + [2048] * 128, np.int32))
    if is_hopper(torch):
        assert plan.kernel_name == f"sm90_widen_bf16_e4m3_d{head_dim}"
        assert f"\nkeys and values prepared, in {num_tiles} tiles\n" in plan.describe()


class Layer:
    def __init__(self, torch, seed, **options):
        torch.manual_seed(seed)
        page_size = options["page_size"]
        self.torch = torch
        self.options = HEADS | options | {"max_batch_size": MAX_BATCH, "max_qo_tokens": MAX_TOKENS}
        self.attn = fp.Attention(**self.options, device=DEVICE)
        columns = MAX_KEYS // page_size
        pages = torch.randperm(MAX_BATCH * columns, dtype=torch.int32, device=DEVICE)
        self.table = pages.view(MAX_BATCH, columns)
        shape = (MAX_BATCH * columns, page_size, 2, 128)
        dtype = getattr(torch, options.get("kv_dtype", "bfloat16"))
        self.k, self.v = (torch.randn(shape, device=DEVICE).to(dtype) for _ in "kv")
        self.q = torch.randn((MAX_TOKENS, 16, 128), device=DEVICE).bfloat16()
        self.out = torch.full_like(self.q, NAN)

    def plan(self, batch, attn=None):
        qo_lens = [qo for qo, _ in batch]
        kv_lens = np.array([kv for _, kv in batch], np.int32)
        return (attn or self.attn).plan(np.cumsum([0, *qo_lens], dtype=np.int32), kv_lens)

    def run(self, attn=None, **more):
        more = {"out": self.out} | more
        return (attn or self.attn).run(self.q, self.k, self.v, block_table=self.table, **more)

    def eager(self, batch, **options):
        attn = fp.Attention(**self.options | options, device=DEVICE)
        self.plan(batch, attn)
        return self.run(attn, out=self.torch.full_like(self.out, NAN))

    def assert_bits_of(self, expected):
        assert self.torch.equal(self.out.view(self.torch.int16), expected.view(self.torch.int16))


@pytest.mark.parametrize("captured", [PROMPTS, DECODES, ()], ids=["prompts", "decodes", "empty"])
@pytest.mark.parametrize("name", OPTIONS)
def test_replays(name, captured, torch, seed):
    """A graph serves batches with prepared keys and without, whichever was captured."""
    layer = Layer(torch, seed, **OPTIONS[name])
    layer.plan(captured)
    layer.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run()
    for batch in BATCHES:
        layer.q.normal_()
        layer.k.copy_(torch.randn(layer.k.shape, device=DEVICE))
        layer.out.fill_(NAN)
        layer.plan(batch)
        graph.replay()
        layer.assert_bits_of(layer.eager(batch))


@pytest.mark.parametrize("name", OPTIONS)
def test_dependent_launches(name, torch, seed):
    """Each run reads, as keys, what the run before it wrote."""
    layer = Layer(torch, seed, **OPTIONS[name])
    layer.plan(PROMPTS)
    keys = layer.k.view(-1, 2, 128)
    first_keys = layer.k.clone()

    def run_all(pdl):
        layer.k.copy_(first_keys)
        for _ in range(10):
            layer.run(pdl=pdl)
            keys[:12800].copy_(layer.out[:1600].view(-1, 2, 128) * 10)
        return layer.out.clone()

    expected = run_all(False)
    for _ in range(10):
        run_all(True)
        layer.assert_bits_of(expected)


def test_workspace_without_room(torch, seed):
    """Without room for all requests none is prepared; the results are the same, up to rounding."""
    layer = Layer(torch, seed, **OPTIONS["gather"])
    described = layer.plan(PROMPTS).describe()
    layer.run()
    size = layer.attn.workspace_bytes
    found = {"prepared" in described}
    for part in (0.75, 0.5, 0.3, 0.1):
        workspace = torch.empty(int(size * part), dtype=torch.uint8, device=DEVICE)
        attn = fp.Attention(**layer.options, device=DEVICE, workspace=workspace)
        found.add("prepared" in layer.plan(PROMPTS, attn).describe())
        expected = layer.out.clone()
        layer.out.fill_(NAN)
        layer.run(attn)
        assert torch.allclose(layer.out[:1600].float(), expected[:1600].float(), atol=2e-2)
        layer.out.copy_(expected)
    assert found == ({True, False} if is_hopper(torch) else {False})
