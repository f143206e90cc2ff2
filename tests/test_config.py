"""Settings are checked when they are built, and the message says what would be accepted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aengine.config import EngineConfig, GrammarLimits, KVCacheConfig, SchedulerConfig
from aengine.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be from 1"),
        ({"max_num_seqs": True}, "must be an integer"),
        ({"max_num_batched_tokens": -5}, "max_num_batched_tokens=-5"),
        ({"block_size": 10**9}, "from 1 to 4096"),
        ({"block_size": 1.5}, "must be an integer"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "at least max_num_seqs=64"),
        ({"kv_cache_fraction": 1.5}, "at most 1"),
        ({"kv_cache_fraction": math.nan}, "finite"),
        ({"kv_cache_fraction": 0.5, "kv_cache_memory": 5}, "not both"),
        ({"kv_cache_memory": 0}, "at least 1"),
        ({"device": "tpu"}, "'cpu' or 'cuda"),
        ({"dtype": "int3"}, "int8"),
        ({"loop": "mine"}, "'own' or 'caller'"),
        ({"max_model_len": 1}, "at least 2"),
        ({"shutdown_timeout": math.inf}, "shutdown_timeout"),
        ({"cpu_threads": 0}, "cpu_threads=0"),
        ({"switch_interval": 0.0}, "above 0"),
        ({"max_steps_in_flight": 0}, "from 1"),
        ({"priority_ageing": -1.0}, "above 0"),
        ({"grammar_max_depth": 0}, "grammar_max_depth=0 must be at least 1"),
        ({"grammar_mask_patience": 0}, "above 0"),
        ({"grammar_compile_second": 1}, "did you mean 'grammar_compile_seconds'"),
        ({"max_num_seq": 4}, "did you mean 'max_num_seqs'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options("model", options)
    assert said in str(caught.value)


@pytest.mark.parametrize("model", ["", None, 7, "a\x00b"])
def test_bad_model_names_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(model, {})
    assert "model" in str(caught.value)


def test_flat_options_find_their_part() -> None:
    config = EngineConfig.from_options(
        "m",
        {
            "max_num_seqs": 3,
            "kv_cache_fraction": 0.25,
            "device": "cpu",
            "grammar_compile_seconds": 2,
        },
    )
    assert config.scheduler == SchedulerConfig(max_num_seqs=3)
    assert config.kv_cache == KVCacheConfig(fraction=0.25)
    assert config.grammar == GrammarLimits(compile_seconds=2)
    assert config.device == "cpu"


def test_the_block_size_suits_the_device_unless_it_is_given() -> None:
    assert SchedulerConfig().tokens_per_block == 16
    assert SchedulerConfig().on_gpu().tokens_per_block == 64
    given = SchedulerConfig(block_size=32, max_num_seqs=3)
    assert given.on_gpu() == given
    assert SchedulerConfig(max_num_seqs=3).on_gpu().max_num_seqs == 3
