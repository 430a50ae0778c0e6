# SPDX-License-Identifier: Apache-2.0
"""Variants of users: arguments, errors of the compiler, and what is kept on disk. Results are
tested as cases, in test_attention.py."""

import copy
import math
import os
import pickle
import re
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import flashplan as fp
from variant_cases import VARIANTS

OPTIONS = {"page_size": None, "q_dtype": "float32", "device": "cpu", "max_batch_size": 4}
# Another process compiles the same and prints its result.
PROGRAM = """
import sys, warnings
import numpy as np
import flashplan as fp
warnings.simplefilter("error")
variant = fp.Variant("shifted", logits="return x + shift * key;", scalars={"shift": 0.5})
attn = fp.Attention(2, 1, 8, page_size=None, q_dtype="float32", device="cpu", variant=variant)
attn.plan([0, 1], [3])
q = np.ones((1, 2, 8), np.float32)
kv = np.arange(24, dtype=np.float32).reshape(3, 1, 8) / 24
print(attn.run(q, kv, kv)[0, 0, 0])
"""


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    """What is tested here is not how fast the code is."""
    monkeypatch.setenv("FLASHPLAN_CXXFLAGS", "-O1")


def attention(variant, **options):
    return fp.Attention(2, 1, 8, **OPTIONS | {"variant": variant} | options)


def result(attn, **arguments):
    """Of one query and three keys."""
    attn.plan([0, 1], [3])
    q = np.ones((1, 2, 8), np.float32)
    kv = np.arange(24, dtype=np.float32).reshape(3, 1, 8) / 24
    return attn.run(q, kv, kv, **arguments)


def shifted(name="shifted", **changes):
    """The same source whoever asks: compiled once by all tests."""
    arguments = {"logits": "return x + shift * key;", "scalars": {"shift": 0.5}}
    return fp.Variant(name, **arguments | changes)


def run_program(environment):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process


def test_a_description_is_a_value():
    variant = shifted()
    assert eval(repr(variant), {"Variant": fp.Variant}) == variant
    assert pickle.loads(pickle.dumps(variant)) == variant == copy.copy(variant)
    assert hash(variant) == hash(shifted())
    assert variant != shifted(scalars={"shift": 1.0})
    assert variant != "shifted"
    attn = attention(variant)
    assert attn.options["variant"] is variant
    assert "shifted" in attn._plan.kernel_name


class Mine(fp.Variant):
    pass


def test_equal_descriptions_have_equal_hashes():
    """Whatever their order, and the sign of zero."""

    def made(scalars, tensors):
        names = dict.fromkeys(tensors, "float32")
        return fp.Variant("v", logits="return x;", scalars=scalars, tensors=names)

    one, other = made({"a": 0.0, "b": 1.0}, "cd"), made({"b": 1.0, "a": -0.0}, "dc")
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


def test_a_class_of_ones_own_is_kept():
    variant = Mine("mine", logits="return x;")
    assert type(pickle.loads(pickle.dumps(variant))) is Mine


@pytest.mark.parametrize(
    ("argument", "text"), [("name", "a\0b"), ("logits", "return x;\0"), ("mask", "// \ud800")]
)
def test_text_that_no_compiler_reads(argument, text):
    with pytest.raises(ValueError, match=f"^{argument}: expected "):
        fp.Variant(**{"name": "v", "logits": "return x;"} | {argument: text})


def test_scalars_are_numbers_of_float32():
    with pytest.raises(ValueError, match=r"^scalars\['s'\]: expected .*float32, got 1e\+300"):
        fp.Variant("v", logits="return x;", scalars={"s": 1e300})
    fp.Variant("v", logits="return x;", scalars={"s": float("inf")})


def test_softcap_is_not_together_with_logits():
    with pytest.raises(ValueError, match="softcap"):
        attention(shifted(), softcap=5.0)
    with pytest.raises(ValueError, match="softcap"):
        attention(fp.Variant("linear", softmax=False), softcap=5.0)


