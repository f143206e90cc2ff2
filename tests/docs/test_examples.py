"""Each example in the documentation, run."""
# ruff: noqa: F811 (a fixture is imported, and named again where it is used)

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aengine.testing import Faults, fake_engine
from tests.suites import suite  # noqa: F401

if TYPE_CHECKING:
    from types import ModuleType

    from aengine import Engine
    from tests.suites import Suite

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40


async def idle(engine: Engine) -> None:
    """Return when the engine holds nothing for anybody."""
    with anyio.fail_after(10):
        while True:
            stats = await engine.stats()
            if not (stats.running or stats.waiting or stats.kv_blocks_in_use):
                return
            await asyncio.sleep(0.002)


# -- the web endpoint ------------------------------------------------------------------------------


class Client:
    """One HTTP request, spoken in ASGI. `leave()` is a client that goes away."""

    def __init__(self, app: Any, path: str, query: str, *, spec_version: str = "2.4") -> None:
        self.messages: list[dict[str, Any]] = []
        self.got_body = asyncio.Event()
        self._gone = asyncio.Event()
        self._asked = False
        self._spec_version = spec_version
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.done = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._gone.is_set() and self._spec_version >= "2.4":
            raise OSError("the client is gone")
        self.messages.append(message)
        if message.get("body"):
            self.got_body.set()

    def leave(self) -> None:
        self._gone.set()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()


async def test_the_endpoint_streams() -> None:
    pytest.importorskip("fastapi")
    # Slow enough for a reader: deltas that wait for one are joined.
    engine = fake_engine({"sky": "Blue, mostly."}, faults=Faults(delay=0.02))
    app = load("web_endpoint").make_app(engine)
    async with app.router.lifespan_context(app):
        client = Client(app, "/answer", "question=the+sky")
        await client.done
        assert (client.status, client.body) == (200, "Blue, mostly.")
        assert len([message for message in client.messages if message.get("body")]) > 1
    assert engine.health().state == "closed"


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_the_endpoint_stops_when_the_client_leaves(spec_version: str) -> None:
    pytest.importorskip("fastapi")
    engine = fake_engine("x" * 8000, faults=Faults(delay=0.001))
    app = load("web_endpoint").make_app(engine)
    async with app.router.lifespan_context(app):
        client = Client(app, "/answer", "question=hi&max_tokens=8000", spec_version=spec_version)
        await client.got_body.wait()
        assert (await engine.stats()).running == 1
        client.leave()
        await asyncio.gather(client.done, return_exceptions=True)
        await idle(engine)
        stats = await engine.stats()
    assert stats.finished == {"abort": 1}
    assert stats.generation_tokens < 8000


async def test_the_endpoint_answers_errors_with_their_status() -> None:
    pytest.importorskip("fastapi")
    app = load("web_endpoint").make_app(fake_engine(max_model_len=64))
    async with app.router.lifespan_context(app):
        client = Client(app, "/answer", "question=hi&max_tokens=0")
        await client.done
    assert client.status == 400
    assert json.loads(client.body)["code"] == "invalid_request"


# -- the bot ---------------------------------------------------------------------------------------


async def test_the_bot_keeps_channels_apart_and_shares_their_beginning() -> None:
    example = load("chat_bot")

    def reply(prompt: str) -> str:
        """The last word of each line the user said, as far as the model is told."""
        lines = [line for line in prompt.splitlines() if line.startswith("user: ")]
        return " ".join(line.split()[-1] for line in lines)

    async with fake_engine(reply) as engine:
        bot = example.Bot(engine)
        channels = [f"room{number}" for number in range(12)]
        for turn in range(3):
            answers = await asyncio.gather(
                *(bot.on_message(channel, f"I say {channel}-{turn}") for channel in channels)
            )
            assert answers == [
                " ".join(f"{channel}-{said}" for said in range(turn + 1)) for channel in channels
            ]
        stats = await engine.stats()
    # The persona alone is 70 bytes: four blocks and more, which all but the first find computed.
    assert stats.cached_prompt_tokens > 64 * (3 * 12 - 12)


async def test_the_bot_answers_a_channel_in_order() -> None:
    example = load("chat_bot")
    async with fake_engine(lambda prompt: str(prompt.count("user: "))) as engine:
        bot = example.Bot(engine)
        answers = await asyncio.gather(*(bot.on_message("room", "again") for _ in range(5)))
    assert answers == ["1", "2", "3", "4", "5"]


# -- the folder ------------------------------------------------------------------------------------


async def test_the_folder_becomes_objects(tmp_path: Path) -> None:
    example = load("extract_folder")
    rows = {
        f"letter{number}.txt": {
            "sender": f"N. {number}",
            "urgent": number % 2 == 0,
            "topic": "other",
        }
        for number in range(6)
    }
    for name, row in rows.items():
        (tmp_path / name).write_text(f"Dear all, I am {row['sender']}.")
    (tmp_path / "long.txt").write_text("x" * 9000)
    replies = {f"I am {row['sender']}": json.dumps(row) for row in rows.values()}
    async with fake_engine(replies) as engine:
        found = await example.extract_folder(engine, tmp_path)
    assert found == rows | {"long.txt": None}


# -- the application with tests --------------------------------------------------------------------


def test_the_suite_of_the_application_passes(suite: Suite) -> None:
    names = ("summaries.py", "test_summaries.py")
    suite("", also={name: (EXAMPLES / name).read_text() for name in names}).check(passed=5)


# -- the notebook ----------------------------------------------------------------------------------


async def test_the_notebook_s_cells_run_in_a_running_loop(
    smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            await run_cell("".join(cell["source"]), names)
    assert capsys.readouterr().out.strip()
    assert names["engine"].health().state == "closed"


async def run_cell(source: str, names: dict[str, Any]) -> None:
    """As IPython does it: compile with await allowed at the top, then await what comes out."""
    code = compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waited = eval(code, names)
    if waited is not None:
        await waited


def test_the_examples_need_no_more_than_the_tests_have() -> None:
    """An example that cannot be imported here would be an example that nobody runs."""
    roots = set()
    for path in EXAMPLES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                roots.add(node.module.split(".")[0])
    assert roots - sys.stdlib_module_names == {"aengine", "fastapi", "pytest", "summaries"}
