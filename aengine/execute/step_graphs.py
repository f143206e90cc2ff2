"""Steps as captured graphs: a step is one pinned buffer and five driver calls.

`replay` packs a step with numpy into pinned memory and launches copy, graph, copy and record with
the GIL held: no torch op (law 11). What no graph can do (grammar masks, rules of single rows,
log-probabilities of prompts) it leaves to the eager way by returning None. A step takes the
smallest captured graph that it fits into; if a tighter one could be, that is captured beside the
steps (`chore`) for the next time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from aengine.batch import StepResult, TokenLogprobs
from aengine.device.future import DeviceFuture
from aengine.execute.graph_shapes import (
    DRAWS,
    TOP_COUNTS,
    ResultLayout,
    SampleShape,
    StepShape,
    at_least,
)
from aengine.execute.packing import MixedPacker, pack_decode, pack_sample, places_of
from aengine.execute.sampler import no_token
from aengine.execute.sampler_state import SamplerFeature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from aengine.batch import StepPlan
    from aengine.device.completions import HostCompletion
    from aengine.execute.graph_shapes import GraphSizes
    from aengine.execute.launcher import StepOutput
    from aengine.execute.sampler import Sampler


Shape = StepShape | SampleShape
S = TypeVar("S", StepShape, SampleShape)


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
    """Makes launchable graphs. The real one is `cuda_capture.CudaCapture`."""

    def __call__(self, shape: Shape) -> GraphLaunch:
        """Capture a step, or a sample, of this shape. Enqueues nothing; any thread may call it.

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


