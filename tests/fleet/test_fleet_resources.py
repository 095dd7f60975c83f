"""What engines of a fleet get, how their counters add up, and that the router's keys are those of the engines."""

from __future__ import annotations

import pytest

from tests.fakes.command_line import from_command_line
from trencadis.core.engine_config import EngineConfig
from trencadis.core.engine_stats import GraphCounters
from trencadis.core.errors import StartupError
from trencadis.core.kv.block_pool import BlockHashChain, BlockPool, EvictionLog, image_key
from trencadis.core.media_spans import MediaSpan
from trencadis.core.process.engine_messages import EngineInfo, EngineStats
from trencadis.core.request import AdapterRef, Request, SamplingParams
from trencadis.core.scheduling.encoder_cache import EncoderCache
from trencadis.server.processes.combined_engine_state import merge_infos, sum_stats
from trencadis.server.processes.multi_engine_client import make_request_cost, read_keys
from trencadis.server.processes.replica_router import PrefixAffinityRouter
from trencadis.server.processes.replica_wait_prediction import RequestCost
from trencadis.server.processes.start_engines import divide_resources


def test_cards_are_dealt_in_order_and_a_cpu_is_divided():
    cards = divide_resources(EngineConfig(device="hpu:1", tensor_parallel_size=2, kv_offloading_size=9.0), 3, {})
    assert [c.device for c in cards] == ["hpu:1", "hpu:3", "hpu:5"]
    assert {c.kv_offloading_size for c in cards} == {3.0} and all(c.report_evictions for c in cards)
    cpus = divide_resources(EngineConfig(device="cpu", kv_cache_memory_bytes=4 << 20), 4, {"OMP_NUM_THREADS": "8"})
    assert [(c.device, c.threads, c.kv_cache_memory_bytes) for c in cpus] == [("cpu", 2, 1 << 20)] * 4
    assert cpus[0].gpu_memory_utilization == pytest.approx(0.9 / 4)
    one = EngineConfig(device="cpu")
    assert divide_resources(one, 1, {}) == [one]


def test_counters_add_up_and_a_client_sees_the_least_longest_request():
    a = EngineStats(
        running=2, prompt_tokens=10, step_tokens=[1], graphs=GraphCounters(1, 0, {"decode": 5}, graph_breaks=2)
    )
    b = EngineStats(running=3, prompt_tokens=7, graphs=GraphCounters(2, 1, {"decode": 2, "prompt": 1}, graph_breaks=3))
    s = sum_stats([a, b])
    assert (s.running, s.prompt_tokens, s.step_tokens) == (5, 17, [])
    assert (s.graphs.lazy_compiles, s.graphs.recompiles, s.graphs.bytes) == (3, 1, {"decode": 7, "prompt": 1})
    assert s.graphs.graph_breaks == 5
    infos = [EngineInfo("cpu", "float32", n, 16, 100, 10, 64) for n in (512, 256)]
    made = merge_infos([None, *infos])
    assert made is not None and (made.max_model_len, made.num_blocks) == (256, 200)
    assert merge_infos([None, None]) is None


@pytest.mark.parametrize("block", [16, 128])
def test_the_router_names_blocks_as_the_engine_that_evicts_them(block):
    request = Request("a", [*range(700)], SamplingParams(), [MediaSpan(20, 30, "ab", (1, 2, 2), 64)], salt="s")
    cost = make_request_cost(request, block)
    assert [p.tokens for p in cost.prefixes] == [128, 256, 384, 512, 640]
    chain = BlockHashChain(request, block)
    chain.extend(request.tokens, 640)
    pool, arena = BlockPool(len(chain.keys)), EncoderCache(40)
    pool.log = arena.log = EvictionLog()
    blocks = pool.take(len(chain.keys))
    assert blocks is not None
    for held, key in zip(blocks, chain.keys, strict=True):
        pool.publish(held, key)
    pool.drop(blocks)
    pool.take(len(chain.keys))
    arena.put("s\0ab", 30, 1)
    arena.unpin("s\0ab", 1)
    arena.put("other", 30, 1)
    gone, images = map(read_keys, pool.log.take())
    assert {p.key for p in cost.prefixes} <= set(gone) and len(gone) == len(chain.keys)
    assert [p.key for p in cost.images] == list(images)
    assert pool.log.take() == (b"", b"")


def test_the_router_names_images_as_the_engine_that_encodes_them_with_an_adapter():
    spans = [MediaSpan(20, 30, "ab", (1, 2, 2), 64)]
    for tower, key in ((True, f"s\0{'f' * 64}\0ab"), (False, "s\0ab")):
        adapter = AdapterRef("f" * 64, "/", "one", tower)
        request = Request("a", [*range(100)], SamplingParams(), spans, salt="s", adapter=adapter)
        assert make_request_cost(request, 16).images[1].key == read_keys(image_key(key))[0]


def test_requests_of_an_adapter_go_where_it_was_used_before():
    """Unless that engine is busier than reading the adapter takes; requests of the base go anywhere."""

    def cost(number: int, digest: str) -> RequestCost:
        adapter = AdapterRef(digest, "/", "name") if digest else None
        return make_request_cost(Request(f"r{number}", [number] * 40, SamplingParams(), adapter=adapter), 16)

    assert cost(1, "ab" * 32).images == cost(2, "ab" * 32).images != cost(1, "cd" * 32).images
    assert cost(1, "").images == []
    router = PrefixAffinityRouter(50, seed=4)
    for i in range(50):
        router.open(i)
    for replica, digest in ((7, "ab" * 32), (31, "cd" * 32)):
        router.on_ended(router.assign(replica, cost(replica, digest), 0.0), 0.0)
    for number in range(100, 110):
        for replica, digest in ((7, "ab" * 32), (31, "cd" * 32)):
            ticket = router.choose(cost(number, digest), 1.0)
            assert ticket is not None and ticket.replica == replica
            router.on_ended(ticket, 1.0)
    chosen = [router.choose(cost(200 + number, ""), 2.0) for number in range(50)]
    assert len({one.replica for one in chosen if one is not None}) > 40
    router.assign(7, RequestCost(40_000), 3.0)
    last = router.choose(cost(300, "ab" * 32), 3.0)
    assert last is not None and last.replica != 7


def test_a_prompt_that_reads_no_prefix_has_none():
    for params in (SamplingParams(prompt_logprobs=1), SamplingParams(skip_reading_prefix_cache=True)):
        assert not make_request_cost(Request("a", [1] * 500, params), 16).prefixes
    assert not make_request_cost(Request("a", [1] * 500, SamplingParams()), 0).prefixes
    assert [p.tokens for p in make_request_cost(Request("a", [1] * 257, SamplingParams()), 128).prefixes] == [128, 256]
    assert [p.tokens for p in make_request_cost(Request("a", [1] * 256, SamplingParams()), 128).prefixes] == [128]


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["-dp", "4"], 4),
        (["--data-parallel-size=2", "--data-parallel-size-local", "2"], 2),
        (["-dp", "4", "--data-parallel-size-local", "2", "--data-parallel-backend", "ray"], 4),
        ([], 1),
    ],
)
def test_the_number_of_engines_is_a_flag(words, size):
    settings = from_command_line(["m", *words], {})
    assert settings.server.data_parallel_size == size


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["-dp", "4", "-dpl", "2"], "is not --data-parallel-size 4"),
        (["-dp", "0"], "must be positive"),
        (["--engine-use-ray"], "--distributed-executor-backend ray"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, reported):
    with pytest.raises(StartupError, match=reported) as caught:
        from_command_line(["m", *words], {})
    assert "\n" not in str(caught.value)
