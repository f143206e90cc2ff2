"""`suite`: runs a small test suite under the pytest plugin, in this process.

Not pytester's way: that forgets afterwards which modules a run imported, and torch does not bear
being imported twice. A test module that uses the fixture imports it from here.
"""

from __future__ import annotations

import contextlib
import gc
import io
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

# Before the freeze below: its plugin imports it at the end and then looks for live objects.
import hypothesis.internal.observability  # noqa: F401
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Outcome:
    """What became of a suite: counts of passed, failed, skipped, errors; what pytest said."""

    counts: Counter[str] = field(default_factory=Counter)
    said: str = ""

    def check(self, **counts: int) -> None:
        assert dict(self.counts) == counts, self.said

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.skipped:
            self.counts[report.outcome] += 1
        elif report.failed:
            self.counts["errors"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.counts["errors"] += 1


class Suite(Protocol):
    """`suite(source, *arguments, ini=..., also={file name: source})`."""

    def __call__(
        self, source: str, /, *arguments: str, ini: str = "", also: dict[str, str] | None = None
    ) -> Outcome: ...


def plugin_arguments() -> list[str]:
    """Load the plugin, whether or not the package is installed with its entry points."""
    installed = any(found.name == "aengine" for found in entry_points(group="pytest11"))
    return ["-p", "aengine" if installed else "aengine.pytest_plugin", "-p", "no:cacheprovider"]


@pytest.fixture
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    def run(
        source: str, /, *arguments: str, ini: str = "", also: dict[str, str] | None = None
    ) -> Outcome:
        if "no:asyncio" not in arguments:
            ini = f"asyncio_default_fixture_loop_scope = function\n{ini}"
        folder: Path = tmp_path_factory.mktemp("suite")
        # A name of its own each: modules stay in sys.modules.
        for name, text in {f"test_{folder.name}.py": source, **(also or {})}.items():
            (folder / name).write_text(text)
        config = folder / "pytest.ini"
        # Where the package is installed pytest wants to rewrite it, and the run around this one has
        # imported it already.
        own = "Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
        filters = f"filterwarnings =\n    error\n    ignore:{own}\n"
        config.write_text(f"[pytest]\n{filters}pythonpath = .\n{ini}")
        outcome, said = Outcome(), io.StringIO()
        command = [str(folder), "-c", str(config), "--rootdir", str(folder)]
        command += ["--import-mode=importlib", *plugin_arguments(), *arguments]
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("COLUMNS", "300")  # on a narrow terminal pytest leaves reasons out
            pytest.main(command, plugins=[outcome])
        outcome.said = said.getvalue()
        return outcome

    gc.freeze()  # pytest collects garbage at its end, which torch's many objects would make slow
    yield run
    gc.unfreeze()
