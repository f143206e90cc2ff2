"""`aengine chat`: a conversation on a terminal or a pipe.

Synchronous on purpose, on the blocking facade: Ctrl-C then arrives as `KeyboardInterrupt` where the
answer is being read, and dropping the stream there ends the answer and nothing else.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from aengine.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.engine.blocking import BlockingEngine
    from aengine.request import SamplingParams

HELP = "Ctrl-C stops an answer; /new begins anew; /quit or Ctrl-D ends"


class Chat:
    """One conversation after another with one engine.

    Args:
        engine: an open engine.
        params: for every answer.
        system: what the model is told first, if anything.
        write: takes the answers' text.
        note: takes everything else, a line at a time.
    """

    def __init__(
        self,
        engine: BlockingEngine,
        params: SamplingParams,
        *,
        system: str | None = None,
        write: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._write = write
        self._note = note
        self.messages = list(self._opening)

    def run(self, read: Callable[[], str]) -> None:
        """Answer what `read` gives, until it raises `EOFError` or gives "/quit"."""
        while True:
            try:
                line = read().strip()
                if line == "/quit":
                    return
                self._turn(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note(HELP)

    def _turn(self, line: str) -> None:
        if line == "/new":
            self.messages = list(self._opening)
        elif line.startswith("/"):
            self._note(f"unknown command {line.split()[0]!r}. {HELP}")
        elif line:
            self._answer(line)

    def _answer(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        parts: list[str] = []
        try:
            for chunk in self._engine.stream(self.messages, self._params):
                parts.append(chunk.text)
                self._write(chunk.text)
        except KeyboardInterrupt:
            self._write("\n")
            self._note("(stopped)")
        except RequestError as error:
            # This turn cannot be answered (too long, most likely); the ones before it stand.
            self.messages.pop()
            self._note(f"aengine: {error}")
            return
        else:
            self._write("\n")
        self.messages.append({"role": "assistant", "content": "".join(parts)})


def write(text: str) -> None:
    """Text of an answer, to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A line that is no answer, to stderr."""
    sys.stderr.write(text + "\n")


def read() -> str:
    """The next line of stdin; on a terminal, after a prompt and with line editing.

    Raises:
        EOFError: there is none.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("> ")
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line
