# SPDX-License-Identifier: Apache-2.0
"""sample() as servers call it: top-p over many distributions, and parameters of each request.

A sampler that is fast for one distribution may be slow for another: how many tokens top-p keeps,
and how far below the largest logit, depends on how sure the model is. Rows are as in gpu_ops.py.
"""

import torch

import flashplan as fp

VOCAB = 128256


def _normal(deviation):
    def make(num_rows, device, vocab=VOCAB):
        return deviation * torch.randn(num_rows, vocab, device=device)

    return make


def _zipf(num_rows, device, vocab=VOCAB):
    """Probabilities are rank^-1.1; each row has its tokens in another order."""
    order = torch.rand(num_rows, vocab, device=device).argsort(-1)
    return -1.1 * torch.log1p(order.float())


def _flat(num_rows, device, vocab=VOCAB):
    return torch.zeros(num_rows, vocab, device=device)


def _one_hot(num_rows, device, vocab=VOCAB):
    logits = _flat(num_rows, device, vocab)
    place = torch.randint(vocab, (num_rows, 1), device=device)
    return logits.scatter_(1, place, 20.0)  # all other tokens together have a chance of 1 / 3,800


def _masked(num_rows, device, vocab=VOCAB):
    """N(20, 3^2), of which a grammar masks the first 10,000 tokens, or half of a short row."""
    generator = torch.Generator(device).manual_seed(1)  # those of other rows do not depend on it
    logits = 20 + 3 * torch.randn(num_rows, vocab, device=device, generator=generator)
    logits[:, : min(10_000, vocab // 2)] = -torch.inf
    return logits


# Logits: [num_rows, vocab], float32.
DISTRIBUTIONS = {
    **{f"N(0,{s}^2)": _normal(s) for s in (1, 2, 3, 5, 8)},
    "zipf 1.1": _zipf,
    "flat": _flat,
    "one-hot": _one_hot,
    "masked": _masked,
}


def arrays(num_rows, device, **ranges):
    """A tensor for each parameter, whose values for the rows go from one end of its range to the
    other; integers for integers. And a seed for each row."""
    result = {"seed": torch.arange(num_rows, device=device) + 1000}
    for name, (low, high) in ranges.items():
        dtype = torch.int32 if isinstance(low, int) else torch.float32
        result[name] = torch.linspace(low, high, num_rows, device=device).to(dtype)
    return result


TEMPERATURE = {"temperature": (0.5, 1.1)}
TOP_P = {"top_p": (0.7, 1.0)}
TOP_K = {"top_k": (20, 100)}
MIN_P = {"min_p": (0.05, 0.05)}

# How top-p is asked for: (options, ranges of arrays). "probs" takes probabilities.
TOP_P_WAYS = {
    "number": ({"top_p": 0.9}, {}),
    "arrays": ({}, TEMPERATURE | TOP_P),
    "probs": ({"top_p": 0.9, "from_probs": True}, {}),
    "logprobs": ({"return_logprobs": True}, TEMPERATURE | TOP_P),
}
# Other filters, of N(0, 3^2).
OTHER_WAYS = {
    "temperature": ({}, TEMPERATURE),
    "top-k": ({}, TEMPERATURE | TOP_K),
    "top-k top-p": ({}, TEMPERATURE | TOP_K | TOP_P),
    "all": ({}, TEMPERATURE | TOP_K | TOP_P | MIN_P),
    "min-p": ({}, TEMPERATURE | MIN_P),
}


def sample_call(logits, options, ranges):
    """A call of sample() for these logits, and a function that checks what it wrote."""
    num_rows, device = len(logits), logits.device
    options = options | arrays(num_rows, device, **ranges)
    x = logits.softmax(-1) if options.get("from_probs") else logits
    given = {"out": torch.empty(num_rows, dtype=torch.int32, device=device)}
    if options.get("return_logprobs"):
        given["logprobs"] = torch.empty(num_rows, device=device)

    def call():
        fp.sample(x, **options, **given)

    def check():
        call()
        of_host = {k: v.cpu().numpy() if torch.is_tensor(v) else v for k, v in options.items()}
        wanted = fp.sample(x.cpu().numpy(), **of_host)
        tokens, *logprobs = wanted if isinstance(wanted, tuple) else (wanted,)
        assert given["out"].tolist() == tokens.tolist(), "not the tokens of the CPU"
        for of_cpu in logprobs:
            error = (given["logprobs"].cpu() - torch.from_numpy(of_cpu)).abs().max()
            assert error < 1e-4, "not the log-probabilities of the CPU"

    return call, check


# Vocabularies of other models. Unlike VOCAB, they are no multiples of the sampler's blocks of 768.
OTHER_VOCABS = (32000, 151936, 262144)


def _row(num_rows, distribution, way, vocab=VOCAB):
    def make(device):
        return sample_call(DISTRIBUTIONS[distribution](num_rows, device, vocab), *way)

    return make, 4 * num_rows * vocab


def _rows(ways, distributions, name_of):
    return {
        f"{name_of(way, distribution)} b{num_rows}": _row(num_rows, distribution, options)
        for way, options in ways.items()
        for distribution in distributions
        for num_rows in (1, 32, 256)
    }


SERVED_SAMPLING = (
    _rows(TOP_P_WAYS, DISTRIBUTIONS, "top-p {} {}".format)
    | _rows(OTHER_WAYS, ["N(0,3^2)"], lambda way, _: f"arrays {way}")
    | {
        f"top-p {way} of {vocab} b{num_rows}": _row(num_rows, "N(0,3^2)", TOP_P_WAYS[way], vocab)
        for vocab in OTHER_VOCABS
        for way in ("number", "arrays")
        for num_rows in (1, 32, 256)
    }
)
