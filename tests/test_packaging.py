"""What `pyproject.toml` says of the C extensions, against the files that are there."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_c_file_is_built_and_every_header_is_depended_on() -> None:
    extensions = SETUPTOOLS["ext-modules"]
    sources = {name for extension in extensions for name in extension["sources"]}
    headers = {name for extension in extensions for name in extension.get("depends", ())}
    folder = ROOT / "aengine_ext"
    assert sources == {str(path.relative_to(ROOT)) for path in folder.glob("*.c")}
    assert headers == {str(path.relative_to(ROOT)) for path in folder.glob("*.h")}


def test_every_extension_may_be_missing_and_has_a_stub() -> None:
    for extension in SETUPTOOLS["ext-modules"]:
        assert extension["optional"]
        assert (ROOT / f"{extension['name'].replace('.', '/')}.pyi").is_file()


def test_typing_marks_are_in_the_wheel() -> None:
    data = SETUPTOOLS["package-data"]
    assert "py.typed" in data["aengine"]
    assert {"py.typed", "*.pyi"} <= set(data["aengine_ext"])
