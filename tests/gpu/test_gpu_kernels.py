# SPDX-License-Identifier: Apache-2.0
"""Plans that have two kernels on Hopper: one for few rows, and one for prompts and for prefixes
that many requests share."""

import os

import numpy as np
import pytest

import flashplan as fp
from gpu_cases import DEVICE
from test_gpu_graphs import capture_with_torch

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
BATCH, PREFIX, OWN = 16, 4096, 64
DECODES = (np.arange(BATCH + 1, dtype=np.int32), np.full(BATCH, PREFIX + OWN, np.int32))
PROMPT = (np.array([0, 1, 301], np.int32), np.array([PREFIX, 700], np.int32))
GROUPS = [[0, BATCH, PREFIX]]


@pytest.fixture(autouse=True)
def on_hopper(torch):
    is_hopper = torch.cuda.get_device_capability(DEVICE) == (9, 0)
    if not is_hopper or "FLASHPLAN_KERNEL_FAMILY" in os.environ:
        pytest.skip("needs the choice of kernels on a GPU of compute capability 9.0")


class Layer:
    """Tensors of one layer, whose requests begin with the same pages."""

    def __init__(self, torch, **options):
        self.torch = torch
        pages = PREFIX // PAGE_SIZE
        own = OWN // PAGE_SIZE
        table = np.arange(BATCH * own).reshape(BATCH, own) + pages
        shared = np.broadcast_to(np.arange(pages), (BATCH, pages))
        self.block_table = torch.from_numpy(np.hstack([shared, table]).astype(np.int32)).to(DEVICE)
        shape = (pages + BATCH * own, PAGE_SIZE, KV_HEADS, DIM)
        self.k, self.v = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2))
        self.q = torch.randn((512, HEADS, DIM), device=DEVICE).bfloat16()
        self.out = torch.full_like(self.q, float("nan"))
        defaults = {"page_size": PAGE_SIZE, "max_batch_size": BATCH, "device": DEVICE}
        self.attn = fp.Attention(HEADS, KV_HEADS, DIM, **defaults | options)

    def plan(self, lens, groups=None):
        """The family of the kernel that the plan takes."""
        return self.attn.plan(*lens, shared_prefixes=groups).kernel_name.split("_")[0]

    def run(self):
        self.attn.run(self.q, self.k, self.v, block_table=self.block_table, out=self.out)

    def assert_right(self, lens):
        torch = self.torch
        for r, kv_len in enumerate(lens[1].tolist()):
            rows = slice(*lens[0][r : r + 2].tolist())
            pages = self.block_table[r].long()
            k, v = (
                x[pages].flatten(0, 1)[:kv_len].float().repeat_interleave(HEADS // KV_HEADS, 1)
                for x in (self.k, self.v)
            )
            x = torch.einsum("qhd,khd->hqk", self.q[rows].float(), k) / DIM**0.5
            visible = torch.ones(x.shape[1:], dtype=torch.bool, device=DEVICE).tril(
                kv_len - x.shape[1]
            )
            weights = x.masked_fill(~visible, -torch.inf).softmax(-1)
            wanted = torch.einsum("hqk,khd->qhd", weights, v)
            torch.testing.assert_close(self.out[rows].float(), wanted, atol=2e-2, rtol=2e-2)


def test_a_plan_takes_the_kernel_for_its_batch(torch, seed):
    torch.manual_seed(seed)
    layer = Layer(torch, max_qo_tokens=512)
    for lens, groups, family in (
        (DECODES, None, "sm80"),
        (PROMPT, None, "sm90"),
        (DECODES, GROUPS, "sm90"),
        (DECODES, None, "sm80"),
    ):
        assert layer.plan(lens, groups) == family
        layer.out.fill_(float("nan"))
        layer.run()
        layer.assert_right(lens)


def test_describe_says_why_no_other_family_is_taken(torch):
    layer = Layer(torch, max_qo_tokens=512)
    for lens, groups, reason in (
        (DECODES, None, "not sm90: requests have few query rows"),
        (PROMPT, None, "not sm80: a request has many query rows"),
        (DECODES, GROUPS, "not sm80: the kernel above is faster for so many shared keys"),
        (PROMPT, None, "not sm90_gather: slower for these options"),
    ):
        plan = layer.attn.plan(*lens, shared_prefixes=groups)
        assert reason in plan.describe().splitlines()
    layer = Layer(torch, max_qo_tokens=BATCH)
    layer.plan(DECODES)
    capture_with_torch(layer)
    described = layer.attn.plan(*DECODES, shared_prefixes=GROUPS).describe().splitlines()
    assert "not sm90: a captured graph has only the kernel above" in described


@pytest.mark.parametrize(("kernels", "family"), [("general", "sm80"), ("hopper", "sm90")])
def test_one_group_of_kernels_runs_every_batch(torch, seed, kernels, family):
    torch.manual_seed(seed)
    layer = Layer(torch, max_qo_tokens=512, kernels=kernels)
    for lens, groups in ((DECODES, None), (PROMPT, None), (DECODES, GROUPS)):
        assert layer.plan(lens, groups) == family
        layer.out.fill_(float("nan"))
        layer.run()
        layer.assert_right(lens)
    other = "sm90" if family == "sm80" else "sm80"
    described = layer.attn.plan(*PROMPT).describe()
    assert f"\nnot {other}: kernels: expected " in described


def test_a_graph_of_prompts_has_both_kernels(torch, seed):
    """Whichever kernel the captured plan took."""
    torch.manual_seed(seed)
    for captured in (DECODES, PROMPT):
        layer = Layer(torch, max_qo_tokens=512)
        layer.plan(captured)
        replay = capture_with_torch(layer)
        for lens, groups, family in (
            (captured, None, None),
            (DECODES, GROUPS, "sm90"),
            (DECODES, None, "sm80"),
            (PROMPT, None, "sm90"),
            (DECODES, None, "sm80"),
        ):
            taken = layer.plan(lens, groups)
            assert family in (None, taken)
            layer.out.fill_(float("nan"))
            replay()
            layer.assert_right(lens)


@pytest.mark.parametrize(("captured", "kept"), [(None, "sm80"), (GROUPS, "sm90")])
def test_a_graph_of_decodes_keeps_its_kernel(captured, kept, torch, seed):
    torch.manual_seed(seed)
    layer = Layer(torch, max_qo_tokens=BATCH)
    assert layer.plan(DECODES) == "sm80"
    assert layer.plan(DECODES, GROUPS) == "sm90"
    assert layer.plan(DECODES, captured) == kept
    replay = capture_with_torch(layer)
    for groups in (None, GROUPS, [[0, 8, PREFIX]], None):
        assert layer.plan(DECODES, groups) == kept
        layer.out.fill_(float("nan"))
        replay()
        layer.assert_right(DECODES)
