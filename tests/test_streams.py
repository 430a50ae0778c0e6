# SPDX-License-Identifier: Apache-2.0
"""How streams are named and handed to producers. No GPU: arrays only say that they are on one."""

import numpy as np
import pytest

import flashplan as fp


class OnCuda:
    """Host memory that says it is on cuda:0, and remembers what it was asked."""

    def __init__(self, array):
        self.array, self.asked = array, []

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream=None, max_version=None):
        self.asked.append(stream)
        return self.array.__dlpack__(max_version=max_version)


class OldProducer(OnCuda):
    """From before DLPack 1.0."""

    def __dlpack__(self, *, stream=None):
        self.asked.append(stream)
        return self.array.__dlpack__()


class LikeCupy(OnCuda):
    pass


LikeCupy.__module__ = "cupy"


class CudaStreamProtocol:
    def __init__(self, *answer):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer


class TorchStream:
    cuda_stream = 0x70


class CupyStream:
    ptr = 0x80


def merge(producer, stream):
    """Two states that differ, merged on `stream`; the first decides where the call works."""
    state = producer(np.ones((2, 3, 4), np.float32))
    lse = np.zeros((2, 3), np.float32)
    out, out_lse = np.empty_like(state.array), np.empty_like(lse)
    fp.merge_states(state, lse, state.array, lse, out=out, lse=out_lse, stream=stream)
    assert (out == 1).all()
    return state.asked


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0x50, 0x50),
        (np.uint64(0x50), None),
        (2, 2),
        (1, 1),
        (0, 1),  # DLPack's name for the legacy default stream
        (CudaStreamProtocol(0, 0x60), 0x60),
        (TorchStream(), 0x70),
        (CupyStream(), 0x80),
    ],
)
def test_producers_order_their_work_with_the_stream(stream, handle):
    if handle is None:
        with pytest.raises(TypeError, match="^stream: expected an int or .*, got uint64$"):
            merge(OnCuda, stream)
        return
    assert merge(OnCuda, stream) == [handle]
    assert merge(OldProducer, stream) == [handle]


def test_cupy_is_not_synchronised():
    """Its arrays are ready on its current stream, or on the one that the caller names."""
    assert merge(LikeCupy, 0x50) == [-1]


@pytest.mark.parametrize(
    "stream",
    ["fast", 1.5, True, object(), CudaStreamProtocol(0, "x"), CudaStreamProtocol(0, 0x60, 1), []],
)
def test_what_is_no_stream_is_refused(stream):
    expected = (
        "^stream: expected an int or an object with __cuda_stream__, .ptr or .cuda_stream, "
        rf"got (test_streams\.)?{type(stream).__name__}$"
    )
    with pytest.raises(TypeError, match=expected):
        merge(OnCuda, stream)


@pytest.mark.parametrize("stream", [-1, 1 << 64])
def test_numbers_that_are_no_handles_are_refused(stream):
    with pytest.raises(ValueError, match=f"^stream: expected a handle, got {stream}$"):
        merge(OnCuda, stream)


def test_there_is_no_stream_on_the_cpu():
    x, lse = np.ones((1, 1, 4), np.float32), np.ones((1, 1), np.float32)
    attn = fp.Attention(1, 1, 4, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 1], [1])
    for stream in (0, 7, "fast", TorchStream()):
        for call in (
            lambda s: attn.plan([0, 1], [1], stream=s),
            lambda s: attn.run(x, x, x, stream=s),
            lambda s: fp.merge_states(x, lse, x, lse, stream=s),
        ):
            with pytest.raises(ValueError, match="^stream: expected None on the cpu, got "):
                call(stream)
    assert (attn.run(x, x, x) == 1).all()
