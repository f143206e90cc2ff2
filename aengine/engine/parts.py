"""What a loaded engine is made of. `loading` makes real parts, `aengine.testing` scripted ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from aengine.batch import BlockCopy
    from aengine.config import EngineConfig
    from aengine.device.lanes import Lanes
    from aengine.device.protocols import Device, Stream
    from aengine.device.trace import Trace
    from aengine.engine.detokenize import TokenTable
    from aengine.engine.grammars import Grammars
    from aengine.engine.prompts import TextCodec
    from aengine.engine.text_thread import TextThread
    from aengine.execute.launcher import Launcher
    from aengine.policy.scheduler import Scheduler
    from aengine.request import SamplingParams


@dataclass(slots=True, kw_only=True, eq=False)
class EngineParts:
    """Everything the step loop works with. Owned by one engine, closed by it."""

    model_name: str
    scheduler: Scheduler
    launcher: Launcher
    device: Device
    forward_stream: Stream
    codec: TextCodec
    tokenizer: TokenTable
    end_token_ids: frozenset[int]
    max_model_len: int
    text_thread: TextThread
    grammars: Grammars
    host_blocks: HostBlocks | None = None
    """Where blocks of sequences that give way are copied; None: they are computed anew."""
    memory: ModelMemory | None = None
    """What `sleep` and `update_weights` work on; a scripted model has none."""
    set_threads: Callable[[int], object] | None = None
    """Sets the threads that computing uses on the calling thread."""
    lanes: Lanes | None = None
    """What prefill and decode run on side by side; None: they take turns, or it is yet to come."""
    lane_launchers: Mapping[Stream, Launcher] = field(default_factory=dict)
    """Those of lanes with workspaces and graphs of their own."""
    trace: Trace | None = None
    trace_path: str | None = None

    def launcher_of(self, stream: Stream) -> Launcher:
        """What launches steps on a lane."""
        return self.lane_launchers.get(stream, self.launcher)

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell the request's bad words, at a word's start and inside."""
        sequences: list[tuple[int, ...]] = []
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.codec.encode(text, add_special_tokens=False))
                if ids and ids not in sequences:
                    sequences.append(ids)
        return tuple(sequences)

    def write_trace(self) -> None:
        """Write the trace where it was asked for."""
        if self.trace is not None and self.trace_path is not None:
            self.trace.write(self.trace_path)

    def close(self) -> None:
        """Give everything back: threads, streams, memory. Blocks until the device is done."""
        self.text_thread.close()
        self.grammars.close()
        self.device.close()
        if self.lanes is not None:
            self.lanes.close()


class HostBlocks(Protocol):
    """Host memory for KV blocks."""

    def copy_blocks(self, copy: BlockCopy, /) -> None:
        """Copy blocks to the host or back. Launched on the copy stream; waits for nothing."""
        ...


class ModelMemory(Protocol):
    """A model's KV cache and weights. All but `read` run on the forward stream, between steps."""

    def free_kv(self) -> None:
        """Give the KV cache's memory back."""
        ...

    def make_kv(self) -> None:
        """Make the KV cache again, as large as it was."""
        ...

    def read(self, model: str, /) -> Any:
        """Open other weights of the same network; changes nothing. In a thread.

        Raises:
            ModelLoadError: there are none, or they are another network's.
        """
        ...

    def load(self, files: Any, /) -> Any:
        """Load what `read` opened beside the weights in use; changes nothing.

        Raises:
            ModelLoadError: tensors are missing, unexpected or misshapen.
        """
        ...

    def use(self, weights: Any, /) -> None:
        """Compute with what `load` returned from the next step on."""
        ...


class PartsLoader(Protocol):
    """How an engine gets its parts. Runs on the engine's loop; the work happens in threads."""

    def __call__(
        self, config: EngineConfig, on_progress: Callable[[str, int, int], None], /
    ) -> Awaitable[EngineParts]: ...
