# SPDX-License-Identifier: Apache-2.0
"""filtered_probs(), the functions beside it, and lists of log-probabilities: see bad_inputs.py."""

import numpy as np

import flashplan as fp
from bad_sampling import beside, logits_with
from scene import half, int64, integers, zeros

NAN, INF = float("nan"), float("inf")
VALUE, TYPE = ValueError, TypeError
FLAT = np.full((4, 8), 0.125, np.float32)

FILTERED = [
    ("filtered none", TYPE, "logits", lambda s: s.filtered(logits=None)),
    ("filtered rank", VALUE, "logits", lambda s: s.filtered(logits=zeros(8))),
    ("filtered nan", VALUE, r"logits\[2\]", lambda s: s.filtered(logits=logits_with(2, NAN))),
    ("filtered nothing", VALUE, r"logits\[1\]", lambda s: s.filtered(logits=logits_with(1, -INF))),
    ("filtered k", VALUE, "top_k", lambda s: s.filtered(top_k=0)),
    ("filtered ks", VALUE, r"top_k\[1\]", lambda s: s.filtered(top_k=integers(1, 0, 1, 1))),
    ("filtered p", VALUE, "top_p", lambda s: s.filtered(top_p=1.5)),
    ("filtered min_p", VALUE, "min_p", lambda s: s.filtered(min_p=-1)),
    ("filtered temperature", VALUE, "temperature", lambda s: s.filtered(temperature=-1)),
    ("filtered from_probs", TYPE, "from_probs", lambda s: s.filtered(from_probs=1)),
    ("filtered joint", TYPE, "joint", lambda s: s.filtered(joint="yes")),
    ("filtered bias", VALUE, "logit_bias", lambda s: s.filtered(logit_bias=zeros(3))),
    ("filtered out dtype", TYPE, "out", lambda s: s.filtered(out=half(4, 8))),
    ("filtered out shape", VALUE, "out", lambda s: s.filtered(out=zeros(4, 9))),
    ("filtered out beside", VALUE, "out", lambda s: beside(s.filtered)),
    ("filtered status", TYPE, "status", lambda s: s.filtered(status=zeros(4))),
    ("filtered two outputs", VALUE, "out", lambda s: s.filtered(**one_memory())),
]
RENORM = [
    ("renorm sum", VALUE, r"logits\[0\]", lambda _: fp.top_k_renorm(2 * FLAT, 3)),
    ("renorm k", VALUE, "top_k", lambda _: fp.top_k_renorm(FLAT, 0)),
    ("renorm k text", TYPE, "top_k", lambda _: fp.top_k_renorm(FLAT, "3")),
    ("renorm p", VALUE, "top_p", lambda _: fp.top_p_renorm(FLAT, 0.0)),
    ("renorm ps", VALUE, "top_p", lambda _: fp.top_p_renorm(FLAT, np.float32([0.5]))),
]
MASK = [
    ("mask none", TYPE, "logits", lambda s: s.mask(logits=None)),
    ("mask nan", VALUE, r"logits\[2\]", lambda s: s.mask(logits=logits_with(2, NAN))),
    ("mask k", VALUE, "top_k", lambda s: s.mask(top_k=0)),
    ("mask ks", VALUE, r"top_k\[3\]", lambda s: s.mask(top_k=integers(1, 1, 1, 0))),
    ("mask ks type", TYPE, "top_k", lambda s: s.mask(top_k=int64(1, 1, 1, 1))),
    ("mask out dtype", TYPE, "out", lambda s: s.mask(out=half(4, 8))),
    ("mask out beside", VALUE, "out", lambda s: beside(s.mask)),
]
LISTS = [
    ("logprobs_of", VALUE, "logprobs_of", lambda s: s.sample(logprobs_of="all")),
    ("top_logprobs 0", VALUE, "top_logprobs", lambda s: s.sample(top_logprobs=0)),
    ("top_logprobs text", TYPE, "top_logprobs", lambda s: s.sample(top_logprobs="3")),
    ("top_logprobs vocabulary", VALUE, "top_ids", lambda s: s.sample(top_logprobs=9)),
    (
        "top_logprobs many",
        VALUE,
        "top_ids",
        lambda s: s.sample(logits=zeros(4, 300), top_logprobs=257),
    ),
    ("top_out alone", VALUE, "top_logprobs", lambda s: s.sample(top_out=lists())),
    ("top_out one", TYPE, "top_out", lambda s: s.sample(top_logprobs=2, top_out=zeros(4, 2))),
    (
        "top_out ids",
        TYPE,
        "top_ids",
        lambda s: s.sample(top_logprobs=2, top_out=(zeros(4, 2), zeros(4, 2))),
    ),
    (
        "top_out logprobs",
        VALUE,
        "top_logprobs",
        lambda s: s.sample(top_logprobs=2, top_out=(lists()[0], zeros(4, 3))),
    ),
]


def lists():
    return zeros(4, 2, dtype=np.int32), zeros(4, 2)


def one_memory():
    memory = zeros(4, 8)
    return {"out": memory, "status": memory.view(np.int32)[0, :4]}
