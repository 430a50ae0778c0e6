# SPDX-License-Identifier: Apache-2.0
"""Sampling with FlashInfer's names: distributions in float64, random numbers, errors."""

import numpy as np
import pytest

import sampling_cases

torch = pytest.importorskip("torch")

from flashplan import flashinfer  # noqa: E402
from flashplan.flashinfer import _sampling  # noqa: E402

DRAWS, VOCAB = 20_000, 40
NAMES = [
    "sampling_from_probs",
    "top_p_sampling_from_probs",
    "top_k_sampling_from_probs",
    "min_p_sampling_from_probs",
    "top_k_top_p_sampling_from_probs",
]
FILTERS = {
    "sampling_from_probs": {},
    "top_p_sampling_from_probs": {"top_p": 0.7},
    "top_k_sampling_from_probs": {"top_k": 7},
    "min_p_sampling_from_probs": {"min_p": 0.1},
    "top_k_top_p_sampling_from_probs": {"top_k": 9, "top_p": 0.8},
}


def one_row(rng):
    logits = torch.from_numpy(rng.standard_normal(VOCAB) * 2).float()
    return logits, torch.softmax(logits, -1)


def check_distribution(tokens, expected):
    """False in one run of a million, with some hundred tests."""
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert sampling_cases.chi_square(counts, expected) < 6


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_distributions(rng, name, as_tensors):
    _, probs = one_row(rng)
    rows, filters = probs.expand(DRAWS, -1), FILTERS[name]
    expected = sampling_cases.distribution(probs.numpy(), **filters, from_probs=True)
    if as_tensors:
        filters = {key: torch.full((DRAWS,), value) for key, value in filters.items()}
    tokens, valid = getattr(flashinfer, name)(rows, **filters, return_valid=True)
    assert tokens.dtype == torch.int32
    assert valid.all()
    check_distribution(tokens, expected)


def test_distributions_of_logits(rng):
    logits, _ = one_row(rng)
    rows = logits.expand(DRAWS, -1)
    plain = sampling_cases.distribution(logits.numpy())
    check_distribution(flashinfer.sampling_from_logits(rows), plain)
    filtered = sampling_cases.distribution(logits.numpy(), top_k=9, top_p=0.8)
    check_distribution(flashinfer.top_k_top_p_sampling_from_logits(rows, 9, 0.8), filtered)


@pytest.mark.parametrize(("top_k", "top_p"), [(9, 0.5), (3, 0.9), (1000, 0.6)])
@pytest.mark.parametrize("of_logits", [False, True])
def test_joint_filters(rng, of_logits, top_k, top_p):
    """Both see all probabilities: a token must be among those that each of them keeps."""
    logits, probs = one_row(rng)
    p = probs.double().numpy()
    order = np.argsort(-p)
    by_p = np.searchsorted(np.cumsum(p[order]), top_p) + 1
    expected = np.zeros(VOCAB)
    kept = order[: min(top_k, by_p)]
    expected[kept] = p[kept] / p[kept].sum()
    rows = (logits if of_logits else probs).expand(DRAWS, -1)
    name = f"top_k_top_p_sampling_from_{'logits' if of_logits else 'probs'}"
    sample = getattr(flashinfer, name)
    check_distribution(sample(rows, top_k, top_p, filter_apply_order="joint"), expected)
    with pytest.raises(ValueError, match="filter_apply_order: expected .* got 'any'"):
        sample(rows, top_k, top_p, filter_apply_order="any")


def test_softmax(rng):
    logits = torch.randn(5, VOCAB)
    temperature = torch.rand(5, dtype=torch.float64) + 0.5
    for given in (None, 0.7, temperature):
        divisor = given[:, None] if given is temperature else given or 1.0
        expected = torch.softmax(logits.double() / divisor, -1)
        torch.testing.assert_close(flashinfer.softmax(logits, given).double(), expected)


def rows_of_probs(rng, batch_size=64):
    return torch.softmax(torch.from_numpy(rng.standard_normal((batch_size, VOCAB))).float(), -1)


@pytest.mark.parametrize("name", NAMES)
def test_equal_random_numbers_give_equal_tokens(rng, name):
    probs = rows_of_probs(rng)

    def sample(**arguments):
        return getattr(flashinfer, name)(probs, **FILTERS[name], **arguments)

    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    first, again = (sample(generator=generator) for generator in generators)
    assert torch.equal(first, again)
    assert not torch.equal(first, sample(generator=generators[0])), "it was not advanced"
    assert not torch.equal(sample(), sample())
    assert torch.equal(sample(seed=5, offset=2), sample(seed=5, offset=2))
    assert not torch.equal(sample(seed=5, offset=2), sample(seed=5, offset=3))
    assert not torch.equal(sample(seed=5, offset=2), sample(seed=6, offset=2))


