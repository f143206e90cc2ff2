"""The conversation behind `aengine chat`, on a fake engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aengine import BlockingEngine, EngineDeadError, SamplingParams
from aengine.serve.chat import Chat
from aengine.testing import Faults, fake_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.testing.replies import ReplySource


class Terminal:
    """Gives the lines, takes what is written; `on_write` sees it first."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = list(lines)
        self.answers = ""
        self.notes: list[str] = []
        self.on_write: Callable[[str], None] = lambda text: None

    def read(self) -> str:
        line = self._lines.pop(0) if self._lines else EOFError
        if isinstance(line, str):
            return line + "\n"
        raise line

    def write(self, text: str) -> None:
        self.answers += text
        self.on_write(text)


def talk(
    terminal: Terminal,
    replies: ReplySource,
    *,
    system: str | None = None,
    max_model_len: int = 8192,
    faults: Faults | None = None,
) -> Chat:
    engine = fake_engine(replies, max_model_len=max_model_len, faults=faults)
    with BlockingEngine.around(engine) as facade:
        chat = Chat(
            facade,
            SamplingParams(max_tokens=1000),
            system=system,
            write=terminal.write,
            note=terminal.notes.append,
        )
        chat.run(terminal.read)
    return chat


def test_the_model_sees_every_turn_before() -> None:
    terminal = Terminal("one", "two", "/quit", "three")
    talk(
        terminal, lambda prompt: f"<{prompt.count('user: ')}|{'calm' in prompt}>", system="Be calm"
    )
    assert terminal.answers == "<1|True>\n<2|True>\n"


def test_new_forgets_and_empty_lines_are_nothing() -> None:
    terminal = Terminal("one", "", "   ", "/new", "two")
    chat = talk(terminal, lambda prompt: str(prompt.count("user: ")), system="Be calm")
    assert terminal.answers == "1\n1\n"
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said() -> None:
    terminal = Terminal("one", "two")

    def interrupt(text: str) -> None:
        if "c" in terminal.answers:
            terminal.on_write = lambda text: None
            raise KeyboardInterrupt

    terminal.on_write = interrupt
    replies = {"user: two": "second", "user: one": "abc" * 300}
    chat = talk(terminal, replies, faults=Faults(delay=0.0005))
    first, second = terminal.answers.splitlines()
    assert first.startswith("abc")
    assert len(first) < 900
    assert second == "second"
    assert terminal.notes == ["(stopped)"]
    assert [message["content"] for message in chat.messages] == ["one", first, "two", "second"]


def test_an_interrupt_at_the_prompt_says_how_to_leave() -> None:
    terminal = Terminal(KeyboardInterrupt, "one")
    talk(terminal, "yes")
    assert terminal.answers == "yes\n"
    assert "/quit" in terminal.notes[0]


def test_a_turn_that_does_not_fit_is_said_and_forgotten() -> None:
    terminal = Terminal("one", "x" * 200, "two")
    chat = talk(terminal, "yes", max_model_len=128)
    assert terminal.answers == "yes\nyes\n"
    assert "128" in terminal.notes[0]
    assert [message["content"] for message in chat.messages] == ["one", "yes", "two", "yes"]


def test_an_unknown_command_is_said() -> None:
    terminal = Terminal("/fly away")
    talk(terminal, "yes")
    assert terminal.answers == ""
    assert "'/fly'" in terminal.notes[0]


def test_a_dead_engine_ends_the_chat() -> None:
    with pytest.raises(EngineDeadError):
        talk(Terminal("one"), "yes", faults=Faults(lose_at=1))
