# SPDX-License-Identifier: Apache-2.0
"""examples/streaming.py: a cache from which pages are evicted, against a slow one in float64."""

import functools
import importlib
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import reference
from rope_cases import rotated

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.fixture
def streaming(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("streaming")


class SlowReader:
    """The same as streaming.Reader, with keys in arrays that are deleted from."""

    def __init__(self, streaming, model, capacity):
        self.streaming, self.model, self.capacity = streaming, model, capacity
        c = model.config
        self.kv = [np.empty((2, 0, c.num_kv_heads, c.head_dim)) for _ in range(c.num_layers)]

    def read(self, tokens):
        page = self.streaming.PAGE_SIZE
        first = self.streaming.SINK_PAGES * page
        while self.kv[0].shape[1] + len(tokens) > self.capacity:
            self.kv = [np.delete(x, range(first, first + page), axis=1) for x in self.kv]
        rotate = functools.partial(rotated, rope=self.model.rope)

        def attend(layer, q, k, v):
            self.kv[layer] = np.concatenate([self.kv[layer], [k, v]], axis=1)
            return reference.attention(q, *self.kv[layer], rotate=rotate)[0].astype(np.float32)

        return self.model.forward(tokens, None, attend, slice(None))


def test_evicted_pages_close_up(streaming, rng):
    model = streaming.random_llama(seed=1)
    tokens = rng.integers(256, size=700).tolist()
    reader = streaming.Reader(model, streaming.StreamingCache(model, num_pages=13))
    losses = streaming.losses(reader, tokens)
    assert reader.cache.num_cached <= 13 * streaming.PAGE_SIZE
    slow = SlowReader(streaming, model, 13 * streaming.PAGE_SIZE)
    np.testing.assert_allclose(losses, streaming.losses(slow, tokens), atol=1e-4)


def test_a_cache_that_keeps_all_is_dense_attention(streaming, rng):
    """With keys that are rotated once, by their positions in the text."""
    model = streaming.random_llama(seed=2)
    tokens = rng.integers(256, size=100).tolist()
    reader = streaming.Reader(model, streaming.StreamingCache(model, num_pages=7, evicts=False))
    logits = reader.read(tokens)

    def attend(layer, q, k, v):
        return reference.attention(q, k, v)[0].astype(np.float32)

    exact = model.forward(tokens, range(100), attend, slice(None))
    np.testing.assert_allclose(logits, exact, atol=1e-4)
    with pytest.raises(ValueError, match="do not fit"):
        reader.read(tokens)


def test_streaming_runs():
    """With the demo's model where it is installed."""
    arguments = ["--tokens", "420", "--cache", "256", "--dense-tokens", "300"]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "streaming.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ *(\d+) to +(\d+) +([\d.]+) +([\d.]+|-)$", done.stdout, re.MULTILINE)
    assert [row[:2] for row in rows] == [("0", "256"), ("256", "420")]
    assert rows[0][2] == rows[0][3]
    assert rows[1][3] == "-"


def test_the_default_text_is_longer_than_the_cache(streaming, monkeypatch, capsys):
    """So that the two readers differ, with the tiny model too."""
    model = streaming.random_llama(seed=0)
    monkeypatch.setattr(streaming, "load", lambda: (model, "", lambda text: list(text.encode())))
    monkeypatch.setattr(sys, "argv", ["streaming.py", "--cache", "320", "--dense-tokens", "1"])
    assert streaming.main() == 0
    assert re.search(r"cache of streaming: .* for 640 tokens$", capsys.readouterr().out, re.M)
