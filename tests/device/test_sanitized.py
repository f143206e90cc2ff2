"""The extension under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_the_extension_under_the_address_sanitizer(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc here")
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("gcc has no libasan here")
    # A copy of both packages, so that the sanitized build does not replace the real one.
    for name in ("aengine", "aengine_ext", "tests"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    flags = ["-std=c11", "-O1", "-g", "-fPIC", "-shared", "-fno-omit-frame-pointer"]
    flags += ["-fsanitize=address,undefined"]
    include = sysconfig.get_paths()["include"]
    source = str(tmp_path / "aengine_ext" / "_completions.c")
    target = str(tmp_path / "aengine_ext" / "_completions.abi3.so")
    subprocess.run([compiler, *flags, f"-I{include}", source, "-o", target], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(Path(runtime).resolve()),
        # Python itself never frees everything.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:halt_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONPATH": str(tmp_path),
        "PYTHONMALLOC": "malloc",
    }
    files = [f"tests/device/test_{name}.py" for name in ("extension", "simulated", "contract")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        [*command, "-k", "not cpu-python and not uvloop", "--timeout", "120"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    report = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, report
    assert "passed" in done.stdout
    assert "ERROR: AddressSanitizer" not in report