class StepGraphs:
    """The graphs of one lane.

    Args:
        capture: makes them.
        sampler: whose slots are sampled.
        make_staging: pinned memory for one step; made anew when all there is is in flight.
        sizes: of the graphs.
        in_flight: steps that are launched before the oldest has settled.
        block_size: tokens of a KV block.
    """

    def __init__(
        self,
        capture: Capture,
        sampler: Sampler,
        make_staging: Callable[[], Staging],
        sizes: GraphSizes,
        *,
        in_flight: int,
        block_size: int,
    ) -> None:
        self._capture = capture
        self._sampler = sampler
        self._make_staging = make_staging
        longest = sizes.widths[-1] * block_size
        self._packer = MixedPacker(block_size=block_size, max_model_len=longest)
        self._sizes = sizes
        self._graphs: dict[Shape, GraphLaunch] = {}
        self._chosen: dict[Shape, Shape | None] = {}
        self._wanted: dict[Shape, None] = {}
        self._refused: set[Shape] = set()
        self._idle = [make_staging() for _ in range(in_flight)]

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def capture(self, shapes: Iterable[Shape]) -> None:
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
            self._chosen = {}

    def chore(self) -> Callable[[], None] | None:
        """The oldest wish of the steps, to be done in a thread; None: there is none."""
        if not self._wanted:
            return None
        shape = next(iter(self._wanted))
        return lambda: self.capture([shape])

    def replay(self, plan: StepPlan) -> DeviceFuture[StepOutput] | None:
        """Launch a step as a graph; None: it must run eagerly.

        Raises:
            DeviceError: the device is closed.
        """
        tight = None if plan.constrained else self._tight(plan)
        shape = None if tight is None else self._choose(tight)
        if shape is None:
            return None
        staging = self._take_staging()
        point = self._launch(plan, shape, staging)
        places = None
        sampled: Sequence[int] = range(plan.num_rows)
        if shape.tokens:
            sampled = np.flatnonzero(plan.samples).tolist()
            places = places_of(plan, shape, sampled)
        output = GraphOutput(plan, shape, sampled, places, [staging], self._sampler, self._idle)
        return DeviceFuture(point, output)

    def begin(self, plan: StepPlan) -> DeviceFuture[BegunGraph] | None:
        """Launch the forward of a step whose rows are sampled when their masks are there.

        None: it must run eagerly.

        Raises:
            DeviceError: the device is closed.
        """
        tight = self._tight(plan)
        if tight is None:
            return None
        forward = tight._replace(features=SamplerFeature(0), top=0, samples=False)
        chosen = self._choose(forward)
        rows = at_least(self._sizes.sample, (chosen or forward).rows)
        masks = at_least(self._sizes.sample, len(plan.constrained))
        if rows is None or masks is None:
            return None
        sample = self._choose(SampleShape(rows, masks, tight.features, tight.top))
        if chosen is None or sample is None:
            return None
        staging = self._take_staging()
        point = self._launch(plan, chosen, staging)
        return DeviceFuture(point, BegunGraph(plan, chosen, sample, staging))

    def finish(
        self, begun: BegunGraph, rows: Sequence[int], bitmask: npt.NDArray[np.int32]
    ) -> DeviceFuture[StepOutput]:
        """Sample a begun step; constrained rows that are not in `rows` are left unsampled.

        Raises:
            DeviceError: the device is closed.
        """
        plan, shape, staging = begun.plan, begun.sample, self._take_staging()
        sampled = pack_sample(
            plan,
            begun.forward,
            shape,
            staging.packed,
            vocab_size=self._sampler.table.vocab_size,
            mask_rows=rows,
            bitmask=bitmask,
        )
        values = staging.packed_address, staging.result_address
        point = self._graphs[shape].launch(staging, begun.staging, values=values)
        places = places_of(plan, begun.forward, sampled)
        used = [staging, begun.staging]
        output = GraphOutput(plan, shape, sampled, places, used, self._sampler, self._idle)
        return DeviceFuture(point, output)

    def _take_staging(self) -> Staging:
        return self._idle.pop() if self._idle else self._make_staging()

    def _launch(self, plan: StepPlan, shape: StepShape, staging: Staging) -> HostCompletion:
        if shape.tokens:
            slots, reals, ints = self._sampler.admit_packed(plan.slot_inits)
            self._packer.pack(plan, shape, staging.packed, init_slots=slots, reals=reals, ints=ints)
        else:
            pack_decode(plan, shape, staging.packed)
        values = staging.packed_address, staging.result_address
        return self._graphs[shape].launch(staging, values=values)

    def _choose(self, tight: S) -> S | None:
        """The graph for work whose tightest shape is given; None: there is none yet."""
        if tight not in self._chosen:
            kind = type(tight)
            fitting = [s for s in list(self._graphs) if isinstance(s, kind) and s.covers(tight)]
            self._chosen[tight] = min(fitting, key=lambda s: s.cost, default=None)
        chosen = cast("S | None", self._chosen[tight])
        if tight not in self._refused and (chosen is None or not chosen.nearly(tight)):
            self._wanted[tight] = None
        return chosen

    def _tight(self, plan: StepPlan) -> StepShape | None:
        """The tightest shape that can do this step, captured or not."""
        if plan.prompt_logprob_rows or plan.forced:
            return None
        chunks, tokens = plan.num_rows - plan.num_decode, len(plan.prefill_token_ids)
        if chunks > self._sizes.most_chunks:
            return None
        features, top = self._sampling(plan)
        features |= self._sizes.least
        if features & SamplerFeature.EXTRAS or top is None:
            return None
        blocks = at_least(self._sizes.widths, plan.block_tables.shape[1])
        sizes = self._sizes.riding if chunks else self._sizes.decode
        decode = at_least(sizes, plan.num_decode)
        if decode is None:
            return None
        # A step's tokens lie end to end, but its decode rows need room for as many as they may be.
        total = max(plan.num_decode + tokens, decode)
        size = at_least(self._sizes.chunks, total) if chunks else 0
        if blocks is None or size is None:
            return None
        if chunks:
            return StepShape(decode, size, self._sizes.most_chunks, blocks, features | DRAWS, top)
        return StepShape(decode, 0, 0, blocks, features, top)

    def _sampling(self, plan: StepPlan) -> tuple[SamplerFeature, int | None]:
        """What the rows' sampling needs; None: more log-probabilities than any graph gives."""
        slots = plan.slots
        if plan.slot_inits:
            # What is known of these slots is about their last owners.
            slots = slots[np.isin(slots, [init.slot for init in plan.slot_inits], invert=True)]
        features = self._sampler.features(slots)
        for init in plan.slot_inits:
            wanted = self._sampler.features_of(init.request)
            if wanted & SamplerFeature.PENALTIES:
                # Its counts begin with its prompt: work for the eager way.
                wanted |= SamplerFeature.EXTRAS
            features |= wanted
        if features & SamplerFeature.RANDOM:
            features |= DRAWS
        if not features & SamplerFeature.LOGPROBS:
            return features, 0
        most = int(self._sampler.top_logprobs(slots).max(initial=0))
        asked = [init.request.params.logprobs or 0 for init in plan.slot_inits]
        return features, at_least(list(TOP_COUNTS), max(most, *asked, 0))