def test_arguments_of_a_run():
    variant = VARIANTS["biased"].variant
    attn = attention(variant)
    slopes = np.zeros(2, np.float32)
    expected = result(attn, slopes=slopes)
    out = np.full_like(expected, np.nan)
    for error, match, arguments in (
        (TypeError, "slopes", {}),
        (TypeError, "slopes", {"slopes": None}),
        (TypeError, "slopes", {"slopes": 0.5}),
        (TypeError, "slopes.*float", {"slopes": slopes.astype(np.int32)}),
        (ValueError, "slopes.*contiguous", {"slopes": np.zeros(4, np.float32)[::2]}),
        (ValueError, "slopes.*contiguous", {"slopes": np.zeros((2, 2), np.float32).T}),
        (TypeError, "slope:", {"slopes": slopes, "slope": slopes}),
        (ValueError, "slopes", {"slopes": out[0, 0, :2]}),
    ):
        with pytest.raises(error, match=match):
            result(attn, out=out, **arguments)
        assert np.isnan(out).all()
    assert np.array_equal(result(attn, slopes=slopes.reshape(2, 1, 1)), expected)
    with pytest.raises(TypeError, match=r"^bias: expected an argument of run\(\), got "):
        result(attention(None), bias=1.0)


def test_scalars_have_defaults():
    attn = attention(shifted())
    by_default = result(attn)
    assert np.array_equal(result(attn, shift=0.5), by_default)
    assert not np.array_equal(result(attn, shift=-0.5), by_default)
    with pytest.raises(TypeError, match="shift"):
        result(attn, shift="0.5")
    with pytest.raises(TypeError, match="shift"):
        result(attn, shift=None)


def test_there_is_no_lse_without_softmax():
    attn = attention(VARIANTS["sigmoid"].variant)
    with pytest.raises(ValueError, match="lse"):
        result(attn, return_lse=True)


def test_minus_infinity_is_no_weight_without_softmax():
    attn = attention(
        fp.Variant("holes", logits="return key == 1 ? -infinity() : 2;", softmax=False)
    )
    values = np.arange(24, dtype=np.float32).reshape(3, 8) / 24
    np.testing.assert_allclose(result(attn), np.tile(2 * (values[0] + values[2]), (1, 2, 1)))


def test_every_type_function_and_limit():
    """8 tensors and 8 scalars, every dtype, all functions, and names that other code has."""
    tensors = {"float_": "float32", "Vec": "int64", "int32_t": "uint32", "Standard": "int32"}
    tensors |= dict.fromkeys(("NULL", "INFINITY", "M_PI", "bodies"), "float32")
    scalars = {"scale": 1.0, "exp2_scale": 2.0, "product": 3.0, "at": 4.0}
    scalars |= {f"s{i}": 5.0 + i for i in range(4)}
    sums = "+".join([f"{name}[1]" for name in tensors] + list(scalars))
    functions = (
        "exp(x) + exp2(x) + log(x) + log2(x) + tanh(x) + sqrt(x) + rsqrt(x) + pow(x, 2) + sin(x) + "
        "cos(x) + erf(x) + floor(x) + ceil(x) + abs(-x) + abs(-3) + min(x, 2) + max(2, x) + "
        "min(4, 5)"
    )
    attn = attention(
        fp.Variant(
            "all",
            value=f"return {sums};",
            logits="return key == 0 ? -infinity() : 0;",
            output=f"x += 0.5f;\nx /= 100;\nreturn dim == 0 ? x * 100 : {functions};",
            tensors=tensors,
            scalars=scalars,
        )
    )
    dtypes = {"float32": np.float32, "int64": np.int64, "uint32": np.uint32, "int32": np.int32}
    arrays = {name: np.array([0, 1 + i], dtypes[d]) for i, (name, d) in enumerate(tensors.items())}
    arrays["Vec"][1] += 1 << 33
    arrays["int32_t"][1] += 1 << 31
    total = float(sum(int(x[1]) for x in arrays.values()) + sum(scalars.values()))
    o = result(attn, **arrays)
    np.testing.assert_allclose(o[..., 0], total, rtol=1e-6)

    arrays["Vec"][1], arrays["int32_t"][1] = 2, 3
    x = (float(sum(int(t[1]) for t in arrays.values()) + sum(scalars.values())) + 0.5) / 100
    expected = np.exp(x) + np.exp2(x) + np.log(x) + np.log2(x) + np.tanh(x) + x**0.5 + x**-0.5
    expected += x**2 + np.sin(x) + np.cos(x) + math.erf(x) + np.floor(x) + np.ceil(x) + x + 3
    expected += min(x, 2) + max(2, x) + 4
    np.testing.assert_allclose(result(attn, **arrays)[..., 1:], expected, rtol=1e-6)


