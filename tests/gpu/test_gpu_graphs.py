# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: captured once at the bounds, replayed for any smaller batch."""

import random

import numpy as np
import pytest

import flashplan as fp
from gpu_cases import DEVICE, SOAK

pytestmark = pytest.mark.gpu

MAX_BATCH, MAX_TOKENS, NUM_PAGES, PAGE_SIZE, MAX_PAGES = 16, 256, 600, 16, 200
HEADS = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128}
NAN = float("nan")


class Server:
    """Static tensors of one layer, and an Attention that a graph is captured from."""

    def __init__(self, torch, seed, **options):
        self.torch, self.rng = torch, random.Random(seed)
        self.options = HEADS | {
            "page_size": PAGE_SIZE,
            "max_batch_size": MAX_BATCH,
            "max_qo_tokens": MAX_TOKENS,
            "device": DEVICE,
        }
        self.options |= options
        self.attn, self.eager = (fp.Attention(**self.options) for _ in range(2))

        def normal(*shape):
            return torch.randn(shape, device=DEVICE).bfloat16()

        self.q = normal(MAX_TOKENS, 8, 128)
        self.k, self.v = (normal(NUM_PAGES, PAGE_SIZE, 2, 128) for _ in range(2))
        self.block_table = torch.randint(
            NUM_PAGES, (MAX_BATCH, MAX_PAGES), dtype=torch.int32, device=DEVICE
        )
        self.out = torch.full_like(self.q, NAN)
        self.lse = torch.full((MAX_TOKENS, 8), NAN, device=DEVICE)

    def random_lens(self):
        """Decode, prefill, both, empty requests, or no request at all."""
        rng = self.rng
        batch_size = rng.choice((0, 1, 2, 7, MAX_BATCH, MAX_BATCH))
        most = MAX_TOKENS // max(1, batch_size)
        qo_lens = [rng.choice((0, 1, 1, 1, 1, rng.randint(1, most))) for _ in range(batch_size)]
        longest = rng.choice((1, 50, 300, PAGE_SIZE * MAX_PAGES))
        kv_lens = [rng.randint(0, longest) for _ in range(batch_size)]
        return np.cumsum([0, *qo_lens], dtype=np.int32), np.array(kv_lens, np.int32)

    def plan(self, lens):
        self.attn.plan(*lens)

    def run(self, attn=None, out=None, lse=None, **more):
        (attn or self.attn).run(
            self.q,
            self.k,
            self.v,
            block_table=self.block_table,
            out=self.out if out is None else out,
            lse=self.lse if lse is None else lse,
            **more,
        )

    def shuffle(self):
        """Another step: other queries and other pages at the same addresses."""
        self.q.normal_()
        self.block_table.random_(NUM_PAGES)

    def poison(self):
        self.out.fill_(NAN)
        self.lse.fill_(NAN)

    def assert_same_as_eager(self, lens):
        """Bit for bit, and what is beyond the batch is untouched."""
        torch = self.torch
        self.eager.plan(*lens)
        out, lse = torch.full_like(self.out, NAN), torch.full_like(self.lse, NAN)
        self.run(self.eager, out, lse)
        assert torch.equal(self.out.view(torch.int16), out.view(torch.int16))
        assert torch.equal(self.lse.view(torch.int32), lse.view(torch.int32))
        rows = int(lens[0][-1])
        assert not out[:rows].isnan().any()
        assert out[rows:].isnan().all()


def capture_with_torch(server):
    torch = server.torch
    graph = torch.cuda.CUDAGraph()
    server.run()  # warm
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        server.run()
    return graph.replay


def capture_with_cupy(server, cupy):
    """The server's torch tensors, run and captured on a stream of CuPy's."""
    stream = cupy.cuda.Stream(non_blocking=True)
    server.run()
    server.torch.cuda.synchronize()
    q, k, v, table, out = (
        cupy.from_dlpack(x.view(server.torch.uint16) if x.element_size() == 2 else x)
        for x in (server.q, server.k, server.v, server.block_table, server.out)
    )
    lse = cupy.from_dlpack(server.lse)
    with stream:
        stream.begin_capture()
        server.attn.run(q, k, v, block_table=table, out=out, lse=lse)
        graph = stream.end_capture()
    current = server.torch.cuda.current_stream

    def replay():
        graph.launch(stream=cupy.cuda.ExternalStream(current().cuda_stream))

    replay.keep = (graph, q, k, v, table, out, lse)
    return replay


AT_BOUNDS = (
    np.linspace(0, MAX_TOKENS, MAX_BATCH + 1).astype(np.int32),
    np.full(MAX_BATCH, PAGE_SIZE * MAX_PAGES, np.int32),
)
EMPTY = (np.zeros(1, np.int32), np.zeros(0, np.int32))
NO_QUERIES = (np.zeros(4, np.int32), np.full(3, 100, np.int32))
NO_KEYS = (np.arange(6, dtype=np.int32), np.zeros(5, np.int32))
DECODE = (np.arange(MAX_BATCH + 1, dtype=np.int32), np.arange(MAX_BATCH, dtype=np.int32) * 200)


