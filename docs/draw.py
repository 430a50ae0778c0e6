# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the concepts page: docs/pictures/*.svg, readable on light and dark pages.

python docs/draw.py
"""

import pathlib
from xml.sax.saxutils import escape

PICTURES = pathlib.Path(__file__).parent / "pictures"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; text-anchor: middle; }
.left { text-anchor: start; } .right { text-anchor: end; } .faint { fill: #6e7781; }
rect { stroke: #57606a; stroke-width: 1; }
path { stroke: #57606a; stroke-width: 1.2; fill: none; }
.a { fill: #9ecbff; } .b { fill: #ffd58a; } .c { fill: #a7e3b5; } .d { fill: #e3b7e8; }
.free { fill: none; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .faint { fill: #8d96a0; }
  rect, path { stroke: #8d96a0; }
  .a { fill: #1b4b82; } .b { fill: #7a5200; } .c { fill: #1f6f3a; } .d { fill: #6a3d74; }
  .free { fill: none; }
}
"""


class Picture:
    """Shapes in the order in which they are drawn."""

    def __init__(self, title, width, height):
        self.title, self.width, self.height = title, width, height
        self.shapes = []

    def text(self, x, y, content, classes=""):
        self.shapes.append(f'<text x="{x}" y="{y}" class="{classes}">{escape(content)}</text>')

    def box(self, x, y, width, height, classes, content=""):
        self.shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" class="{classes}"/>'
        )
        if content:
            self.text(x + width / 2, y + height / 2 + 5, content)

    def cells(self, x, y, contents, classes, width=30, height=26):
        """Boxes side by side; `classes` is one for all, or one for each."""
        for i, content in enumerate(contents):
            kind = classes if isinstance(classes, str) else classes[i]
            self.box(x + i * width, y, width, height, kind, str(content))

    def arrow(self, x, y, to_x, to_y):
        """From a place to one below it or beside it."""
        self.shapes.append(f'<path d="M{x} {y}L{to_x} {to_y}" marker-end="url(#tip)"/>')

    def svg(self):
        body = "\n".join(self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" role="img" aria-label="{escape(self.title)}">\n'
            f"<style>{STYLE}</style>\n"
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M1 1L7 4L1 7"/></marker>\n'
            f"{body}\n</svg>\n"
        )


def ragged():
    p = Picture("A ragged batch: three requests in one tensor, and where each begins", 640, 150)
    p.text(10, 40, "q, rows:", "left")
    p.cells(100, 22, range(8), ["a", "b", "c", "c", "c", "c", "c", "c"], 48)
    for row, request in ((0, "request 0"), (1, "request 1")):
        p.text(124 + 48 * row, 14, request.split()[1], "faint")
    p.text(340, 14, "2", "faint")
    p.text(75, 14, "request", "faint")
    p.text(10, 116, "qo_indptr = [0, 1, 2, 8]", "left")
    p.text(220, 116, "request r has the rows from qo_indptr[r] to qo_indptr[r + 1].", "left faint")
    for row in (0, 1, 2, 8):
        p.text(100 + 48 * row, 84, str(row))
        p.arrow(100 + 48 * row, 70, 100 + 48 * row, 50)
    p.text(
        10,
        140,
        "Two decodes (one new token each) and a prompt of six tokens are one batch.",
        "left",
    )
    return p


