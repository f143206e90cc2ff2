"""The documentation builds without warnings, and design pages stay short."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
    reason="the docs extra is not installed",
)
def test_docs_build_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "dummy", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page", sorted((DOCS / "design").glob("*.md")), ids=lambda page: str(page.name)
)
def test_design_pages_are_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 60


def test_the_table_of_reported_faults_names_tests_that_exist() -> None:
    page = (DOCS / "design" / "known-faults.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 25
    tests = DOCS.parent / "tests"
    missing = [
        (path, name)
        for path, name in named
        if not re.search(rf"^(async )?def {name}\(", (tests / path).read_text(), re.MULTILINE)
    ]
    assert missing == []
