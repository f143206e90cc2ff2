"""Steady decode steps as captured graphs: a step is one pinned buffer and five driver calls.

`replay` packs a step with numpy into pinned memory and launches copy, graph, copy and record with
the GIL held: no torch op (law 11). What it cannot do (prefill, grammar masks, per-row rules) it
leaves to the eager way by returning None. A shape that was not captured yet runs eagerly, and is
captured beside the steps (`chore`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from aengine.batch import StepResult, TokenLogprobs
from aengine.device.future import DeviceFuture
from aengine.execute.sampler import no_token
from aengine.execute.sampler_state import SamplerFeature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from aengine.batch import StepPlan
    from aengine.device.completions import HostCompletion
    from aengine.execute.launcher import StepOutput
    from aengine.execute.sampler import Sampler

HEADER = 2
"""Columns of a packed row before its block ids: slot and position."""
PADDING_POSITION = -1
FIRST_BLOCKS = 512
"""Width of the tables that nearly all steps need; a longer context has graphs of its own."""
TOP_COUNTS = (0, 5, 20)
"""Most likely tokens that a graph gives log-probabilities of; a request for more runs eagerly."""


class StepShape(NamedTuple):
    """What a graph is made for: padded rows, blocks of a table, what its sampling can do."""

    rows: int
    blocks: int
    features: SamplerFeature
    top: int = 0

    @property
    def result_words(self) -> int:
        """Size of the packed result in 32-bit words."""
        return ResultLayout.of(self).words


class GraphLaunch(Protocol):
    """A captured step that can be launched again and again."""

    def launch(self, *holds: object, values: Sequence[int]) -> HostCompletion:
        """Enqueue it.

        Args:
            holds: kept alive until it is done.
            values: host addresses of the packed input and of the packed result.
        """
        ...


class Capture(Protocol):
    """Makes launchable graphs. The real one is `cuda_decode.CudaCapture`."""

    def __call__(self, shape: StepShape) -> GraphLaunch:
        """Capture a step of this shape. Enqueues nothing; any thread may call it.

        Raises:
            DeviceError: it cannot be captured.
        """
        ...


class Staging(Protocol):
    """Pinned memory of one step in flight: never written between its launch and its end (law 4)."""

    packed: npt.NDArray[np.int32]
    result: npt.NDArray[np.int32]
    packed_address: int
    result_address: int


def padded_sizes(max_rows: int) -> list[int]:
    """Row counts that graphs are made for: fine where a step is short, coarse where it is long."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32)]
    steps += range(512, max_rows, 128)
    return sorted({size for size in steps if size < max_rows} | {max_rows})


class DecodeGraphs:
    """The graphs of one lane.

    Args:
        capture: makes them.
        sampler: whose slots are sampled.
        make_staging: pinned memory for one step; made anew when all there is is in flight.
        in_flight: steps that are launched before the oldest has settled.
        max_rows: slots of the engine.
        max_blocks: blocks of the longest context.
    """

    def __init__(
        self,
        capture: Capture,
        sampler: Sampler,
        make_staging: Callable[[], Staging],
        *,
        in_flight: int,
        max_rows: int,
        max_blocks: int,
    ) -> None:
        self._capture = capture
        self._sampler = sampler
        self._make_staging = make_staging
        self._sizes = padded_sizes(max_rows)
        self._widths = sorted({min(FIRST_BLOCKS, max_blocks), max_blocks})
        self._graphs: dict[StepShape, GraphLaunch] = {}
        self._wanted: dict[StepShape, None] = {}
        self._refused: set[StepShape] = set()
        self._idle = [make_staging() for _ in range(in_flight)]

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def common_shapes(self) -> list[StepShape]:
        """Shapes worth having before the first request, largest first."""
        return [
            StepShape(rows, self._widths[0], features)
            for features in (SamplerFeature(0), SamplerFeature.RANDOM | SamplerFeature.TRUNCATED)
            for rows in reversed(self._sizes)
        ]

    def capture(self, shapes: Iterable[StepShape]) -> None:
        """Capture graphs; any thread, one at a time.

        Raises:
            DeviceError: a shape cannot be captured; it will not be tried again.
        """
        for shape in shapes:
            self._wanted.pop(shape, None)
            if shape in self._graphs or shape in self._refused:
                continue
            self._refused.add(shape)
            self._graphs[shape] = self._capture(shape)
            self._refused.discard(shape)

    def chore(self) -> Callable[[], None] | None:
        """What steps have wished for since the last call, to be done in a thread; None: nothing."""
        if not self._wanted:
            return None
        shapes = list(self._wanted)
        return lambda: self.capture(shapes)

    def replay(self, plan: StepPlan) -> DeviceFuture[StepOutput] | None:
        """Launch a step as a graph; None: it must run eagerly.

        Raises:
            DeviceError: the device is closed.
        """
        shape = self._shape(plan)
        if shape is None:
            return None
        graph = self._graphs.get(shape)
        if graph is None:
            if shape not in self._refused:
                self._wanted[shape] = None
            return None
        staging = self._idle.pop() if self._idle else self._make_staging()
        pack(plan, shape, staging.packed)
        point = graph.launch(staging, values=(staging.packed_address, staging.result_address))
        return DeviceFuture(point, GraphOutput(plan, shape, staging, self._sampler, self._idle))

    def _shape(self, plan: StepPlan) -> StepShape | None:
        """The shape whose graph can do this step, captured or not."""
        steady = plan.num_decode == plan.num_rows and not (
            plan.slot_inits or plan.constrained or plan.forced
        )
        if not steady or not plan.samples.all():
            return None
        features = self._sampler.features(plan.slots)
        if features & SamplerFeature.EXTRAS:
            return None
        if features & SamplerFeature.RANDOM:
            features |= (
                SamplerFeature.TRUNCATED
            )  # costs a row that does not need it next to nothing
        top = 0
        if features & SamplerFeature.LOGPROBS:
            wanted = int(self._sampler.top_logprobs(plan.slots).max())
            fitting = [count for count in TOP_COUNTS if count >= wanted]
            if not fitting:
                return None
            top = fitting[0]
        rows = next(size for size in self._sizes if size >= plan.num_rows)
        blocks = next(width for width in self._widths if width >= plan.block_tables.shape[1])
        return StepShape(rows, blocks, features, top)