class BegunGraph(NamedTuple):
    """A step whose forward is launched and whose sample is not."""

    plan: StepPlan
    forward: StepShape
    sample: SampleShape
    staging: Staging


class GraphOutput:
    """A replayed step's tokens on their way to pinned memory.

    Args:
        plan: the step.
        shape: of the graph that samples.
        sampled: the plan rows that it samples.
        places: where they are in its result; None: at their own numbers.
        used: pinned memory, the result's first; it is `idle` again when the result was read.
        sampler: knows the rows' requests.
    """

    def __init__(
        self,
        plan: StepPlan,
        shape: Shape,
        sampled: Sequence[int],
        places: Sequence[int] | None,
        used: Sequence[Staging],
        sampler: Sampler,
        idle: list[Staging],
    ) -> None:
        self._plan = plan
        self._shape = shape
        self._sampled = sampled
        self._places = places
        self._used = used
        # As they are now: the slots may have new owners when the step is done.
        self._request_ids = sampler.request_ids(plan.slots)
        wanting = shape.features & SamplerFeature.LOGPROBS
        self._tops = sampler.wanted_logprobs(plan.slots) if wanting else {}
        self._idle = idle

    def to_host(self) -> StepResult:
        """The result, once the step's completion has fired. Called once."""
        plan, words = self._plan, self._used[0].result
        sampled, places = self._sampled, self._places
        if places is None:
            places = sampled
            tokens = words[: len(sampled)].tolist()
        else:
            tokens = words[list(places)].tolist()
        errors: dict[int, Exception] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        if self._tops or min(tokens, default=0) < 0:
            for row, place, token in zip(sampled, places, tokens, strict=True):
                if token < 0:
                    errors[row] = no_token(self._request_ids[row])
                elif row in self._tops:
                    logprobs[row] = self._logprobs(words, place, token, self._tops[row])
            tokens = [max(token, 0) for token in tokens]
        self._idle.extend(self._used)
        late = set(plan.constrained) - set(sampled) if plan.constrained else set()
        if late:
            found = dict(zip(sampled, tokens, strict=True))
            tokens = [found.get(row, 0) for row in np.flatnonzero(plan.samples).tolist()]
        return StepResult(
            step_id=plan.step_id,
            token_ids=tokens,
            logprobs=logprobs,
            errors=errors,
            unsampled=late,
        )

    def _logprobs(
        self, words: npt.NDArray[np.int32], place: int, token: int, top: int
    ) -> TokenLogprobs:
        at, real = ResultLayout.of(self._shape), words.view(np.float32)
        ids = at.top_ids + place * self._shape.top
        values = at.top_logprobs + place * self._shape.top
        top_ids = words[ids : ids + top].tolist()
        return TokenLogprobs(
            token_id=token,
            logprob=float(real[at.logprobs + place]),
            rank=int(words[at.ranks + place]),
            top=tuple(zip(top_ids, real[values : values + top].tolist(), strict=True)),
        )
