# SPDX-License-Identifier: Apache-2.0
"""Runs examples/plan.ipynb and keeps what its cells show: `python docs/notebook.py` rewrites it.

tests/test_docs.py compares. A cell shows its last line, if that is an expression, as in Jupyter.
"""

import ast
import json
import pathlib
from typing import Any

NOTEBOOK = pathlib.Path(__file__).resolve().parent.parent / "examples" / "plan.ipynb"


def shown(code: str, names: dict[str, Any]) -> Any:
    """Runs the code of a cell. Returns what Jupyter would show below it."""
    tree = ast.parse(code)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
        return None
    tree.body.pop()
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


def outputs(value: Any, count: int) -> list[dict[str, Any]]:
    if value is None:
        return []
    data = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data = {"text/html": value._repr_html_().splitlines(keepends=True)} | data
    return [
        {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
    ]


def rerun(text: str) -> str:
    """The text of a notebook with new outputs."""
    notebook = json.loads(text)
    names: dict[str, Any] = {}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(code, 1):
        cell["execution_count"] = count
        cell["outputs"] = outputs(shown("".join(cell["source"]), names), count)
    return json.dumps(notebook, indent=1) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(rerun(NOTEBOOK.read_text()))
