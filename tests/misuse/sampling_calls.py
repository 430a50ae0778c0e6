# SPDX-License-Identifier: Apache-2.0
"""Random valid calls of softmax() and sample()."""

import numpy as np

import flashplan as fp
from misuse.calls import Call, pick
from misuse.capsules import FLOATS, INTS
from misuse.finding import Finding
from sampling_cases import distribution


class OfLogits(Call):
    """Logits, and parameters of which each may be a tensor [batch]."""

    dtypes = {"logits": FLOATS}

    def __init__(self, rng):
        super().__init__(rng)
        self.batch, self.vocab = pick(rng, 0, 1, 3, 5), pick(rng, 1, 7, 33, 300)
        dtype = pick(rng, "float32", "float16", "bfloat16")
        logits = 4 * rng.standard_normal((self.batch, self.vocab), np.float32)
        self.place("logits", logits.astype(dtype))

    def place_some(self, **parameters):
        for name, (low, high, dtype) in parameters.items():
            values = self.rng.uniform(low, high, self.batch).astype(dtype)
            if self.rng.integers(2):
                self.place(name, values)


class Softmax(OfLogits):
    """softmax()."""

    related = {"logits": ("temperature", "out")}
    written = ("out",)
    in_place = (("out", "logits"),)
    dtypes = {"logits": FLOATS, "out": FLOATS}
    parameters = optional = ("temperature",)

    def __init__(self, rng):
        super().__init__(rng)
        self.place_some(temperature=(0.1, 3, "f4"))
        logits = self.array("logits")
        dtype = pick(rng, "float32", str(logits.dtype))
        self.place("out", np.full(logits.shape, np.nan, dtype))
        temperature = self.array("temperature") if "temperature" in self.tensors else 1.0
        x = logits.astype(np.float64) / np.reshape(temperature, (-1, 1))
        x = np.exp(x - x.max(-1, keepdims=True))
        self.expected = x / x.sum(-1, keepdims=True)

    def invoke(self, **changes):
        return fp.softmax(**self.arguments() | changes)

    def verify(self):
        out = self.array("out").astype(np.float64)
        eps = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[str(self.array("out").dtype)]
        if not (np.abs(out - self.expected) <= eps * self.expected + 1e-7).all():
            raise Finding("differs from the reference: softmax")


class Sample(OfLogits):
    """sample()."""

    parameters = ("temperature", "top_k", "top_p", "min_p", "seed", "offset")
    written = ("out", "logprobs", "status")
    optional = (*parameters, "logit_bias", "logprobs", "status")
    numbers = (*parameters, "from_probs")
    read_whole = ("logits",)
    related = {
        "logits": (*parameters, "logit_bias", *written),
        "from_probs": ("temperature", "logits"),
    }

    def __init__(self, rng):
        super().__init__(rng)
        self.place_some(
            temperature=(0, 2, "f4"),
            top_k=(1, 40, "i4"),
            top_p=(0.1, 1, "f4"),
            min_p=(0, 0.5, "f4"),
            seed=(-(2**62), 2**62, "i8"),
            offset=(-(2**62), 2**62, "i8"),
        )
        given = {name: placed.array.copy() for name, placed in self.tensors.items()}
        self.expected = fp.sample(**given, return_logprobs=True)
        logits = given.pop("logits")
        for i, token in enumerate(self.expected[0]):
            filters = {n: x[i] for n, x in given.items() if n not in ("seed", "offset")}
            if not distribution(logits[i], **filters, slack=-1)[token] > 0:
                raise Finding(f"sample() drew token {token}, which the filters drop")
        self.place("out", np.full(self.batch, -7, np.int32))
        self.place("logprobs", np.full(self.batch, np.nan, np.float32))
        self.place("status", np.full(self.batch, -7, np.int32))

    def invoke(self, **changes):
        return fp.sample(**self.arguments() | changes)

    def verify(self):
        for name, expected in zip(("out", "logprobs"), self.expected, strict=True):
            if not np.array_equal(self.array(name), expected):
                raise Finding(f"sample() gives other {name} for the same arguments")
        if self.array("status").any():
            raise Finding("sample() succeeds with an error in status")


class Verify(Call):
    """speculative_verify() of chains and trees."""

    parameters = ("seed", "offset")
    written = ("out", "num_accepted", "nodes", "status")
    optional = ("draft_probs", "draft_parents", "nodes", "status", "seed", "offset")
    numbers = parameters
    dtypes = {"draft_tokens": INTS}
    related = {
        "target_probs": ("draft_probs", "draft_tokens", "draft_parents", *written, *parameters),
        "draft_probs": ("target_probs",),
    }

    def __init__(self, rng):
        super().__init__(rng)
        batch, n, vocab = pick(rng, 0, 1, 3), pick(rng, 0, 1, 4), pick(rng, 1, 7, 300)
        dtype = pick(rng, "float32", "float16", "bfloat16")
        rows = rng.random((batch, 2 * n + 1, vocab)) + 0.01
        rows = (rows / rows.sum(-1, keepdims=True)).astype(dtype)
        tokens = rng.integers(-1, vocab, (batch, n)).astype(pick(rng, "i4", "i8"))
        self.place("draft_tokens", tokens)
        self.place("draft_probs", rows[:, :n])
        self.place("target_probs", rows[:, n:])
        if rng.integers(2):
            parents = [rng.integers(-1, i) if i else -1 for i in range(n)]
            self.place("draft_parents", np.array(parents, np.int32))
        if rng.integers(2):
            self.place("seed", rng.integers(-(2**62), 2**62, batch))
        given = {name: placed.array.copy() for name, placed in self.tensors.items()}
        nodes = np.full((batch, n), -7, np.int32)
        self.expected = [*fp.speculative_verify(**given, nodes=nodes), nodes]
        self.place("out", np.full((batch, n + 1), -7, np.int32))
        for name in ("num_accepted", "status"):
            self.place(name, np.full(batch, -7, np.int32))
        self.place("nodes", np.full((batch, n), -7, np.int32))

    def invoke(self, **changes):
        return fp.speculative_verify(**self.arguments() | changes)

    def verify(self):
        for name, expected in zip(("out", "num_accepted", "nodes"), self.expected):
            if not np.array_equal(self.array(name), expected):
                raise Finding(f"speculative_verify() gives other {name} for the same arguments")
        if self.array("status").any():
            raise Finding("speculative_verify() succeeds with an error in status")


class Penalties(OfLogits):
    """apply_penalties(), which writes logits."""

    parameters = optional = numbers = ("repetition", "presence", "frequency")
    written = ("logits",)
    dtypes = {"logits": FLOATS, "history": INTS}
    related = {
        "logits": ("history", "history_lens", *parameters),
        "history": ("history_lens",),
        "history_lens": ("history",),
    }

    def __init__(self, rng):
        super().__init__(rng)
        shape = self.batch, pick(rng, 0, 1, 9)
        history = rng.integers(0, self.vocab, shape).astype(pick(rng, "i4", "i8"))
        self.place("history", history)
        lens = rng.integers(0, shape[1] + 1, self.batch).astype(np.int32)
        self.place("history_lens", lens)
        self.place_some(repetition=(0.5, 2, "f4"), presence=(-1, 1, "f4"), frequency=(-1, 1, "f4"))
        given = {name: placed.array.copy() for name, placed in self.tensors.items()}
        fp.apply_penalties(**given)
        self.expected = given["logits"]

    def invoke(self, **changes):
        return fp.apply_penalties(**self.arguments() | changes)

    def verify(self):
        if not np.array_equal(self.array("logits"), self.expected):
            raise Finding("apply_penalties() gives other logits for the same arguments")
