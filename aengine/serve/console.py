"""What every command says when it fails, and in which form: one line on stderr and an exit code.

Exit codes: 0 done, 1 it failed, 2 something asked for makes no sense, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aengine.errors import AEngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on a line of stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")


def complain(message: str, *, code: str, as_json: bool) -> None:
    """Say on stderr what is wrong: a line for people, or an object with a stable code."""
    if as_json:
        line = json.dumps({"error": {"code": code, "message": message}}, ensure_ascii=False)
    else:
        line = f"aengine: {' '.join(message.splitlines())}"
    sys.stderr.write(line + "\n")


@contextmanager
def errors_as_lines(*, as_json: bool = False) -> Iterator[None]:
    """Turn errors into a line and an exit code.

    Raises:
        SystemExit: instead of the package's errors, an interrupt, or a reader that went away.
    """
    try:
        yield
        sys.stdout.flush()
    except AEngineError as error:
        complain(str(error), code=error.code, as_json=as_json)
        raise SystemExit(MISUSED if isinstance(error, ValueError) else FAILED) from error
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read stdout has enough (`| head`). The interpreter must not try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(FAILED) from None
    except Exception as error:
        # typer's own errors are recognised by what they are called and can do: their module moves.
        if type(error).__name__ == "Abort":
            raise SystemExit(INTERRUPTED) from None
        if not hasattr(error, "format_message"):
            raise
        if message := error.format_message():  # empty: the help was asked for and given
            complain(f"{message} (see 'aengine --help')", code="invalid_usage", as_json=as_json)
        raise SystemExit(MISUSED) from None
