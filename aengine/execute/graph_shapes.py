"""The shapes that steps are captured in, and where things lie in their packed inputs and results.

A graph does any step that fits into its shape: what is left over is padding. Pure integers.

Shape legend: D decode rows, C chunk rows (prefill), R = D + C rows, T tokens of all rows, B blocks
of a table, K most likely tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from aengine.execute.sampler_state import SamplerFeature

FIRST_BLOCKS = 512
"""Width of the tables that nearly all steps need; a longer context has graphs of its own."""
MOST_CHUNKS = 64
"""Chunk rows of a captured step; a step with more runs eagerly."""
TOP_COUNTS = (0, 5, 20)
"""Most likely tokens that a graph gives log-probabilities of; a request for more runs eagerly."""
DRAWS = SamplerFeature.RANDOM | SamplerFeature.TRUNCATED
"""One graph for both: a row that truncates nothing pays next to nothing."""
NEARLY_DECODE, NEARLY_MIXED = 1.25, 1.07
"""Times a step's tokens that a graph may compute instead of one captured for it: a capture takes
the interpreter for tens of milliseconds, and memory that it asks for waits for the device. More
tokens cost a step of decode rows little, and a step with chunks their full share."""
REALS, INTS = 6, 2
"""64-bit sampling parameters of a slot, as in `SlotTable`."""


class StepShape(NamedTuple):
    """What a graph can do at most.

    `tokens` counts those of decode and chunk rows together, and is at least `decode`. With 0 it is
    a steady decode step, of one token a row.
    """

    decode: int
    tokens: int
    chunks: int
    blocks: int
    features: SamplerFeature
    top: int = 0
    samples: bool = True
    """False: it leaves logits for a `SampleShape`, because the masks of some rows come later."""

    @property
    def rows(self) -> int:
        """Decode and chunk rows."""
        return self.decode + self.chunks

    @property
    def all_tokens(self) -> int:
        """Tokens that the forward computes."""
        return self.tokens or self.decode

    @property
    def cost(self) -> tuple[int, int]:
        """Orders shapes that cover a step by what they cost it."""
        return self.all_tokens, int(self.features)

    def nearly(self, other: StepShape) -> bool:
        """Whether a graph of this shape, which covers the other, wastes too little on its steps to
        be worth a capture beside running ones."""
        most = NEARLY_MIXED if self.tokens else NEARLY_DECODE
        return self.all_tokens <= most * other.all_tokens and self.blocks == other.blocks

    def covers(self, other: StepShape) -> bool:
        """Whether a graph of this shape does the steps of the other (of the same kind)."""
        return (
            (self.tokens > 0) == (other.tokens > 0)
            and self.samples == other.samples
            and self.decode >= other.decode
            and self.tokens >= other.tokens
            and self.blocks >= other.blocks
            and self.top >= other.top
            and not other.features & ~self.features
        )


class SampleShape(NamedTuple):
    """What a graph that only samples can do at most: the rows of logits, some with a mask."""

    rows: int
    masks: int
    features: SamplerFeature
    top: int = 0

    @property
    def cost(self) -> tuple[int, int]:
        """Orders shapes that cover a sample by what they cost it."""
        return self.rows + self.masks, int(self.features)

    def nearly(self, other: SampleShape) -> bool:
        """As that of `StepShape`."""
        return self == other

    def covers(self, other: SampleShape) -> bool:
        """Whether a graph of this shape does the samples of the other."""
        return (
            self.rows >= other.rows
            and self.masks >= other.masks
            and self.top >= other.top
            and not other.features & ~self.features
        )


class ResultLayout(NamedTuple):
    """The packed result, in 32-bit words from its start: R tokens, then if log-probabilities are
    wanted R of them, R ranks, R * K tokens and R * K log-probabilities."""

    logprobs: int
    ranks: int
    top_ids: int
    top_logprobs: int
    words: int

    @classmethod
    def of(cls, shape: StepShape | SampleShape) -> ResultLayout:
        """The layout of a shape's result."""
        rows = shape.rows
        if not shape.features & SamplerFeature.LOGPROBS:
            return cls(rows, rows, rows, rows, rows)
        top = rows * shape.top
        return cls(rows, 2 * rows, 3 * rows, 3 * rows + top, 3 * rows + 2 * top)