def test_generators_of_gpus(monkeypatch):
    """Their offset advances, by a multiple of 4 as PyTorch wants it. This one stands for them."""

    class Generator:
        offset = 8

        def get_offset(self):
            return self.offset

        def set_offset(self, offset):
            self.offset = offset

        def initial_seed(self):
            return 2**64 - 5

    default, given = Generator(), Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", [None, default])
    for generator, used in ((None, default), (given, given)):
        for offset in (8, 12):
            device = torch.device("cuda:1")
            drawn = _sampling.random_numbers(generator, None, None, 3, device)
            assert drawn == (-5, offset)
        assert used.offset == 16


def test_seeds_in_tensors(rng):
    probs = rows_of_probs(rng, 1).expand(64, -1)
    for dtype in (torch.int64, torch.uint64):
        seed, offset = torch.tensor([5]).view(dtype), torch.tensor([2]).view(dtype)
        tokens = flashinfer.sampling_from_probs(probs, seed=seed, offset=offset)
        assert len(tokens.unique()) > 3, "all rows drew the same numbers"
        seeds = torch.arange(64).view(dtype)
        first = flashinfer.sampling_from_probs(probs, seed=seeds, offset=offset)
        again = flashinfer.sampling_from_probs(probs, seed=seeds.view(torch.int64), offset=offset)
        assert torch.equal(first, again)
        assert len(first.unique()) > 3
    largest = flashinfer.sampling_from_probs(probs, seed=2**64 - 1, offset=0)
    assert torch.equal(largest, flashinfer.sampling_from_probs(probs, seed=-1, offset=0))


def test_wrong_seeds(rng):
    probs = rows_of_probs(rng, 4)
    tensor = torch.tensor([1])

    def sample(seed, offset):
        flashinfer.sampling_from_probs(probs, seed=seed, offset=offset)

    with pytest.raises(ValueError, match="must both be tensors or both be scalars"):
        sample(tensor, 1)
    with pytest.raises(ValueError, match="seed tensor must be int64/uint64, got torch.int32"):
        sample(tensor.int(), tensor)
    with pytest.raises(ValueError, match=r"offset tensor length must be 1 or 4, got shape \[2\]"):
        sample(tensor, tensor.expand(2))