def test_prefixes_are_not_shared():
    attn = attention(shifted())
    plan = attn.plan([0, 1, 2, 3, 4], [900] * 4, shared_prefixes=[(0, 4, 890)])
    assert "none computed once: variant" in plan.describe()


ERRORS = {
    "logits:2:8": {"logits": "float y = x;\nreturn nonsense;"},
    "mask:1:": {"mask": "return key <= quary;"},
    "query:1:": {"query": "return x"},
    "key:3:": {"key": "if (dim)\n  return x;\n"},  # no value of the function
    "output:1:": {
        "output": "struct R { static constexpr int f(int n) { return f(n); } };\n"
        "static_assert(R::f(1));\nreturn x;"
    },
}


@pytest.mark.parametrize("place", ERRORS)
def test_the_compiler_shows_the_users_own_lines(place):
    variant = fp.Variant("broken", **ERRORS[place])
    with pytest.raises(ValueError, match=r"^variant: .*\"broken\"") as caught:
        attention(variant)
    assert f"broken.{place.partition(':')[0]}:" in str(caught.value)
    if place == "logits:2:8":
        first = str(caught.value).splitlines()[0]
        assert f"broken.{place}: error: " in first
        assert "nonsense" in first
    assert variant._core.compile_log() in str(caught.value)


@pytest.mark.parametrize("never", ["exec yes", "exec sleep 100", "sleep 100 & sleep 100"])
def test_compiling_ends(monkeypatch, tmp_path, never):
    """A compiler that prints without end, that hangs, and one whose children do."""
    endless = fp.Variant("endless", logits="return x;")
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{never}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FLASHPLAN_COMPILE_SECONDS", "0.3")
    start = time.monotonic()
    with pytest.raises(ValueError, match="0.3 s"):
        attention(endless)
    assert time.monotonic() - start < 10
    assert len(endless._core.compile_log()) <= 1 << 16


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    variant = fp.Variant("lonely", logits="return x;")
    with pytest.raises(fp.UnsupportedError, match="variant:.*CXX=/nonexistent"):
        attention(variant)
    assert fp.is_supported(2, 1, 8, device="cpu", variant=variant)[0] is False
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(fp.UnsupportedError, match=r"variant:.*install g\+\+.*no c\+\+ in PATH"):
        attention(variant)


@pytest.mark.parametrize(
    ("name", "value"), [("CXX", "/bin/false"), ("FLASHPLAN_CXXFLAGS", "--no-such-option")]
)
def test_a_compiler_that_does_not_work_is_not_the_users_error(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    variant = fp.Variant("lonely", logits="return x;")
    expected = r"variant: expected a compiler of C\+\+20 that works \(CXX"
    with pytest.raises(fp.UnsupportedError, match=expected):
        attention(variant)


def test_a_full_disk_is_not_the_users_error(monkeypatch, tmp_path):
    """Where the compiler has room for less than the variant."""
    compiler = tmp_path / "full"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *variant.cpp*) echo "variant.cpp: fatal error: error writing to '
        '/tmp/a.s: No space left on device" >&2; exit 1;; esac\nexec c++ "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(fp.UnsupportedError, match="variant: expected room .* No space left"):
        attention(fp.Variant("large", logits="return x;"))