@pytest.mark.parametrize("captured", [AT_BOUNDS, DECODE, EMPTY], ids=["bounds", "decode", "empty"])
@pytest.mark.parametrize("framework", ["torch", "cupy"])
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=["default", "invariant"])
def test_replay_serves_any_batch(captured, framework, options, torch, cupy, seed):
    torch.manual_seed(seed)
    server = Server(torch, seed, **options)
    server.plan(captured)
    replay = capture_with_torch(server) if framework == "torch" else capture_with_cupy(server, cupy)
    batches = [AT_BOUNDS, DECODE, EMPTY, NO_QUERIES, NO_KEYS, DECODE, AT_BOUNDS]
    for lens in batches + [server.random_lens() for _ in range(40)]:
        server.shuffle()
        server.poison()
        torch.cuda.synchronize()
        server.attn.plan(*lens, stream=torch.cuda.current_stream())
        replay()
        server.assert_same_as_eager(lens)


def test_replay_reads_the_lengths_of_the_device(torch, seed):
    """Planned once for the longest requests, or step by step: the bits of plans with the lengths
    that are on the device when the graph is replayed."""
    torch.manual_seed(seed)
    server = Server(torch, seed, batch_invariant=True)
    server.plan(AT_BOUNDS)
    kv_lens = torch.zeros(MAX_BATCH, dtype=torch.int32, device=DEVICE)
    server.run(kv_lens=kv_lens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        server.run(kv_lens=kv_lens)
    for step in range(30):
        planned = server.random_lens() if step % 3 == 2 else AT_BOUNDS
        server.plan(planned)
        real = [server.rng.choice((0, n, server.rng.randint(0, n))) for n in planned[1].tolist()]
        lens = (planned[0], np.array(real, np.int32))
        server.shuffle()
        server.poison()
        kv_lens.zero_()
        kv_lens[: len(real)] = torch.from_numpy(lens[1]).to(DEVICE)
        graph.replay()
        server.assert_same_as_eager(lens)


def test_replay_reads_scales_and_sinks(torch, seed):
    """Scales of each kv head, one without dimensions, and sinks: nothing waits for them."""
    torch.manual_seed(seed)
    server = Server(torch, seed)
    k_scale, v_scale = torch.ones(2, device=DEVICE), torch.tensor(1.0, device=DEVICE)
    sinks = torch.zeros(8, device=DEVICE)
    read = {"k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
    server.plan(AT_BOUNDS)
    server.run(**read)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        server.run(**read)
    for _ in range(10):
        server.plan(server.random_lens())
        k_scale.uniform_(0.5, 2), v_scale.uniform_(0.5, 2), sinks.normal_()
        server.poison()
        graph.replay()
        out, lse = torch.full_like(server.out, NAN), torch.full_like(server.lse, NAN)
        server.run(out=out, lse=lse, **read)
        assert torch.equal(server.out.view(torch.int16), out.view(torch.int16))
        assert torch.equal(server.lse.view(torch.int32), lse.view(torch.int32))


def test_many_layers_in_one_graph(torch, seed):
    """One plan, several captured runs on tensors of their own."""
    torch.manual_seed(seed)
    server = Server(torch, seed)
    server.plan(AT_BOUNDS)
    outs = [torch.full_like(server.out, NAN) for _ in range(6)]
    graph = torch.cuda.CUDAGraph()
    server.run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for out in outs:
            server.run(out=out)
    for lens in (DECODE, AT_BOUNDS, NO_KEYS):
        server.poison()
        for out in outs:
            out.fill_(NAN)
        server.plan(lens)
        graph.replay()
        for out in outs:
            server.out.copy_(out)
            server.assert_same_as_eager(lens)


def test_plan_is_refused_under_capture(torch, seed):
    """Before anything changes: the capture goes on, and the last plan stays valid."""
    server = Server(torch, seed)
    server.plan(DECODE)
    server.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"^stream: expected no capture under way, got "):
            server.plan(AT_BOUNDS)
        server.run()
    server.poison()
    graph.replay()
    server.assert_same_as_eager(DECODE)
    server.plan(AT_BOUNDS)
    server.poison()
    graph.replay()
    server.assert_same_as_eager(AT_BOUNDS)


def test_soak(torch, seed):
    """FLASHPLAN_SOAK replays of random batches, planned ahead of the GPU; some are checked."""
    torch.manual_seed(seed)
    server = Server(torch, seed)
    server.plan(AT_BOUNDS)
    replay = capture_with_torch(server)
    for step in range(SOAK):
        lens = server.random_lens()
        checked = step % 50 == 0 or step == SOAK - 1
        if checked:
            server.shuffle()
            server.poison()
        server.plan(lens)
        replay()
        if checked:
            server.assert_same_as_eager(lens)
    torch.cuda.synchronize()
