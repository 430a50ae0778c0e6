# SPDX-License-Identifier: Apache-2.0
"""Copies code from the files that tests run into the pages: `python docs/blocks.py` rewrites all.

A page names the section of a file in a comment, `<!-- docs/snippets/step_loop.py:once -->`, and has
its text below: in a fence if it is code, as it is if it is a table. tests/test_docs.py compares.
"""

import pathlib
import re
import textwrap
from collections.abc import Iterator

import records

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# A comment that names a snippet, then a fenced code block, or an empty line and a Markdown table.
BLOCK = re.compile(
    r"^<!-- (?P<source>[\w./-]+(?::\w+)?) -->\n"
    r"(?:(?P<fence>```\w+\n)(?P<code>.*?)^```$|\n(?P<table>(?:\|[^\n]*\n)*))",
    re.DOTALL | re.MULTILINE,
)


def section(source: str) -> str:
    """The text of `file` or `file:section`, dedented, without the lines that mark sections. Of a
    JSON file: a table of records.py."""
    path, _, name = source.partition(":")
    if path.endswith(".json"):
        return records.table(path, name)
    text = (ROOT / path).read_text()
    if name:
        found = re.search(
            rf"\[start:{name}\].*?\n(.*?)^[^\n]*\[end:{name}\]", text, re.DOTALL | re.M
        )
        if not found:
            raise ValueError(f"{path} has no section {name}")
        text = found[1]
    return textwrap.dedent(re.sub(r"^.*--8<-- \[(?:start|end):.*\n", "", text, flags=re.MULTILINE))


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Of the text of a page: each source that it names, and what stands below."""
    for block in BLOCK.finditer(page):
        yield block["source"], block["code"] if block["fence"] else block["table"]


def rewritten(page: str) -> str:
    def rewrite(block: re.Match[str]) -> str:
        text = section(block["source"])
        below = f"{block['fence']}{text}```" if block["fence"] else f"\n{text}"
        return f"<!-- {block['source']} -->\n{below}"

    return BLOCK.sub(rewrite, page)


if __name__ == "__main__":
    for path in PAGES:
        old = path.read_text()
        new = rewritten(old)
        if new != old:
            path.write_text(new)
            print(path.relative_to(ROOT))