def pages():
    p = Picture("A paged cache: each row of the block table lists the pages of a request", 680, 264)
    p.text(10, 24, "block_table", "left")
    rows = (("a", 37, (4, 1, 6)), ("b", 20, (0, 3)), ("c", 5, (7,)))
    for r, (kind, kv_len, ids) in enumerate(rows):
        y = 36 + 30 * r
        p.text(10, y + 18, f"request {r}", "left")
        p.cells(
            90, y, [*ids] + [""] * (3 - len(ids)), [kind] * len(ids) + ["free"] * (3 - len(ids))
        )
        p.text(195, y + 18, f"kv_lens[{r}] = {kv_len}: ", "left")
        full, rest = divmod(kv_len, 16)
        words = f"{full} full pages and {rest} tokens" if full else f"{rest} tokens"
        p.text(310, y + 18, words.replace("1 full pages", "1 full page"), "left faint")
    p.text(10, 160, "k, v: pages of 16 tokens, anywhere in the cache", "left")
    used = {
        page: (kind, 16 if i < kv_len // 16 else kv_len % 16)
        for kind, kv_len, ids in rows
        for i, page in enumerate(ids)
    }
    for page in range(8):
        x = 10 + 82 * page
        p.box(x, 172, 76, 34, "free")
        if page in used:
            kind, tokens = used[page]
            p.box(x, 172, 76 * tokens / 16, 34, kind)
        p.text(x + 38, 223, f"page {page}")
    p.text(10, 252, "What lies behind the last token of a request is never read.", "left faint")
    return p


def csr():
    p = Picture(
        "The same page lists as CSR: one list of ids, and where each request begins", 640, 120
    )
    p.text(10, 40, "page_indices", "left")
    p.cells(130, 22, (4, 1, 6, 0, 3, 7), list("aaabbc"), 48)
    for i in (0, 3, 5, 6):
        p.text(130 + 48 * i, 84, str(i))
        p.arrow(130 + 48 * i, 70, 130 + 48 * i, 50)
    p.text(10, 84, "page_indptr", "left")
    p.text(
        10,
        110,
        "page_indptr = [0, 3, 5, 6]: no padding, however different the lengths are.",
        "left faint",
    )
    return p


def layouts():
    p = Picture("NHD and HND: what is next to each other inside a page", 640, 190)
    for x, name, what, rows in (
        (10, "NHD: [page, token, head, dim]", "token", 4),
        (340, "HND: [page, head, token, dim]", "head", 2),
    ):
        p.text(x, 22, name, "left")
        columns = 2 if rows == 4 else 4
        for row in range(rows):
            p.text(x, 54 + 32 * row, f"{what} {row}", "left")
            for column in range(columns):
                head = column if rows == 4 else row
                token = row if rows == 4 else column
                width = 120 if columns == 2 else 52
                words = f"head {head}" if rows == 4 else f"t{token}"
                p.box(x + 62 + width * column, 36 + 32 * row, width, 26, "ac"[head], words)
    p.text(340, 130, "Memory runs along a row, then to the next one.", "left faint")
    p.text(340, 150, "Here: pages of 4 tokens, 2 kv heads.", "left faint")
    p.text(340, 170, "Other strides are fine: pass a view.", "left faint")
    return p


def packing():
    p = Picture(
        "Query rows of one kv head are packed: its keys are read once for all of them", 640, 210
    )
    p.text(
        10, 24, "8 query heads, 2 kv heads: group_size 4. Two query tokens of a request:", "left"
    )
    for head in range(8):
        for token in range(2):
            kind = "ac"[head // 4]
            p.box(64 + 46 * head, 36 + 28 * token, 42, 24, kind, f"h{head}")
    p.text(10, 53, "token 0", "left")
    p.text(10, 81, "token 1", "left")
    for kv_head, x in ((0, 60), (1, 330)):
        p.arrow(150 + 185 * kv_head, 98, x + 115, 122)
        p.text(x, 140, f"rows of kv head {kv_head}", "left")
        p.cells(
            x, 150, [f"t{row // 4}h{kv_head * 4 + row % 4}" for row in range(8)], "ac"[kv_head], 32
        )
    p.text(10, 202, "row = token * group_size + head in group", "left faint")
    return p


def schedule():
    p = Picture(
        "A schedule: all queues get the same work; what a queue can not hold is cut", 720, 210
    )
    queues = (
        (("a", 440, "request 0, keys 0 to 4000"),),
        (("a", 150, "0, the rest"), ("b", 285, "request 1")),
        (("c", 250, "request 2"), ("d", 186, "request 3")),
        (("d", 190, "request 3"), ("c", 130, "request 4"), ("b", 112, "5")),
    )
    for i, queue in enumerate(queues):
        x, y = 80, 24 + 34 * i
        p.text(10, y + 19, f"queue {i}", "left")
        for kind, width, words in queue:
            p.box(x, y, width, 28, kind, words)
            x += width
    p.arrow(80, 168, 560, 168)
    p.text(570, 172, "time", "left")
    p.text(
        10,
        196,
        "A queue is walked by one CTA of the GPU or one task on the CPU. "
        "Pieces of a request are merged in the same launch.",
        "left faint",
    )
    return p


DRAWINGS = (ragged, pages, csr, layouts, packing, schedule)


def pictures():
    """Path and text of each picture."""
    for draw in DRAWINGS:
        yield PICTURES / f"{draw.__name__}.svg", draw().svg()


def main():
    PICTURES.mkdir(exist_ok=True)
    for path, svg in pictures():
        path.write_text(svg)


if __name__ == "__main__":
    main()
