# SPDX-License-Identifier: Apache-2.0
"""sample() and softmax(): see bad_inputs.py."""

import numpy as np

from scene import half, int64, integers, read_only, sharing, zeros

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
    ("sample double", VALUE, r"logits\[1\]", lambda s: s.sample_probs(logits_with(1, 0.3))),
    ("sample negative", VALUE, r"logits\[2\]", lambda s: s.sample_probs(negative(2))),
    ("sample zeros", VALUE, r"logits\[3\]", lambda s: s.sample_probs(logits_with(3, 0.0))),
    ("sample temperature", VALUE, "temperature", lambda s: s.sample(temperature=-1)),
    ("sample hot", VALUE, "temperature", lambda s: s.sample(temperature=INF)),
    ("sample colder than float32", VALUE, "temperature", lambda s: s.sample(temperature=1e-50)),
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
    ("sample seed none", TYPE, "seed", lambda s: s.sample(seed=None)),
    ("sample offset none", TYPE, "offset", lambda s: s.sample(offset=None)),
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
    ("sample joint", TYPE, "joint", lambda s: s.sample(joint=1)),
    ("sample rows type", TYPE, "rows", lambda s: s.sample(rows=zeros(4))),
    ("sample rows rank", VALUE, "rows", lambda s: s.sample(rows=integers([0], [1]))),
    ("sample rows high", VALUE, r"rows\[2\]", lambda s: s.sample(rows=int64(0, 3, 4, 0))),
    ("sample rows low", VALUE, r"rows\[0\]", lambda s: s.sample(rows=integers(-1, 0, 0, 0))),
    ("sample rows wide", VALUE, r"rows\[1\]", lambda s: s.sample(rows=int64(0, 2**32, 0, 0))),
    ("sample rows and out", VALUE, "out", lambda s: s.sample(rows=integers(0, 1))),
    ("sample rows and ks", VALUE, "top_k", lambda s: s.sample(**rows_and(top_k=integers(1)))),
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
    (
        "softmax temperature zero",
        VALUE,
        r"temperature\[2\]",
        lambda s: s.softmax(temperature=np.array([1, 1, 0, 1], np.float32)),
    ),
    (
        "softmax temperature NaN",
        VALUE,
        r"temperature\[0\]",
        lambda s: s.softmax(temperature=np.array([NAN, 1, 1, 1], np.float32)),
    ),
    ("softmax out shape", VALUE, "out", lambda s: s.softmax(out=zeros(4, 9))),
    ("softmax out type", TYPE, "out", lambda s: s.softmax(out=half(4, 8))),
    ("softmax out beside", VALUE, "out", lambda s: beside(s.softmax)),
]


def negative(row):
    probabilities = np.full((4, 8), 0.125, np.float32)
    probabilities[row, :2] = -0.125, 0.375
    return probabilities


def rows_and(**changes):
    return {"rows": integers(0, 1), "out": integers(0, 0)} | changes


def one_place():
    return np.lib.stride_tricks.as_strided(integers(0), (4,), (0,))


def memory_of(call):
    memory = zeros(4, 8)
    return call(logits=memory, out=memory.view(np.int32)[:, 0])


def beside(call):
    memory = zeros(5, 8)
    return call(logits=memory[:4], out=memory[1:])


VERIFY = [
    ("verify target none", TYPE, "target_probs", lambda s: s.verify(target_probs=None)),
    ("verify target rank", VALUE, "target_probs", lambda s: s.verify(target_probs=zeros(4, 8))),
    ("verify target int", TYPE, "target_probs", lambda s: s.verify(target_probs=integers([[1]]))),
    (
        "verify no vocabulary",
        VALUE,
        "target_probs",
        lambda s: s.verify(target_probs=zeros(2, 4, 0)),
    ),
    ("verify no rows", VALUE, "target_probs", lambda s: s.verify(target_probs=zeros(2, 0, 8))),
    ("verify many", VALUE, "target_probs", lambda s: s.verify(target_probs=zeros(2, 514, 8))),
    ("verify draft list", TYPE, "draft_probs", lambda s: s.verify(draft_probs=[[0.5]])),
    ("verify draft rows", VALUE, "draft_probs", lambda s: s.verify(draft_probs=zeros(2, 4, 8))),
    ("verify draft dtype", TYPE, "draft_probs", lambda s: s.verify(draft_probs=half(2, 3, 8))),
    ("verify tokens none", TYPE, "draft_tokens", lambda s: s.verify(draft_tokens=None)),
    ("verify tokens dtype", TYPE, "draft_tokens", lambda s: s.verify(draft_tokens=zeros(2, 3))),
    ("verify tokens size", VALUE, "draft_tokens", lambda s: s.verify(draft_tokens=int64([1], [2]))),
    ("verify token high", VALUE, r"draft_tokens\[1, 2\]", lambda s: s.verify(**token(8))),
    ("verify token low", VALUE, r"draft_tokens\[1, 2\]", lambda s: s.verify(**token(-2))),
    ("verify token wide", VALUE, r"draft_tokens\[1, 2\]", lambda s: s.verify(**token(2**32))),
    ("verify parents dtype", TYPE, "draft_parents", lambda s: s.verify(draft_parents=zeros(3))),
    (
        "verify parents size",
        VALUE,
        "draft_parents",
        lambda s: s.verify(draft_parents=integers(-1, 0)),
    ),
    (
        "verify parents batch",
        VALUE,
        "draft_parents",
        lambda s: s.verify(draft_parents=integers([-1, 0, 1])),
    ),
    (
        "verify own parent",
        VALUE,
        r"draft_parents\[1\]",
        lambda s: s.verify(draft_parents=integers(-1, 1, 1)),
    ),
    (
        "verify parent low",
        VALUE,
        r"draft_parents\[2\]",
        lambda s: s.verify(draft_parents=integers(-1, 0, -2)),
    ),
    ("verify seed", TYPE, "seed", lambda s: s.verify(seed="1")),
    ("verify seeds", VALUE, "seed", lambda s: s.verify(seed=int64(1, 2, 3))),
    ("verify offsets", TYPE, "offset", lambda s: s.verify(offset=integers(1, 2))),
    ("verify out", VALUE, "out", lambda s: s.verify(out=zeros(2, 3, dtype="i4"))),
    ("verify out dtype", TYPE, "out", lambda s: s.verify(out=zeros(2, 4))),
    ("verify count", VALUE, "num_accepted", lambda s: s.verify(num_accepted=integers(0))),
    ("verify nodes", VALUE, "nodes", lambda s: s.verify(nodes=zeros(2, 4, dtype="i4"))),
    ("verify status", TYPE, "status", lambda s: s.verify(status=zeros(2))),
    ("verify one output", VALUE, "out", lambda s: s.verify(**one_output())),
    (
        "verify out over tokens",
        VALUE,
        "out",
        lambda s: s.verify(**tokens_in_output()),
    ),
    (
        "verify target nan",
        VALUE,
        r"target_probs\[1, 0\]",
        lambda s: s.verify(target_probs=rows_with(4, NAN), draft_tokens=none_drafted()),
    ),
    (
        "verify target sum",
        VALUE,
        r"target_probs\[0, 0\]",
        lambda s: s.verify(target_probs=zeros(2, 4, 8) + 0.11, draft_tokens=none_drafted()),
    ),
    (
        "verify draft sum",
        VALUE,
        r"draft_probs\[1, 0\]",
        lambda s: s.verify(draft_probs=rows_with(3, 9.0)),
    ),
]