class SampleLayout(NamedTuple):
    """The packed input of a sample, in 32-bit words from its start: slots to sample for [R],
    positions of the tokens whose logits these are [R], the row of each mask [M], the masks."""

    positions: int
    mask_rows: int
    masks: int
    words: int

    @classmethod
    def of(cls, shape: SampleShape, vocab_size: int) -> SampleLayout:
        """The layout of a shape's input."""
        rows, mask_words = shape.rows, shape.masks * -(-vocab_size // 32)
        first = 2 * rows + shape.masks
        return cls(rows, 2 * rows, first, first + mask_words)


class MixedLayout(NamedTuple):
    """The packed input of a step with chunks, in 32-bit words from its start.

    Parameters of the slots that are taken in this step come first (64-bit, so at an even place):
    C * `REALS` float64, C * `INTS` int64, then their slots [C]. Rows: slots [R], the slots to
    sample for [R], first tokens [R + 1], context lengths [R], tokens of which logits are wanted
    [R]. Tokens: ids, positions, places in the cache. Tables [R, B] last.
    """

    ints: int
    init_slots: int
    slots: int
    sampled: int
    query_start: int
    context_lens: int
    logit_index: int
    token_ids: int
    positions: int
    slot_mapping: int
    tables: int
    words: int

    @classmethod
    def of(cls, shape: StepShape) -> MixedLayout:
        """The layout of a shape's input."""
        rows, tokens, chunks = shape.rows, shape.tokens, shape.chunks
        sizes = [
            2 * REALS * chunks,
            2 * INTS * chunks,
            chunks,
            *(rows, rows, rows + 1, rows, rows),
            *(tokens, tokens, tokens),
            rows * shape.blocks,
        ]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return cls(*ends)


def largest_shape(*, max_rows: int, max_tokens: int, max_blocks: int) -> StepShape:
    """A shape that needs at least the memory of any other."""
    return StepShape(
        decode=max_rows,
        tokens=max_tokens,
        chunks=min(MOST_CHUNKS, max_rows),
        blocks=max_blocks,
        features=DRAWS | SamplerFeature.PENALTIES | SamplerFeature.LOGPROBS,
        top=TOP_COUNTS[-1],
    )


def largest_sample(largest: StepShape) -> SampleShape:
    """A sample that needs at least the memory of any other."""
    return SampleShape(largest.rows, largest.rows, largest.features, largest.top)


def sample_sizes(max_rows: int) -> list[int]:
    """Row and mask counts of graphs that only sample."""
    return sorted({size for size in (8, 32, 64, 128) if size < max_rows} | {max_rows})


def decode_sizes(max_rows: int) -> list[int]:
    """Decode row counts with graphs: fine where a step is short, coarse where it is long."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32)]
    steps += range(512, max_rows, 128)
    return sorted({size for size in steps if size < max_rows} | {max_rows})


def riding_sizes(max_rows: int) -> list[int]:
    """Decode row counts of graphs with chunks: the chunks' tokens outweigh what padding costs."""
    return sorted({size for size in (16, 64, 256) if size < max_rows} | {max_rows})


def chunk_sizes(max_tokens: int) -> list[int]:
    """Token counts of graphs with chunks: whole tiles of a matrix product, mostly."""
    steps = [32, 64, *range(128, 1024, 64), *range(1024, 2048, 128), *range(2048, max_tokens, 256)]
    return sorted({size for size in steps if size < max_tokens} | {max_tokens})


def coarse_chunk_sizes(max_tokens: int) -> list[int]:
    """The token counts worth having from the start: they cover all at twice the work."""
    sizes = [max_tokens]
    while sizes[-1] > 64:
        sizes.append(-(-sizes[-1] // 2))
    fine = chunk_sizes(max_tokens)
    return sorted({next(size for size in fine if size >= coarse) for coarse in sizes})


def table_widths(max_blocks: int) -> list[int]:
    """Table widths with graphs."""
    return sorted({min(FIRST_BLOCKS, max_blocks), max_blocks})


class LaneWork(NamedTuple):
    """What the steps of a lane may hold."""

    prefill: bool = True
    decode: bool = True
    few: bool = False
    """Few shapes: the lane is one of several for the same work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """The sizes that the graphs of a lane come in, sorted; an empty list: it does no such work.

    Args:
        decode: rows of steady decode steps.
        riding: decode rows of steps with chunks.
        chunks: tokens of steps with chunks.
        most_chunks: chunk rows of these.
        sample: rows and masks of samples.
        widths: blocks of the tables.
        least: features that every graph has: where shapes are few, they do for more steps.
        common: shapes worth having before the first request, largest first, so that the others fit
            into the memory that these took. They cover every usual step.
    """

    decode: list[int]
    riding: list[int]
    chunks: list[int]
    most_chunks: int
    sample: list[int]
    widths: list[int]
    least: SamplerFeature
    common: list[StepShape]

    @classmethod
    def of(cls, work: LaneWork, *, max_rows: int, max_tokens: int, max_blocks: int) -> GraphSizes:
        """The sizes of a lane.

        Args:
            work: what the lane does.
            max_rows: slots of the engine.
            max_tokens: most tokens of a step.
            max_blocks: blocks of the longest context.
        """
        prefill, decode, few = work
        most_chunks = min(MOST_CHUNKS, max_rows)
        widths = table_widths(max_blocks)
        riding = (riding_sizes(max_rows) if decode else [0]) if prefill else []
        mixed = [
            StepShape(rows, tokens, most_chunks, widths[0], DRAWS)
            for tokens in coarse_chunk_sizes(max_tokens)
            for rows in riding
            if rows <= tokens
        ]
        steady = [
            StepShape(rows, 0, 0, widths[0], features)
            for features in ((DRAWS,) if few else (SamplerFeature(0), DRAWS))
            for rows in decode_sizes(max_rows)
            if decode
        ]
        return cls(
            decode=decode_sizes(max_rows) if decode else [],
            riding=riding,
            chunks=chunk_sizes(max_tokens),
            most_chunks=most_chunks,
            sample=sample_sizes(max_rows + most_chunks),
            widths=widths,
            least=DRAWS if few else SamplerFeature(0),
            common=sorted(mixed, reverse=True) + sorted(steady, reverse=True),
        )


def at_least(sizes: list[int], size: int) -> int | None:
    """The smallest of `sizes` (sorted) that holds `size`."""
    return next((each for each in sizes if each >= size), None)