def test_processes_and_threads_compile_at_once(tmp_path):
    """Whoever is first, all have the same code, and one file is left."""
    environment = {"FLASHPLAN_CACHE_DIR": str(tmp_path)}
    processes = [run_program(environment) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0] == results[1]
    (file,) = tmp_path.iterdir()
    attn = attention(shifted())
    assert str(result(attn)[0, 0, 0]) == results[0][0].strip()

    # From the cache; no compiler is started. Then from a damaged one, which is replaced.
    unchanged = file.stat().st_ino
    assert run_program(environment).communicate(timeout=120) == results[0]
    assert file.stat().st_ino == unchanged
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert run_program(environment).communicate(timeout=120) == results[0]
    assert file.stat().st_ino != unchanged

    attentions = []
    variant = shifted("threads")
    threads = [
        threading.Thread(target=lambda: attentions.append(attention(variant))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({str(result(attn)) for attn in attentions}) == 1


@pytest.mark.parametrize("name", [b"file", b"\xff\xfe"], ids=["plain", "no UTF-8"])
def test_a_cache_that_can_not_be_used_is_a_warning(tmp_path, name):
    in_the_way = tmp_path / os.fsdecode(name)
    in_the_way.write_text("")
    program = PROGRAM.replace('simplefilter("error")', 'simplefilter("always")')
    done = subprocess.run(
        [sys.executable, "-c", program + program.replace('"shifted"', '"other"')],
        env=os.environ | {"FLASHPLAN_CACHE_DIR": str(in_the_way / "below")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr.count("RuntimeWarning: flashplan compiles variants in every process") == 1
    assert os.fsencode(in_the_way).decode(errors="backslashreplace") in done.stderr
    assert len(done.stdout.split()) == 2


def test_a_full_cache_is_a_warning(tmp_path):
    """The compiled code is larger than this process may write; its compiler has no limit."""
    filled, full = tmp_path / "filled", tmp_path / "full"
    assert run_program({"FLASHPLAN_CACHE_DIR": str(filled)}).communicate(timeout=120)[1] == ""
    (file,) = filled.iterdir()
    compiler = tmp_path / "unlimited"
    compiler.write_text('#!/bin/sh\nulimit -S -f unlimited\nexec c++ "$@"\n')
    compiler.chmod(0o700)
    program = f"""
import resource
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({file.stat().st_size - 1}, limit[1]))
""" + PROGRAM.replace('simplefilter("error")', 'simplefilter("always")')
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"FLASHPLAN_CACHE_DIR": str(full), "CXX": str(compiler)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr.count("RuntimeWarning: flashplan compiles variants in every process") == 1
    assert "File too large" in done.stderr
    assert done.stdout.strip() == str(result(attention(shifted()))[0, 0, 0])
    assert list(full.iterdir()) == []


def test_a_cache_stays_small(tmp_path):
    """What was used longest ago goes first; what others put there stays."""
    used = {"0" * 64 + ".variant": 1e9, "1" * 64 + ".variant": 1.2e9, "README": 1e9}
    used["2" * 64 + ".variant." + "3" * 16] = 1e9  # of a process that ended early
    for name, when in used.items():
        path = tmp_path / name
        path.write_bytes(b"x" * 900_000)
        os.utime(path, (when, when))
    environment = {"FLASHPLAN_CACHE_DIR": str(tmp_path), "FLASHPLAN_CACHE_MB": "1"}
    process = run_program(environment)
    assert process.communicate(timeout=120)[1] == ""
    (new,) = {path.name for path in tmp_path.iterdir()} - set(used)
    assert {path.name for path in tmp_path.iterdir()} == {"1" * 64 + ".variant", "README", new}
    assert not (tmp_path / new).stat().st_mode & stat.S_IWOTH


def test_what_is_wrong_in_a_variant_is_named():
    for argument, exception, arguments in (
        ("scalars['a']", TypeError, {"mask": "return true;", "scalars": {"a": "b"}}),
        ("mask", ValueError, {"mask": "\n "}),
        ("logits", TypeError, {"logits": 1}),
    ):
        with pytest.raises(exception, match=rf"^{re.escape(argument)}: expected .*, got "):
            fp.Variant("wrong", **arguments)