def pack(plan: StepPlan, shape: StepShape, packed: npt.NDArray[np.int32]) -> None:
    """Write a steady step for the device: a row each of slot, position, block ids.

    Args:
        plan: decode rows only.
        shape: at least as large.
        packed: [at least rows * (2 + blocks)] int32.
    """
    rows, width = plan.num_rows, plan.block_tables.shape[1]
    table = packed[: shape.rows * (HEADER + shape.blocks)].reshape(shape.rows, -1)
    table[:rows, 0] = plan.slots
    table[:rows, 1] = plan.starts
    table[:rows, HEADER : HEADER + width] = plan.block_tables
    table[rows:, 0] = 0
    table[rows:, 1] = PADDING_POSITION


class GraphOutput:
    """A replayed step's tokens on their way to pinned memory."""

    def __init__(
        self,
        plan: StepPlan,
        shape: StepShape,
        staging: Staging,
        sampler: Sampler,
        idle: list[Staging],
    ) -> None:
        self._plan = plan
        self._shape = shape
        self._staging = staging
        # As they are now: the slots may have new owners when the step is done.
        self._request_ids = sampler.request_ids(plan.slots)
        wanting = shape.features & SamplerFeature.LOGPROBS
        self._tops = sampler.wanted_logprobs(plan.slots) if wanting else {}
        self._idle = idle

    def to_host(self) -> StepResult:
        """The result, once the step's completion has fired. Called once."""
        words = self._staging.result
        tokens = words[: self._plan.num_rows].tolist()
        errors: dict[int, Exception] = {
            row: no_token(self._request_ids[row]) for row, token in enumerate(tokens) if token < 0
        }
        logprobs = {
            row: self._logprobs(words, row, tokens[row], top)
            for row, top in self._tops.items()
            if row not in errors
        }
        self._idle.append(self._staging)
        return StepResult(
            step_id=self._plan.step_id,
            token_ids=[max(token, 0) for token in tokens],
            logprobs=logprobs,
            errors=errors,
        )

    def _logprobs(
        self, words: npt.NDArray[np.int32], row: int, token: int, top: int
    ) -> TokenLogprobs:
        at, real = ResultLayout.of(self._shape), words.view(np.float32)
        ids = at.top_ids + row * self._shape.top
        values = at.top_logprobs + row * self._shape.top
        top_ids = words[ids : ids + top].tolist()
        return TokenLogprobs(
            token_id=token,
            logprob=float(real[at.logprobs + row]),
            rank=int(words[at.ranks + row]),
            top=tuple(zip(top_ids, real[values : values + top].tolist(), strict=True)),
        )


class ResultLayout(NamedTuple):
    """Where things lie in the packed result, in 32-bit words from its start; tokens come first."""

    logprobs: int
    ranks: int
    top_ids: int
    top_logprobs: int
    words: int

    @classmethod
    def of(cls, shape: StepShape) -> ResultLayout:
        """The layout for a shape: R tokens, then for log-probabilities R, R, R*K and R*K more."""
        rows = shape.rows
        if not shape.features & SamplerFeature.LOGPROBS:
            return cls(rows, rows, rows, rows, rows)
        top = rows * shape.top
        return cls(rows, 2 * rows, 3 * rows, 3 * rows + top, 3 * rows + 2 * top)
