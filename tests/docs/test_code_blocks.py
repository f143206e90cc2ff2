"""Every Python block of the documentation and the README, run.

The blocks of a page run in order and share their names, as a reader would type them. What a page
takes for granted (an engine, a prompt) stands in an HTML comment that begins with `setup`; what
needs a GPU follows the comment `gpu`, and runs where there is one; what needs an optional package
follows `needs` and its name. A block
with tests in it is a test suite and runs under pytest; one that calls `asyncio.run` runs where no
loop runs; all others run in a loop, with `await` at the top, as in a notebook.
"""
# ruff: noqa: F811 (a fixture is imported, and named again where it is used)

from __future__ import annotations

import ast
import asyncio
import importlib.util
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aengine import Engine
from tests.suites import suite  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.suites import Suite

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PARTS = re.compile(
    r"^ *(?:<!-- (?:(?P<gpu_setup>gpu) )?(?P<setup>setup)\n"
    r"|(?P<gpu><!-- gpu -->\n)?(?:<!-- needs (?P<needs>\w+) -->\n)?"
    r"^ *```(?P<language>\w+)[^\n]*\n)(?P<code>.*?)"
    r"^ *(?:-->|```)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Some code of a page. `line` is where it begins."""

    code: str
    line: int
    hidden: bool
    gpu: bool
    needs: str | None = None
    """A package without which it does not run."""


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in PARTS.finditer(text):
        if found["setup"] or found["language"] in ("python", "py", "pycon"):
            line = text.count("\n", 0, found.start("code"))
            gpu = bool(found["gpu"] or found["gpu_setup"])
            yield Block(
                textwrap.dedent(found["code"]), line, bool(found["setup"]), gpu, found["needs"]
            )


def runnable() -> list[Any]:
    pages = [page for page in PAGES if any(not block.hidden for block in blocks(page))]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.mark.usefixtures("smollm2_gguf")
@pytest.mark.parametrize("page", runnable())
def test_the_blocks_of_a_page_run(
    page: Path,
    suite: Suite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        try:
            for block in blocks(page):
                if block.gpu and not torch.cuda.is_available():
                    continue
                if block.needs and importlib.util.find_spec(block.needs) is None:
                    continue
                if re.search(r"^(async )?def test_", block.code, re.MULTILINE):
                    outcome = suite(block.code)
                    assert outcome.counts.keys() == {"passed"}, outcome.said
                else:
                    run(block, page, names, runner)
        finally:
            runner.run(close(names))


def run(block: Block, page: Path, names: dict[str, Any], runner: asyncio.Runner) -> None:
    source = "\n" * block.line + block.code  # so that a traceback names the page's line
    if "asyncio.run(" in block.code:
        exec(compile(source, str(page), "exec"), names)
        return
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def cell() -> None:
        waited = eval(code, names)
        if waited is not None:
            await waited

    runner.run(cell())


async def close(names: dict[str, Any]) -> None:
    for value in list(names.values()):
        if isinstance(value, Engine):
            await value.aclose(drain=False)


def test_no_block_hides_behind_another_name() -> None:
    """A block is Python and runs, or is one of these, which no Python hides in."""
    languages = set()
    for page in PAGES:
        languages |= {found["language"] for found in PARTS.finditer(page.read_text())}
        assert page.read_text().count("```") % 2 == 0
    assert languages - {None, "python"} <= {"console", "toml", "text"}


def test_the_finder_of_blocks_sees_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- setup\nx = 1\n-->\ntext\n```python\ny = x\n```\n"
        "- item\n\n  ```python\n  z = y\n  ```\n```text\nnot this\n```\n"
        "<!-- gpu setup\nx = 2\n-->\n\n<!-- gpu -->\n```python\nw = 1\n```\n"
        "<!-- needs nothing_known -->\n```python\nv = 1\n```\n"
    )
    assert list(blocks(page)) == [
        Block("x = 1\n", 1, True, False),
        Block("y = x\n", 5, False, False),
        Block("z = y\n", 10, False, False),
        Block("x = 2\n", 16, True, True),
        Block("w = 1\n", 21, False, True),
        Block("v = 1\n", 25, False, False, "nothing_known"),
    ]


def test_the_architecture_page_names_files_that_are_there() -> None:
    """And every room: the page is how a newcomer finds the way."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "aengine"
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_*]+)?\.py)`", text))
    assert len(named) > 30
    missing = {
        name for name in named if not list(package.glob(name)) and not (ROOT / name).exists()
    }
    assert missing == {"tests/test_architecture.py"} - named
    rooms = {path.name for path in package.iterdir() if path.is_dir()} - {"__pycache__"}
    assert {room for room in rooms if f"`{room}/`" not in text} == set()