def token(value):
    return {"draft_tokens": int64([1, 2, 3], [4, 5, value])}


def none_drafted():
    return np.full((2, 3), -1, np.int32)


def one_output():
    memory = zeros(2, 4, dtype=np.int32)
    return {"out": memory, "num_accepted": memory[0, :2]}


def tokens_in_output():
    memory = zeros(2, 4, dtype=np.int32)
    return {"out": memory, "draft_tokens": memory[:, :3]}


def rows_with(n, value):
    """Flat rows, but for the first one of request 1, where the drafted token is unlikely."""
    rows = np.full((2, n, 8), 0.125, np.float32)
    rows[1, 0] = value
    return rows


PENALTIES = [
    ("penalties logits none", TYPE, "logits", lambda s: s.penalties(logits=None)),
    ("penalties logits int", TYPE, "logits", lambda s: s.penalties(logits=integers([1, 2]))),
    ("penalties logits rank", VALUE, "logits", lambda s: s.penalties(logits=zeros(8))),
    (
        "penalties logits read-only",
        TYPE,
        "logits",
        lambda s: s.penalties(logits=read_only(zeros(4, 8))),
    ),
    ("penalties logits sharing", VALUE, "logits", lambda s: s.penalties(logits=sharing(4, 8))),
    ("penalties history none", TYPE, "history", lambda s: s.penalties(history=None)),
    ("penalties history dtype", TYPE, "history", lambda s: s.penalties(history=zeros(4, 2))),
    ("penalties history rows", VALUE, "history", lambda s: s.penalties(history=int64([1], [2]))),
    (
        "penalties token high",
        VALUE,
        r"history\[3, 1\]",
        lambda s: s.penalties(history=int64([1, 2], [3, 4], [5, 6], [7, 8])),
    ),
    (
        "penalties token low",
        VALUE,
        r"history\[2, 0\]",
        lambda s: s.penalties(history=int64([1, 2], [3, 4], [-1, 6], [7, 0])),
    ),
    ("penalties lens none", TYPE, "history_lens", lambda s: s.penalties(history_lens=None)),
    ("penalties lens int64", TYPE, "history_lens", lambda s: s.penalties(history_lens=int64(1, 2))),
    (
        "penalties lens size",
        VALUE,
        "history_lens",
        lambda s: s.penalties(history_lens=integers(1, 2)),
    ),
    (
        "penalties len high",
        VALUE,
        r"history_lens\[1\]",
        lambda s: s.penalties(history_lens=integers(2, 3, 1, 2)),
    ),
    (
        "penalties len low",
        VALUE,
        r"history_lens\[3\]",
        lambda s: s.penalties(history_lens=integers(2, 2, 1, -1)),
    ),
    ("penalties repetition", VALUE, "repetition", lambda s: s.penalties(repetition=0.0)),
    ("penalties repetition nan", VALUE, "repetition", lambda s: s.penalties(repetition=NAN)),
    ("penalties presence", VALUE, "presence", lambda s: s.penalties(presence=INF)),
    ("penalties frequency", VALUE, "frequency", lambda s: s.penalties(frequency=-INF)),
    ("penalties frequency text", TYPE, "frequency", lambda s: s.penalties(frequency="much")),
    (
        "penalties repetitions",
        VALUE,
        r"repetition\[2\]",
        lambda s: s.penalties(repetition=np.float32([1, 1, -1, 1])),
    ),
    (
        "penalties presences dtype",
        TYPE,
        "presence",
        lambda s: s.penalties(presence=np.float64([1, 1, 1, 1])),
    ),
    ("penalties frequencies", VALUE, "frequency", lambda s: s.penalties(frequency=zeros(3))),
    (
        "penalties history in logits",
        VALUE,
        "logits",
        lambda s: s.penalties(history=s.out.view[0, :, :2].view(np.int32)),
    ),
]
