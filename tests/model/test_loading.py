"""Reading weights: stored types, shards, merging, random weights, and errors that list names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aengine.errors import ModelLoadError
from aengine.model.loading import WeightReader, decoded
from aengine.model.parallel import ParallelConfig, Shard
from aengine.model.tensors import WeightTensor

CPU = torch.device("cpu")
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored(kind: str, values: torch.Tensor, *, shift: int = 0) -> WeightTensor:
    """A tensor as a file has it, `shift` bytes off its natural alignment."""
    rows = values.to(STORED[kind]).contiguous().view(torch.uint8).numpy().reshape(len(values), -1)
    buffer = np.zeros(rows.size + shift, dtype=np.uint8)
    buffer[shift:] = rows.reshape(-1)
    return WeightTensor("w", tuple(values.shape), kind, buffer[shift:].reshape(rows.shape))


def reader(weights: dict[str, object] | None, dtype: torch.dtype = torch.float32) -> WeightReader:
    return WeightReader(weights, dtype=dtype, device=CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("shape", [(6, 10), (8,)])
def test_plain_types_keep_their_bits(kind: str, shift: int, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    got = decoded(stored(kind, values, shift=shift))
    assert got.dtype == STORED[kind]
    assert torch.equal(got, values.to(STORED[kind]))


def test_rows_that_a_file_keeps_in_another_order() -> None:
    values = torch.randn(4, 3)
    tensor = stored("F32", values)
    moved = WeightTensor("w", (4, 3), "F32", tensor.stored, np.array([2, 0, 3, 1]))
    assert torch.equal(decoded(moved), values[[2, 0, 3, 1]])


def test_a_model_never_aliases_what_it_was_given() -> None:
    values = torch.randn(4, 3)
    got = reader({"w": values}).matrix("w", (4, 3))
    values.zero_()
    assert got.abs().max() > 0


def test_norms_stay_in_float32() -> None:
    got = reader({"n": torch.full((4,), 1 / 3)}, torch.bfloat16).norm("n", 4, offset=1.0)
    torch.testing.assert_close(got, torch.full((4,), 4 / 3))


def test_shards_and_merged_projections() -> None:
    q, k = torch.randn(8, 3), torch.randn(4, 3)
    bias_q, bias_k = torch.randn(8), torch.randn(4)
    rows = {"q": (8, Shard(4, 8)), "k": (4, Shard(2, 4))}
    names = {"p.q.weight": q, "p.k.weight": k, "p.q.bias": bias_q, "p.k.bias": bias_k}
    apart = reader(names).merged_linear("p", rows, 3, True)
    whole = {"p.qk.weight": torch.cat((q, k)), "p.qk.bias": torch.cat((bias_q, bias_k))}
    together = reader(whole).merged_linear("p", rows, 3, True, "qk")
    for linear in (apart, together):
        assert torch.equal(linear.weight, torch.cat((q[4:], k[2:])))
        assert linear.bias is not None
        assert torch.equal(linear.bias, torch.cat((bias_q[4:], bias_k[2:])))


def test_the_first_rank_alone_adds_the_bias_of_a_summed_projection() -> None:
    class Alone:
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            return x

    weights = {"o.weight": torch.randn(3, 8), "o.bias": torch.randn(3)}
    first, second = (
        reader(weights).row_parallel(
            "o",
            (3, 8),
            Shard(4 * rank, 4 * rank + 4),
            True,
            ParallelConfig(rank=rank, world_size=2, collectives=Alone()),
        )
        for rank in range(2)
    )
    assert first.bias is not None
    assert second.bias is None
    assert torch.equal(torch.cat((first.weight, second.weight), 1), weights["o.weight"])


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    def make(seed: int, *names: str) -> dict[str, torch.Tensor]:
        made = WeightReader(None, dtype=torch.float32, device=CPU, seed=seed)
        return {name: made.matrix(name, (5, 4)) for name in names}

    forth, back = make(1, "a", "b"), make(1, "b", "a")
    assert all(torch.equal(forth[name], back[name]) for name in ("a", "b"))
    assert not torch.equal(forth["a"], forth["b"])
    assert not torch.equal(forth["a"], make(2, "a")["a"])


def test_every_problem_is_listed_at_once() -> None:
    weights = {"left": torch.zeros(1), "odd": torch.zeros(2, 3), "x.rotary_emb.inv_freq": None}
    r = reader(weights)
    r.matrix("gone", (2, 2))
    r.matrix("odd", (3, 2))
    r.ignore("never.there")
    with pytest.raises(ModelLoadError) as caught:
        r.finish()
    said = str(caught.value)
    assert "missing: gone" in said
    assert "misshapen: odd is [2, 3] instead of [3, 2]" in said
    assert said.endswith("unexpected: left")


def test_many_names_are_counted() -> None:
    with pytest.raises(ModelLoadError, match="and 8 more"):
        reader({str(index): torch.zeros(1) for index in range(20)}).finish()
