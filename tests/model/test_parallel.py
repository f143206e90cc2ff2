"""Two ranks over gloo give the logits of a single process; splits that cannot be are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.multiprocessing as mp

from aengine.errors import ConfigError
from aengine.model.causal_lm import CausalLM
from aengine.model.config import ModelConfig
from aengine.model.parallel import ParallelConfig, Shard, TorchCollectives
from aengine.model.registry import decoder_spec
from tests.model.checkpoints import random_checkpoint
from tests.model.paged import run

if TYPE_CHECKING:
    from aengine.model.decoder import DecoderSpec

SIZES = {
    "vocab_size": 97,  # odd: the last rank's shard of the vocabulary is smaller
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
CASES: dict[str, dict[str, Any]] = {
    "llama-biases": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "one-kv-head": {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "phi3-merged": {"architectures": ["Phi3ForCausalLM"]},
    "olmo2-norm-over-heads": {"architectures": ["Olmo2ForCausalLM"]},
    "olmo2-one-kv-head": {"architectures": ["Olmo2ForCausalLM"], "num_key_value_heads": 1},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 4},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], **MOE},
}
SEQUENCES = [[5, 96, 31, 7, 0, 48, 49, 50, 2], [95]]
CHUNKS = [4, 1, 2]


def spec(case: str) -> DecoderSpec:
    return decoder_spec(ModelConfig.from_hf({**SIZES, **CASES[case]}), 64)


def model(case: str, weights: dict[str, torch.Tensor] | None, parallel: ParallelConfig) -> CausalLM:
    return CausalLM(
        spec(case),
        weights,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
        parallel=parallel,
    )


def rank_main(rank: int, folder: str) -> None:
    """One rank: all cases, logits to a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    parallel = ParallelConfig(rank=rank, world_size=2, collectives=TorchCollectives())
    weights = torch.load(f"{folder}/weights.pt")
    found = {case: run(model(case, weights[case], parallel), SEQUENCES, CHUNKS) for case in CASES}
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


class Ranks(NamedTuple):
    """What two processes found, and the weights that they had."""

    weights: dict[str, dict[str, torch.Tensor]]
    found: list[dict[str, list[torch.Tensor]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    weights = {case: random_checkpoint(spec(case)) for case in CASES}
    torch.save(weights, folder / "weights.pt")
    mp.spawn(rank_main, args=(str(folder),), nprocs=2)
    return Ranks(weights, [torch.load(folder / f"{rank}.pt") for rank in range(2)])


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(case: str, ranks: Ranks) -> None:
    wanted = run(model(case, ranks.weights[case], ParallelConfig()), SEQUENCES, CHUNKS)
    assert max(logits.std() for logits in wanted) > 0.1  # not trivially equal
    for found in ranks.found:
        for ours, one in zip(found[case], wanted, strict=True):
            assert ours.shape == one.shape
            assert (ours - one).abs().max() < 1e-4


class Alone:
    """Collectives for a rank whose others do not exist; for what needs no forward."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


def at(rank: int, size: int) -> ParallelConfig:
    return ParallelConfig(rank=rank, world_size=size, collectives=Alone())


def test_each_rank_holds_its_share() -> None:
    whole, part = (model("llama-biases", None, place) for place in (ParallelConfig(), at(1, 2)))
    assert whole.num_kv_heads == 2
    assert part.num_kv_heads == 1
    assert part.weight_bytes < 0.55 * whole.weight_bytes


def test_random_weights_are_cut_from_the_same_whole() -> None:
    whole, first, second = (
        model("llama-biases", None, place).embedding_weight
        for place in (ParallelConfig(), at(0, 2), at(1, 2))
    )
    torch.testing.assert_close(torch.cat((first, second)), whole)


def test_shares_of_heads_and_vocabulary() -> None:
    pairs = [Shard(0, 1), Shard(0, 1), Shard(1, 2), Shard(1, 2)]
    assert [at(rank, 4).split_kv_heads(2) for rank in range(4)] == pairs
    rows = [Shard(0, 2), Shard(2, 4), Shard(4, 5), Shard(5, 5)]
    assert [at(rank, 4).split_vocab(5) for rank in range(4)] == rows
    with pytest.raises(ConfigError, match="num_heads=6"):
        at(0, 4).split("num_heads", 6)
    with pytest.raises(ConfigError, match="num_kv_heads=3"):
        at(0, 2).split_kv_heads(3)


@pytest.mark.parametrize("values", [{"rank": 1}, {"rank": -1}, {"world_size": 2}])
def test_impossible_places_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ParallelConfig(**values)
