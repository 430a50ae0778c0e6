# SPDX-License-Identifier: Apache-2.0
"""The documentation: its code is that of files that run, its pictures are those that are drawn."""

import ast
import doctest
import inspect
import pathlib
import re
import runpy
import sys

import numpy as np
import pytest

import flashplan as fp

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SNIPPETS = sorted((ROOT / "docs" / "snippets").glob("*.py"))
FRAMEWORK = {
    "backend": "torch",
    "flash_attn": "torch",
    "flash_attn_alias": "torch",
    "flashinfer_decode": "torch",
    "flashinfer_install": "torch",
    "fp8_cache": "torch",
    "torch_compile": "torch",
    "jax_arrays": "jax",
    "jax_devices": "jax",
    "jax_jit": "jax",
    "transformers_models": "transformers",
}
# Files that this or another test runs or compiles, and records of measurements.
THAT_RUN = ("docs/snippets/", "examples/", "include/flashplan/", "tests/cpp/consumer/")
RECORDS = "bench/results/"
GLOSSARY = "DESIGN.md:glossary"
PUBLIC = {name: getattr(fp, name) for name in fp.__all__} | {
    "Attention.plan": fp.Attention.plan,
    "Attention.run": fp.Attention.run,
    "Attention.bind": fp.Attention.bind,
}
# Exceptions, and what says everything in its first line.
WITHOUT_EXAMPLE = {"CudaError", "UnsupportedError", "get_num_threads", "set_num_threads"}

sys.path.append(str(ROOT / "docs"))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda path: path.stem)
def test_snippet_runs(snippet):
    if snippet.stem in FRAMEWORK:
        pytest.importorskip(FRAMEWORK[snippet.stem])
    runpy.run_path(str(snippet), run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_code_is_that_of_files_that_run(page):
    import blocks

    text = page.read_text()
    markers = re.findall(r"^<!-- [\w./:-]+ -->$", text, re.MULTILINE)
    assert len(markers) == len(list(blocks.blocks(text))), "a comment has no code below"
    for source, block in blocks.blocks(text):
        assert source == GLOSSARY or source.startswith((*THAT_RUN, RECORDS)), (
            f"no test runs {source}"
        )
        assert block == blocks.section(source), f"run python docs/blocks.py: {source} has changed"
    # Every other block is shell commands, or a header that MkDocs includes when it builds the page.
    for language, block in re.findall(r"```(\w*)\n(.*?)```", blocks.BLOCK.sub("", text), re.DOTALL):
        is_header = re.fullmatch(r'--8<-- "include/flashplan/\w+\.h"\n', block)
        assert language == "console" or is_header, f"no comment names the file of\n{block}"


def test_the_notebook_shows_what_its_cells_give():
    import notebook

    text = notebook.NOTEBOOK.read_text()
    old, new = (re.sub(r"cpu_[a-z0-9]+", "cpu", x) for x in (text, notebook.rerun(text)))
    assert old == new, "run python docs/notebook.py"
    assert text.count("<svg") == 3


def test_names_have_the_glossary():
    import blocks

    page = (ROOT / "docs" / "names.md").read_text()
    assert dict(blocks.blocks(page))[GLOSSARY].startswith("| word |")


def tables(text):
    """Of a page: each table as a list of rows, the names of its columns first."""
    for table in re.findall(r"(?:^\|[^\n]*\n)+", text, re.MULTILINE):
        names, _, *rows = (
            [c.strip() for c in line[1:-1].split("|")] for line in table.splitlines()
        )
        yield [names, *rows]


def test_tuning_log_names_what_exists():
    """What was kept names the file, constant or function where it stands."""
    files = [f for name in ("src", "include", "bindings") for f in (ROOT / name).rglob("*.*")]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text())}
    num_names = 0
    for page in (ROOT / "docs" / "tuning").glob("*.md"):
        for columns, *rows in tables(page.read_text()):
            assert all(len(row) == len(columns) for row in rows), page.name
            places = [row[columns.index("where")] for row in rows if "where" in columns]
            for name in re.findall(r"`([^`]+)`", " ".join(places)):
                is_file = any(f"/{file.relative_to(ROOT)}".endswith(f"/{name}") for file in files)
                parts = re.findall(r"[A-Za-z_]\w+", name)
                assert is_file or words.issuperset(parts), f"{page.name}: there is no {name}"
                num_names += 1
    assert num_names > 100


def test_reference_has_every_public_name():
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    described = set(re.findall(r"^::: flashplan\.(\w+)$", page, re.MULTILINE))
    errors = (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert set(fp.__all__) <= described | {
        name for name in fp.__all__ if f"flashplan.{name}`" in errors
    }


def test_reference_has_every_header():
    page = (ROOT / "docs" / "reference" / "cpp.md").read_text()
    for header in (ROOT / "include" / "flashplan").glob("*.h"):
        is_shown = f'"include/flashplan/{header.name}"' in page
        assert is_shown or header.name in ("flashplan.h", "export.h"), header.name


def test_every_snippet_is_shown():
    text = "\n".join(page.read_text() for page in PAGES)
    for snippet in SNIPPETS:
        for section in re.findall(r"\[start:(\w+)\]", snippet.read_text()):
            assert f"<!-- docs/snippets/{snippet.name}:{section} -->" in text


def test_pictures_are_those_that_are_drawn():
    import draw

    for path, svg in draw.pictures():
        assert path.read_text() == svg, f"run python docs/draw.py: {path.name} is an old one"


def run_examples(what, **names):
    """Of the docstring of `what`, which has some."""
    text = inspect.getdoc(what)
    test = doctest.DocTestParser().get_doctest(text, {"fp": fp, "np": np} | names, "", None, 0)
    assert test.examples, f"{what}: expected an example in the docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test).failed == 0


def docstrings():
    """Of everything public in the package, also of what imports a framework."""
    for path in sorted((ROOT / "python" / "flashplan").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_named = isinstance(node, ast.ClassDef | ast.FunctionDef)
            if is_named and not node.name.startswith("_") and ast.get_docstring(node):
                yield f"{path.stem}.{node.name}", ast.get_docstring(node)


def test_sections_of_docstrings_are_understood():
    """The generator of the reference drops what has another form, and Markdown changes < and >."""
    for name, text in docstrings():
        for section, body in re.findall(r"^(\w+):\n((?:(?:    .*)?\n?)+)", text, re.MULTILINE):
            entries = [line for line in body.splitlines() if re.match(r"    \S", line)]
            if section in ("Args", "Raises"):
                for line in entries:
                    assert re.match(r"    [\w., ]+: (?![>#-])", line), f"{name}: {line}"
            if section == "Returns":
                assert not re.search(r"\w: ", body.split(".")[0]), f"{name}: {body}"
        assert not re.search(r"<\w+>", re.sub(r"`[^`]*`", "", text)), name


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in WITHOUT_EXAMPLE])
def test_examples_of_docstrings(name):
    run_examples(PUBLIC[name])


def test_examples_of_flashplan_flash_attn(torch):
    import flashplan.flash_attn

    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        run_examples(getattr(flashplan.flash_attn, name), torch=torch, **vars(flashplan.flash_attn))


def test_examples_of_flashplan_torch(torch):
    import flashplan.torch

    run_examples(flashplan.torch, torch=torch, flashplan=flashplan)
