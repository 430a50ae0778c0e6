# SPDX-License-Identifier: Apache-2.0
"""sample() and softmax(): see bad_inputs.py."""

import numpy as np

from scene import half, int64, integers, read_only, zeros

NAN, INF = float("nan"), float("inf")
VALUE, TYPE = ValueError, TypeError


def logits_with(row, value):
    logits = np.full((4, 8), 0.125, np.float32)
    logits[row] = value
    return logits


SAMPLE = [
    ("sample none", TYPE, "logits", lambda s: s.sample(logits=None)),
    ("sample rank", VALUE, "logits", lambda s: s.sample(logits=zeros(8))),
    ("sample empty vocabulary", VALUE, "logits", lambda s: s.sample(logits=zeros(4, 0))),
    ("sample int", TYPE, "logits", lambda s: s.sample(logits=integers([1, 2]))),
    ("sample narrow", TYPE, "logits", lambda s: s.sample(logits=zeros(4, 8, dtype="float8_e5m2"))),
    ("sample nan", VALUE, r"logits\[2\]", lambda s: s.sample(logits=logits_with(2, NAN))),
    ("sample inf", VALUE, r"logits\[1\]", lambda s: s.sample(logits=logits_with(1, INF))),
    ("sample nothing", VALUE, r"logits\[3\]", lambda s: s.sample(logits=logits_with(3, -INF))),
    ("sample half", VALUE, r"logits\[0\]", lambda s: s.sample_probs(logits_with(0, 0.05))),
    ("sample negative", VALUE, r"logits\[2\]", lambda s: s.sample_probs(negative(2))),
    ("sample zeros", VALUE, r"logits\[3\]", lambda s: s.sample_probs(logits_with(3, 0.0))),
    ("sample temperature", VALUE, "temperature", lambda s: s.sample(temperature=-1)),
    ("sample hot", VALUE, "temperature", lambda s: s.sample(temperature=INF)),
    ("sample temperature class", TYPE, "temperature", lambda s: s.sample(temperature=np.float32)),
    ("sample temperature text", TYPE, "temperature", lambda s: s.sample(temperature="hot")),
    (
        "sample temperatures",
        VALUE,
        r"temperature\[1\]",
        lambda s: s.sample(temperature=np.float32([1, NAN, 1, 1])),
    ),
    (
        "sample temperatures size",
        VALUE,
        "temperature",
        lambda s: s.sample(temperature=np.float32([1, 1])),
    ),
    (
        "sample temperatures type",
        TYPE,
        "temperature",
        lambda s: s.sample(temperature=half(4)),
    ),
    ("sample k", VALUE, "top_k", lambda s: s.sample(top_k=0)),
    ("sample k large", VALUE, "top_k", lambda s: s.sample(top_k=2**31)),
    ("sample k text", TYPE, "top_k", lambda s: s.sample(top_k=1.5)),
    ("sample ks", VALUE, r"top_k\[3\]", lambda s: s.sample(top_k=integers(1, 1, 1, -1))),
    ("sample ks type", TYPE, "top_k", lambda s: s.sample(top_k=int64(1, 1, 1, 1))),
    ("sample p 0", VALUE, "top_p", lambda s: s.sample(top_p=0)),
    ("sample p 2", VALUE, "top_p", lambda s: s.sample(top_p=2)),
    ("sample p nan", VALUE, "top_p", lambda s: s.sample(top_p=NAN)),
    ("sample ps", VALUE, r"top_p\[0\]", lambda s: s.sample(top_p=np.float32([1.5, 1, 1, 1]))),
    ("sample min_p", VALUE, "min_p", lambda s: s.sample(min_p=-0.5)),
    ("sample min_p 2", VALUE, "min_p", lambda s: s.sample(min_p=1.5)),
    ("sample min_ps", VALUE, r"min_p\[2\]", lambda s: s.sample(min_p=np.float32([0, 0, 7, 0]))),
    ("sample seed", VALUE, "seed", lambda s: s.sample(seed=2**63)),
    ("sample seed text", TYPE, "seed", lambda s: s.sample(seed="seed")),
    ("sample seeds type", TYPE, "seed", lambda s: s.sample(seed=integers(1, 2, 3, 4))),
    ("sample seeds size", VALUE, "seed", lambda s: s.sample(seed=int64(1, 2, 3))),
    ("sample offset", TYPE, "offset", lambda s: s.sample(offset=0.5)),
    ("sample from_probs", TYPE, "from_probs", lambda s: s.sample(from_probs=2)),
    ("sample bias shape", VALUE, "logit_bias", lambda s: s.sample(logit_bias=zeros(7))),
    ("sample bias type", TYPE, "logit_bias", lambda s: s.sample(logit_bias=half(8))),
    ("sample bias rows", VALUE, "logit_bias", lambda s: s.sample(logit_bias=zeros(3, 8))),
    (
        "sample probabilities and bias",
        VALUE,
        "logit_bias",
        lambda s: s.sample(from_probs=True, logit_bias=zeros(8)),
    ),
    (
        "sample probabilities and temperature",
        VALUE,
        "temperature",
        lambda s: s.sample(from_probs=True, temperature=0.5),
    ),
    ("sample out type", TYPE, "out", lambda s: s.sample(out=int64(0, 0, 0, 0))),
    ("sample out shape", VALUE, "out", lambda s: s.sample(out=integers(0, 0))),
    ("sample out read-only", TYPE, "out", lambda s: s.sample(out=read_only(integers(0, 0, 0, 0)))),
    ("sample out one place", VALUE, "out", lambda s: s.sample(out=one_place())),
    ("sample out in logits", VALUE, "out", lambda s: memory_of(s.sample)),
    ("sample logprobs", VALUE, "logprobs", lambda s: s.sample(logprobs=zeros(3))),
    ("sample status", TYPE, "status", lambda s: s.sample(status=zeros(4))),
]
SOFTMAX = [
    ("softmax none", TYPE, "logits", lambda s: s.softmax(logits=None)),
    ("softmax rank", VALUE, "logits", lambda s: s.softmax(logits=zeros(2, 3, 4))),
    ("softmax temperature", VALUE, "temperature", lambda s: s.softmax(temperature=0)),
    ("softmax temperature type", TYPE, "temperature", lambda s: s.softmax(temperature=half(4))),
    ("softmax temperatures", VALUE, "temperature", lambda s: s.softmax(temperature=zeros(3))),
    ("softmax out shape", VALUE, "out", lambda s: s.softmax(out=zeros(4, 9))),
    ("softmax out type", TYPE, "out", lambda s: s.softmax(out=half(4, 8))),
    ("softmax out beside", VALUE, "out", lambda s: beside(s.softmax)),
]


def negative(row):
    probabilities = np.full((4, 8), 0.125, np.float32)
    probabilities[row, :2] = -0.125, 0.375
    return probabilities


def one_place():
    return np.lib.stride_tricks.as_strided(integers(0), (4,), (0,))


def memory_of(call):
    memory = zeros(4, 8)
    return call(logits=memory, out=memory.view(np.int32)[:, 0])


def beside(call):
    memory = zeros(5, 8)
    return call(logits=memory[:4], out=memory[1:])