def test_rows_of_nan(rng):
    probs = rows_of_probs(rng, 4)
    probs[[0, 2]] = torch.nan
    for name in NAMES:
        sample = getattr(flashinfer, name)
        tokens, valid = sample(probs, **FILTERS[name], return_valid=True)
        assert valid.tolist() == [False, True, False, True]
        assert tokens[[0, 2]].tolist() == [0, 0]
        with pytest.raises(ValueError, match=r"Input contains NaN\."):
            sample(probs, **FILTERS[name], check_nan=True)
    with pytest.raises(ValueError, match=r"logits: Input contains NaN\."):
        flashinfer.sampling_from_logits(probs, check_nan=True)
    for name, sample in (
        ("probs", flashinfer.sampling_from_probs),
        ("logits", flashinfer.sampling_from_logits),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected 2 dimensions, got shape \[\d+\]"):
            sample(probs[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", NAMES)
def test_indices(rng, name, dtype):
    """Tokens of the second row alone, whose parameters are those of its index."""
    _, probs = one_row(rng)
    rows = torch.stack([torch.eye(VOCAB)[0], probs, torch.full((VOCAB,), torch.nan)])
    filters = FILTERS[name]
    expected = sampling_cases.distribution(probs.numpy(), **filters, from_probs=True)
    # Those of the other rows would leave one token, or all of them.
    others = {"top_p": (1e-3, 1.0), "top_k": (1, VOCAB), "min_p": (1.0, 0.0)}
    arrays = {n: torch.tensor([others[n][0], x, others[n][1]]) for n, x in filters.items()}
    indices = torch.ones(DRAWS, dtype=dtype)
    indices[-2:] = torch.tensor([0, 2])
    tokens, valid = getattr(flashinfer, name)(rows, **arrays, indices=indices, return_valid=True)
    assert tokens.dtype == dtype
    check_distribution(tokens[:-2], expected)
    assert tokens[-2] == 0
    assert valid[:-1].all()
    assert not valid[-1]


@pytest.mark.parametrize("indices", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32)])
def test_malformed_indices(rng, indices):
    with pytest.raises(ValueError, match="indices: expected a 1D tensor of int32 or int64"):
        flashinfer.sampling_from_probs(rows_of_probs(rng), indices=indices)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_wrong_parameters(rng, name):
    probs = rows_of_probs(rng, 4)
    sample = getattr(flashinfer, f"{name}_sampling_from_probs")
    for shape, message in (
        ((), f"{name}: Expected a 1D tensor of shape .* or scalar .* got a 0-dimensional tensor"),
        ((4, 1), f"{name}: Expected a 1D tensor or scalar .* got a 2D tensor"),
        ((3,), f"{name}: Sampling parameter tensor batch size mismatch: expected 4, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(probs, torch.ones(shape))


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("k", [1, 5, VOCAB, 1000])
def test_top_k_filters(rng, k, as_tensors):
    probs = rows_of_probs(rng)
    given = torch.full((64,), k) if as_tensors else k
    kept = probs.argsort(-1).argsort(-1) >= VOCAB - k
    expected = torch.where(kept, probs.double(), 0)
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(flashinfer.top_k_renorm_probs(probs, given).double(), expected)
    masked = flashinfer.top_k_mask_logits(probs.log(), given)
    assert torch.equal(masked, torch.where(kept, probs.log(), -torch.inf))
    assert flashinfer.sampling.top_k_renorm_prob is flashinfer.top_k_renorm_probs


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("p", [0, 1e-6, 0.5, 0.9, 1.0, 2.0])
def test_top_p_filter(rng, p, as_tensors):
    probs = rows_of_probs(rng)
    given = torch.full((64,), p) if as_tensors else p
    got = flashinfer.top_p_renorm_probs(probs, given)
    torch.testing.assert_close(got.sum(-1), torch.ones(64))
    for row, result in zip(probs.double(), got.double()):
        kept = row[result > 0]
        assert kept.sum() >= min(p, 1) - 1e-5
        assert kept.sum() - kept.min() < p + 1e-5, "one less would do"
        assert (row[result == 0] <= kept.min()).all()
        torch.testing.assert_close(result[result > 0], kept / kept.sum(), rtol=1e-5, atol=1e-7)
    assert flashinfer.sampling.top_p_renorm_prob is flashinfer.top_p_renorm_probs


def test_filters_keep_equal_elements():
    probs = torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    assert torch.equal(flashinfer.top_k_renorm_probs(probs, 2), probs)
    assert torch.equal(flashinfer.top_p_renorm_probs(probs, 0.3), probs)
    assert torch.equal(flashinfer.top_k_mask_logits(probs, 1), probs)


def test_top_k_filters_of_rows_that_sum_to_anything(rng):
    """And of other dtypes, which the results have too."""
    for dtype in (torch.float16, torch.bfloat16):
        probs = (3 * rows_of_probs(rng, 8)).to(dtype)
        smallest = probs.sort(-1, descending=True).values[:, 4:5]
        expected = torch.where(probs >= smallest, probs.double(), 0)
        expected /= expected.sum(-1, keepdim=True)
        got = flashinfer.top_k_renorm_probs(probs, 5)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=1e-6)


def test_chain_of_drafts():
    """Drafts that the large model is sure of are accepted up to the one that it excludes."""
    vocab, drafts = 4, torch.tensor([[1, 2, 3], [1, 1, 1]])
    draft_probs = torch.full((2, 3, vocab), 0.25)
    target = torch.zeros(2, 4, vocab)
    for row, tokens in enumerate(([1, 2, 3, 0], [1, 0, 1, 2])):
        for place, token in enumerate(tokens):
            target[row, place, token] = 1
    totals = torch.tensor([[10, 20], [30, 40]], dtype=torch.int32)
    tokens, accepted, emitted = flashinfer.chain_speculative_sampling(
        draft_probs, drafts, target, totals[0], totals[1]
    )
    assert tokens.tolist() == [[1, 2, 3, 0], [1, 0, -1, -1]]
    assert emitted.tolist() == [33, 41]
    assert accepted.tolist() == [13, 22]  # the third draft of the second request, by itself, too
    assert totals.tolist() == [[13, 22], [33, 41]]
    _, accepted, emitted = flashinfer.chain_speculative_sampling(draft_probs, drafts, target)
    assert (accepted.tolist(), emitted.tolist()) == ([3, 2], [3, 1])
