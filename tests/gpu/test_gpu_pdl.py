# SPDX-License-Identifier: Apache-2.0
"""Kernels that begin before the one before them has ended: layers, each of which reads what the
last one wrote."""

import pytest

import flashplan as fp
from gpu_cases import DEVICE

pytestmark = pytest.mark.gpu

NUM_LAYERS = 24
KV_LENS = {"decodes": (700, 3, 5000, 64, 1, 900), "prompts": (300, 2000)}
QO_LENS = {"decodes": (1,) * 6, "prompts": (300, 77)}


class Layers:
    """o of each layer, after a kernel of another library, is q of the next one."""

    def __init__(self, torch, lens):
        qo_lens, kv_lens = QO_LENS[lens], KV_LENS[lens]
        page_size = 16
        pages = [-(-n // page_size) for n in kv_lens]
        self.attn = fp.Attention(
            8, 2, 128, page_size=page_size, max_batch_size=8, max_qo_tokens=512, device=DEVICE
        )
        bounds = [sum(qo_lens[:i]) for i in range(len(qo_lens) + 1)]
        self.attn.plan(bounds, kv_lens)
        shape = (NUM_LAYERS, sum(pages), page_size, 2, 128)
        self.k, self.v = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in "kv")
        self.table = torch.zeros((len(pages), max(pages)), dtype=torch.int32, device=DEVICE)
        ids = torch.randperm(sum(pages), dtype=torch.int32, device=DEVICE)
        for row, own in zip(self.table, ids.split(pages), strict=True):
            row[: len(own)] = own
        self.q = torch.randn((bounds[-1], 8, 128), dtype=torch.bfloat16, device=DEVICE)
        self.buffers = [torch.empty_like(self.q) for _ in range(3)]

    def run(self, pdl, between):
        x = self.q
        for k, v in zip(self.k, self.v, strict=True):
            out = next(b for b in self.buffers if b is not x)
            self.attn.run(x, k, v, block_table=self.table, out=out, pdl=pdl)
            x = out
            if between:
                x.mul_(3)
        return x


@pytest.mark.parametrize("between", [False, True], ids=["alone", "between"])
@pytest.mark.parametrize("lens", KV_LENS)
def test_layers(lens, between, torch, seed):
    torch.manual_seed(seed)
    layers = Layers(torch, lens)
    expected = layers.run(False, between).clone()
    assert expected.isfinite().all() and expected.abs().max() > 0
    for _ in range(10):
        for buffer in layers.buffers:
            buffer.fill_(torch.nan)
        assert layers.run(True, between).equal(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layers.run(True, between)
    for _ in range(10):
        for buffer in layers.buffers:
            buffer.fill_(torch.nan)
        graph.replay()
        assert result.equal(expected)


def test_a_later_plan(torch, seed):
    """The schedule is copied between two runs, the second of which may begin early."""
    torch.manual_seed(seed)
    layers = Layers(torch, "decodes")
    bounds = list(range(7))
    all_lens = [KV_LENS["decodes"], (1,) * 6, (300, 3, 17, 64, 1, 500)]
    expected = []
    for pdl in (False, True):
        for _ in range(1 + 9 * pdl):
            results = []
            for lens in all_lens:
                layers.attn.plan(bounds, lens)
                args = layers.q, layers.k[0], layers.v[0]
                results.append(layers.attn.run(*args, block_table=layers.table, pdl=pdl))
            if not pdl:
                expected = results
            assert all(x.equal(y) for x, y in zip(results, expected, strict=True))
