"""The extensions under gcc's sanitizers, each run in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ["-O1", "-g", "-fPIC", "-shared", "-fno-omit-frame-pointer"]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def runtime(library: str) -> str:
    """The sanitizer's runtime library, which has to be loaded before Python."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc here")
    found = subprocess.run(
        [compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"gcc has no {library} here")
    return str(Path(found).resolve())


def copy_packages(to: Path) -> None:
    """Copies of what the tests need, so that a sanitized build does not replace the real one."""
    left_out = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("aengine", "aengine_ext", "tests"):
        shutil.copytree(ROOT / name, to / name, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", to)


def build(tree: Path, module: str, flags: list[str], sources: list[str], *libraries: str) -> None:
    """One extension module, in the copy."""
    include = sysconfig.get_paths()["include"]
    target = tree / "aengine_ext" / f"{module}.abi3.so"
    paths = [str(path) for name in sources for path in sorted((tree / "aengine_ext").glob(name))]
    subprocess.run(
        ["gcc", *FLAGS, *flags, f"-I{include}", *paths, *libraries, "-o", str(target)], check=True
    )


def run_tests(tree: Path, preload: str, *arguments: str, wrap: tuple[str, ...] = ()) -> None:
    """pytest in the copy; a sanitizer's finding ends its process, or is in what it prints."""
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        # Python itself never frees everything.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:halt_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
        "PYTHONPATH": str(tree),
        "PYTHONMALLOC": "malloc",
        # numpy's own threads have no part in this, and are not built for sanitizers
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [*wrap, sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments, "--timeout", "120"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    report = done.stdout[-3000:] + done.stderr[-5000:]
    assert done.returncode == 0, report
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout, report
    for finding in ("ERROR: AddressSanitizer", "runtime error:", "WARNING: ThreadSanitizer"):
        assert finding not in done.stdout + done.stderr, report


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_the_completion_queue_under_the_address_sanitizer(tmp_path: Path) -> None:
    preload = runtime("libasan.so")
    copy_packages(tmp_path)
    build(tmp_path, "_completions", [*ADDRESS, "-std=c11"], ["_completions.c"])
    files = [f"tests/device/test_{name}.py" for name in ("extension", "simulated", "contract")]
    run_tests(tmp_path, preload, *files, "-k", "not cpu-python and not uvloop and not gpu")


CPU_SOURCES = ["_cpu.c", "_cpu_forward.c", "_cpu_pack.c", "_cpu_pool.c", "_cpu_isa_*.c"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_cpu_kernels_under_the_address_sanitizer(tmp_path: Path) -> None:
    preload = runtime("libasan.so")
    copy_packages(tmp_path)
    flags = [*ADDRESS, "-std=gnu11", "-ffp-contract=off"]
    build(tmp_path, "_cpu", flags, CPU_SOURCES, "-lm", "-lpthread")
    run_tests(tmp_path, preload, "tests/kernels/test_native_types.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_cpu_kernels_pool_under_the_thread_sanitizer(tmp_path: Path) -> None:
    preload = runtime("libtsan.so")
    copy_packages(tmp_path)
    flags = ["-fsanitize=thread", "-std=gnu11", "-ffp-contract=off"]
    build(tmp_path, "_cpu", flags, CPU_SOURCES, "-lm", "-lpthread")
    # Without randomised addresses: older runtimes do not know today's kernels' layout.
    fixed = shutil.which("setarch")
    wrap = (fixed, "-R") if fixed else ()
    probe = subprocess.run(
        [*wrap, sys.executable, "-c", "print('here')"],
        env={**os.environ, "LD_PRELOAD": preload},
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode or "here" not in probe.stdout:
        pytest.skip(f"the thread sanitizer does not run Python here: {probe.stderr[:200]}")
    run_tests(tmp_path, preload, "tests/kernels/test_native_types.py", "-k", "same_bits", wrap=wrap)
