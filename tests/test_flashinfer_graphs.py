# SPDX-License-Identifier: Apache-2.0
"""Wrappers with FlashInfer's names and CUDA graphs. On the CPU a graph is a list of runs: a replay
repeats the calls of `Attention.run`, with the same objects and tensors."""

import pytest

from flashinfer_cases import Batch, Case, poisoned, workspace

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
from flashplan import flashinfer  # noqa: E402
from flashplan.flashinfer import _plans  # noqa: E402

BATCH_SIZE, MAX_PAGES = 3, 40
STEPS = ([30, 4, 17], [60, 1, 0], [5, 5, 70])


class Graph:
    """What ran while it was captured."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.calls = []
        self.real_run = fp.Attention.run

    def __enter__(self):
        def run(attn, *args, **kwargs):
            self.calls.append((attn, args, kwargs))
            return self.real_run(attn, *args, **kwargs)

        self.monkeypatch.setattr(fp.Attention, "run", run)
        self.monkeypatch.setattr(_plans, "is_capturing", lambda device: True)

    def __exit__(self, *_):
        self.monkeypatch.undo()

    def replay(self):
        for attn, args, kwargs in self.calls:
            self.real_run(attn, *args, **kwargs)


@pytest.fixture
def graph(monkeypatch):
    return Graph(monkeypatch)


def int32(*shape):
    return torch.full(shape, -7, dtype=torch.int32)


def decode_wrapper(**options):
    return flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(torch), int32(BATCH_SIZE + 1), int32(MAX_PAGES), int32(BATCH_SIZE), **options
    )


def prefill_wrapper(**options):
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(torch),
        "NHD",
        True,
        int32(BATCH_SIZE + 1),
        int32(BATCH_SIZE + 1),
        int32(MAX_PAGES),
        int32(BATCH_SIZE),
        **options,
    )


def plan_decode(wrapper, batch, plan=None, **options):
    table = batch.page_table()
    (plan or wrapper.plan)(
        *table, *batch.case.heads, 64, batch.case.page_size, q_data_type=torch.float32, **options
    )
    return table


def plan_prefill(wrapper, batch, **options):
    wrapper.plan(
        batch.ends(batch.qo_lens),
        *batch.page_table(),
        *batch.case.heads,
        64,
        batch.case.page_size,
        causal=batch.case.causal,
        q_data_type=torch.float32,
        **options,
        **batch.mask_arguments(),
    )


class Tensors:
    """Of the layer that a graph runs: they stay where they are."""

    def __init__(self, rows):
        self.q = poisoned(torch, rows, 4, 64)
        self.cache = poisoned(torch, 2, MAX_PAGES, 5, 2, 64)
        self.out, self.lse = poisoned(torch, rows, 4, 64), poisoned(torch, rows, 4)

    def set(self, batch):
        q = batch.joined(batch.q)
        self.q[: len(q)] = q
        for place, cache in zip(self.cache, batch.pages()):
            place[: len(cache)] = cache

    def run(self, wrapper, **options):
        wrapper.run(
            self.q, tuple(self.cache), out=self.out, lse=self.lse, return_lse=True, **options
        )

    def check(self, batch):
        rows = sum(batch.qo_lens)
        batch.check(self.out[:rows], self.lse[:rows])
        self.out.fill_(torch.nan)


@pytest.mark.parametrize("fast", [False, True])
def test_replays_of_decodes(rng, graph, fast):
    wrapper, tensors = decode_wrapper(), Tensors(BATCH_SIZE)
    assert wrapper.is_cuda_graph_enabled
    for step, kv_lens in enumerate(STEPS):
        batch = Batch(torch, rng, Case(), [1] * BATCH_SIZE, kv_lens)
        if fast and step:  # the caller writes the buffers, as SGLang does
            indptr, indices, last = batch.page_table()
            wrapper._paged_kv_indptr_buf.copy_(indptr)
            wrapper._paged_kv_indices_buf[: len(indices)] = indices
            wrapper._paged_kv_last_page_len_buf.copy_(last)
            nothing = int32(len(indptr)), int32(len(indices))
            longer = torch.cat((indptr, int32(2)))  # of a larger batch
            flashinfer.fast_decode_plan(
                wrapper,
                *nothing,
                last,
                4,
                2,
                64,
                5,
                q_data_type=torch.float32,
                global_override_indptr_cpu=longer,
            )
        else:
            plan_decode(wrapper, batch)
        tensors.set(batch)
        if step == 0:
            tensors.run(wrapper)
            with graph:
                tensors.run(wrapper)
        else:
            graph.replay()
        tensors.check(batch)


def test_fast_decode_plan_without_graphs(rng):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(torch))
    for kv_lens in STEPS:
        batch = Batch(torch, rng, Case(), [1] * BATCH_SIZE, kv_lens)

        def plan(*args, **kwargs):
            flashinfer.fast_decode_plan(wrapper, *args, **kwargs)

        plan_decode(wrapper, batch, plan)
        batch.check(*wrapper.run(batch.joined(batch.q), batch.pages(), return_lse=True))


@pytest.mark.parametrize("mask", [None, "bool", "packed"])
def test_replays_of_prefills(rng, graph, mask):
    """Also of masks, which are in a buffer."""
    buffer = torch.zeros(1000, dtype=torch.uint8) if mask else None
    wrapper, tensors = prefill_wrapper(custom_mask_buf=buffer), Tensors(9)
    for step, kv_lens in enumerate(STEPS):
        case = Case(causal=True, mask=mask)
        batch = Batch(torch, rng, case, [(4, 3, 2), (1, 1, 1), (0, 8, 1)][step], kv_lens)
        plan_prefill(wrapper, batch)
        tensors.set(batch)
        if step == 0:
            with graph:
                tensors.run(wrapper)  # plan() prepares the first run
        else:
            graph.replay()
        tensors.check(batch)


def test_replays_of_masks_that_the_engine_packs(rng, graph):
    """SGLang writes the bits to custom_mask_buf, and plans by the compiled module."""
    buffer = torch.full((1000,), 0xFF, dtype=torch.uint8)
    wrapper, tensors = prefill_wrapper(custom_mask_buf=buffer), Tensors(9)
    for step, kv_lens in enumerate(STEPS):
        batch = Batch(torch, rng, Case(causal=True, mask="packed"), (3, 3, 3), kv_lens)
        if step == 0:
            plan_prefill(wrapper, batch)
            tensors.set(batch)
            with graph:
                tensors.run(wrapper)
        else:
            indptr, indices, last = batch.page_table()
            wrapper._paged_kv_indptr_buf.copy_(indptr)
            wrapper._paged_kv_indices_buf[: len(indices)] = indices
            bits = batch.mask_arguments()["packed_custom_mask"]
            buffer[: len(bits)] = bits
            lengths = batch.ends(batch.qo_lens), indptr, batch.integers(kv_lens)
            wrapper._cached_module.plan(None, None, None, *lengths, *[None] * 14)
            tensors.set(batch)
            graph.replay()
        tensors.check(batch)


def test_replays_of_masks_after_a_batch_without_one(rng, graph):
    """The mask of the graph stays where it is. Its buffer may be written in any mode of PyTorch."""
    buffer = torch.zeros(1000, dtype=torch.uint8)
    wrapper, tensors = prefill_wrapper(custom_mask_buf=buffer), Tensors(9)
    for step, mask in enumerate(("bool", None, "bool")):
        batch = Batch(torch, rng, Case(causal=True, mask=mask), (4, 3, 2), STEPS[step])
        with torch.inference_mode(step == 0):
            plan_prefill(wrapper, batch)
        tensors.set(batch)
        if step == 0:
            with graph:
                tensors.run(wrapper)
        elif mask:
            graph.replay()
        else:
            tensors.run(wrapper)
        tensors.check(batch)


def test_replays_of_ragged_keys(rng, graph):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(torch), "NHD", True, int32(BATCH_SIZE + 1), int32(BATCH_SIZE + 1)
    )
    tensors = Tensors(9)
    k, v = poisoned(torch, 100, 2, 64), poisoned(torch, 100, 2, 64)
    for step, kv_lens in enumerate(STEPS):
        batch = Batch(torch, rng, Case(causal=True), (4, 3, 2), kv_lens)
        wrapper.plan(
            batch.ends(batch.qo_lens),
            batch.ends(kv_lens),
            4,
            2,
            64,
            causal=True,
            q_data_type=torch.float32,
        )
        for place, parts in ((tensors.q, batch.q), (k, batch.k), (v, batch.v)):
            joined = batch.joined(parts)
            place[: len(joined)] = joined
        if step == 0:
            with graph:
                wrapper.run(tensors.q, k, v, out=tensors.out, lse=tensors.lse, return_lse=True)
        else:
            graph.replay()
        tensors.check(batch)


def test_every_object_of_a_graph_is_planned_again(rng, graph):
    """Layers of two windows, by forward(): each has an object of its own, and plan() does both."""
    wrapper, windows = decode_wrapper(), (-1, 3)
    tensors = [Tensors(BATCH_SIZE) for _ in windows]

    def forward():
        return [
            wrapper.forward_return_lse(x.q, tuple(x.cache), window_left=window)
            for x, window in zip(tensors, windows)
        ]

    for step, kv_lens in enumerate(STEPS):
        batch = Batch(torch, rng, Case(), [1] * BATCH_SIZE, kv_lens)
        plan_decode(wrapper, batch)
        for x in tensors:
            x.set(batch)
        if step == 0:
            forward()
            with graph:
                forward()
            for (_, _, kwargs), x in zip(graph.calls, tensors):  # a graph keeps its outputs
                kwargs |= {"out": x.out, "lse": x.lse}
        graph.replay()
        for x, window in zip(tensors, windows):
            batch.case = Case(window_left=window)
            x.check(batch)


def test_first_run_in_a_capture(rng, graph):
    wrapper, tensors = decode_wrapper(), Tensors(BATCH_SIZE)
    batch = Batch(torch, rng, Case(), [1] * BATCH_SIZE, STEPS[0])
    plan_decode(wrapper, batch)
    tensors.set(batch)
    with graph, pytest.raises(RuntimeError, match="run: expected .* before the capture"):
        tensors.run(wrapper, window_left=3)
    with graph, pytest.raises(RuntimeError, match="run: expected .* before the capture"):
        plan_decode(wrapper, batch)


def test_errors_of_fixed_shapes(rng):
    def batch(qo_lens, kv_lens):
        return Batch(torch, rng, Case(), qo_lens, kv_lens)

    wrapper = decode_wrapper(use_tensor_cores=True)
    plan_decode(wrapper, batch([1] * 3, STEPS[0]))
    with pytest.raises(ValueError, match="batch size should be fixed in cudagraph mode, got 2"):
        plan_decode(wrapper, batch([1] * 2, [3, 4]))
    with pytest.raises(ValueError, match="indices: expected at most 40 pages, .* got 43"):
        plan_decode(wrapper, batch([1] * 3, [205, 5, 5]))
    with pytest.raises(ValueError, match="q_len_per_req: .* frozen cudagraph shape, got 2"):
        plan_decode(wrapper, batch([2] * 3, STEPS[0]), q_len_per_req=2)
    prefill = prefill_wrapper()
    plan_prefill(prefill, batch([2, 3, 1], STEPS[0]))
    with pytest.raises(ValueError, match="qo_indptr: expected at most 6 rows, .* got 7"):
        plan_prefill(prefill, batch([2, 3, 2], STEPS[0]))
    with pytest.raises(ValueError, match="batch size should be fixed in cudagraph mode, got 2"):
        plan_prefill(prefill, batch([2, 3], [3, 4]))
    masked = prefill_wrapper(custom_mask_buf=torch.zeros(8, dtype=torch.uint8))
    case = Case(mask="bool")
    plan_prefill(masked, Batch(torch, rng, case, [1, 1, 1], [20, 20, 20]))
    with pytest.raises(ValueError, match="custom_mask: expected requests of at most 64 keys"):
        plan_prefill(masked, Batch(torch, rng, case, [1, 1, 1], [90, 20, 20]))


BUFFERS = ["indptr", "indices", "last_page_len"]


@pytest.mark.parametrize("missing", BUFFERS)
def test_missing_buffers(missing):
    buffers = {
        f"paged_kv_{name}_buffer": None if name == missing else int32(3 + (name == "indptr"))
        for name in BUFFERS
    }
    with pytest.raises(ValueError, match=f"paged_kv_{missing}_buffer: expected a torch.Tensor"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(torch), use_cuda_graph=True, **buffers
        )


def test_buffers_of_wrong_sizes():
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer: expected 4 elements, got 3"):
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace(torch), int32(3), int32(9), int32(3)
        )
    with pytest.raises(ValueError, match="kv_indptr_buf: expected 4 elements, got 3"):
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace(torch), "NHD", True, int32(4), int32(3)
        )
    with pytest.raises(ValueError, match="qo_indptr_buf: expected a torch.Tensor"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace(torch), "NHD", True, None, int32(4), int32(9), int32(3)
        )
