"""The command line as a user meets it: one clear line for every error, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str | bytes, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from aengine.serve.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom aengine.serve.cli import main\nsys.argv = ['aengine', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def test_version() -> None:
    from aengine import __version__

    assert run("version").stdout.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", ""], "empty"),
        (["generate", "hi", "--model", "nope"], "unknown model 'nope'"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens=0"),
        (["generate", "hi", "--max-tokens", "-3"], "max_tokens=-3"),
        (["generate", "hi", "--temperature", "nan"], "temperature"),
        (["generate", "hi", "--device", "tpu"], "device='tpu'"),
        (["generate", "hi", "--dtype", "int3"], "dtype='int3'"),
        (["pull", "nope"], "no bundled model 'nope'"),
        (["generate", b"bad \xff bytes"], "not valid UTF-8"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(arguments: list[str | bytes], said: str) -> None:
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert done.stderr.startswith("aengine: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "letter.gguf"
    path.write_text("Dear reader, this is not a model.")
    done = run("generate", "hi", "--model", str(path))
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "GGUF" in done.stderr


def test_generate_streams_an_answer_and_closes_with_its_speed(smollm2_gguf: Path) -> None:
    done = run("generate", "Say hello.", "--max-tokens", "8", "--model", str(smollm2_gguf))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    last = done.stderr.strip().splitlines()[-1]
    assert "TTFT" in last
    assert "tokens/s" in last


def test_generate_as_json(smollm2_gguf: Path) -> None:
    done = run(
        "generate", "Say hello.", "--max-tokens", "4", "--model", str(smollm2_gguf), "--json"
    )
    answer = json.loads(done.stdout)
    assert answer["completion_tokens"] <= 4
    assert answer["text"]
    assert answer["finish_reason"] in ("length", "stop")


def test_doctor_knows_this_machine() -> None:
    found = json.loads(run("doctor", "--json").stdout)
    assert found["python"].startswith(".".join(map(str, sys.version_info[:2])))
    assert "torch" in found
