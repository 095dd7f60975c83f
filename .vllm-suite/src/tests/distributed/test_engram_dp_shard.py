# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engram tables shared by co-located DP replicas.

Four GPUs on one node split the hash heads four ways, whether as DEP
(TP1 x DP4, the single-node MoE layout) or TP2 x DP2. A lookup only returns
the right rows if the ids of every replica are gathered, each rank looks up
its own heads, and each replica trades those tokens back for the heads its
peers own.

With shared host storage, DP replicas instead map the same TP slice and
prefetch only their own tokens without DP gathers.
"""

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp

from vllm.config import (
    EngramConfig,
    VllmConfig,
    get_current_vllm_config_or_none,
    set_current_vllm_config,
)
from vllm.config.load import LoadConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.distributed import cleanup_dist_env_and_memory, parallel_state
from vllm.distributed.parallel_state import (
    get_engram_dp_group,
    get_engram_dp_size,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
    dequant_mxfp8_to_bf16,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    convert_swizzled_to_linear,
)
from vllm.models.deepseek_v41.common import engram as engram_ops
from vllm.models.deepseek_v41.common.engram import (
    Engram,
    EngramBatch,
    EngramLayout,
    ParallelEngramEmbedding,
    engram_head_shard_rank,
    gather_engram_hashes,
)
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_open_port
from vllm.utils.system_utils import update_environment_variables

WORLD_SIZE = 4
DIM, BLOCK = 64, 32
# Prime-sized buckets, as the model's layout builds them.
HEAD_SIZES = (97, 101, 103, 107, 109, 113, 127, 131)


def _token_counts(dp_size: int) -> tuple[tuple[int, ...], ...]:
    """Even loads, then uneven ones with an idle replica to pad around."""
    return ((8,) * dp_size, (7, 0, 5, 1)[:dp_size], (7,) * dp_size)


def _full_table(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The unsharded table, identical on every rank."""
    torch.manual_seed(0)
    weight = (torch.randn(rows, DIM) * 4).to(torch.float8_e4m3fn)
    scale_inv = torch.randint(120, 134, (rows, DIM // BLOCK), dtype=torch.uint8)
    return weight, scale_inv


def _make_ids(head_sizes: tuple[int, ...], num_tokens: int, seed: int) -> torch.Tensor:
    """Ids of each head, drawn from that head's own bucket range."""
    torch.manual_seed(seed)
    offset = 0
    columns = []
    for size in head_sizes:
        columns.append(torch.randint(offset, offset + size, (num_tokens, 1)))
        offset += size
    return torch.cat(columns, dim=1).to(torch.int32).cuda()


def _reference(weight, scale_inv, ids) -> torch.Tensor:
    """Dequantized lookup against the whole table."""
    valid = ids >= 0
    safe_ids = ids.clamp_min(0).long()
    values = torch.nn.functional.embedding(safe_ids, weight).float()
    scales = torch.nn.functional.embedding(safe_ids, scale_inv)
    scales = (scales.to(torch.int32) << 23).view(torch.float32)
    values = values.unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)
    return values.flatten(-2).to(torch.bfloat16).masked_fill(~valid.unsqueeze(-1), 0)


@pytest.mark.parametrize(
    "architecture,options,tp_size,edp_ranks,etp_ranks",
    [
        ("DeepseekV41ForCausalLM", {}, 2, [0, 2], [0, 1]),
        # GPU tables span every DP rank only with embedding_across_dp.
        ("DeepseekV41ForCausalLM", {"cpu_offload": False}, 1, [0, 1], [0]),
        (
            "DeepseekV41ForCausalLM",
            {"cpu_offload": False, "embedding_across_dp": True},
            1,
            [0, 1, 2, 3],
            [0, 1, 2, 3],
        ),
        ("Qwen4ExpForCausalLM", {}, 2, None, [0, 1]),
        (
            "Qwen4ExpForCausalLM",
            {"embedding_across_dp": True},
            2,
            None,
            [0, 1, 2, 3],
        ),
        ("Qwen4ExpForConditionalGeneration", {}, 2, None, [0, 1]),
    ],
)
def test_engram_group_creation_honors_model_and_options(
    monkeypatch, architecture, options, tp_size, edp_ranks, etp_ranks
):
    config = SimpleNamespace(
        model_config=SimpleNamespace(architecture=architecture, is_moe=False),
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp_size,
            data_parallel_size=4 // tp_size,
            distributed_executor_backend="mp",
        ),
        engram_config=EngramConfig(**options),
    )
    for name in (
        "_TP",
        "_ETP",
        "_ENGRAM_DP",
        "_DCP",
        "_PCP",
        "_PP",
        "_DP",
        "_EP",
        "_EPLB",
    ):
        monkeypatch.setattr(parallel_state, name, None)
    monkeypatch.setattr(parallel_state, "_WORLD", SimpleNamespace(local_rank=0))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    # Two ranks per node.
    monkeypatch.setattr(parallel_state, "_engram_dp_shard_size", lambda *args: 2)

    def make_group(group_ranks, *args, **kwargs):
        ranks = next(ranks for ranks in group_ranks if 0 in ranks)
        return SimpleNamespace(ranks=ranks, rank_in_group=0, world_size=len(ranks))

    monkeypatch.setattr(parallel_state, "init_model_parallel_group", make_group)
    with set_current_vllm_config(config):
        initialize_model_parallel(tensor_model_parallel_size=tp_size, backend="nccl")
    group = get_engram_dp_group()
    assert (group.ranks if group is not None else None) == edp_ranks
    assert parallel_state.get_etp_group().ranks == etp_ranks
    # A group with the DP group's ranks reuses its communicators.
    full_dp = edp_ranks is not None and len(edp_ranks) == 4 // tp_size
    assert (group is parallel_state._DP) == full_dp


def _worker(rank: int, tp_size: int, port: int) -> None:
    torch.accelerator.set_device_index(rank)
    update_environment_variables(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(WORLD_SIZE),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
    )
    dp_size = WORLD_SIZE // tp_size
    dp_rank, tp_rank = divmod(rank, tp_size)
    vllm_config = VllmConfig(
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp_size,
            data_parallel_size=dp_size,
            data_parallel_rank=dp_rank,
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=8,
            is_encoder_decoder=False,
            max_num_batched_tokens=8,
            max_num_seqs=8,
        ),
    )
    # Supply the resolved Engram settings without constructing a full model.
    vllm_config.engram_config = EngramConfig()
    vllm_config.model_config = SimpleNamespace(
        architecture="DeepseekV41ForCausalLM",
        is_moe=True,
        sleep_mode_offload_cudagraph=False,
    )
    try:
        init_distributed_environment()
        with set_current_vllm_config(vllm_config):
            initialize_model_parallel(tensor_model_parallel_size=tp_size)
        assert get_engram_dp_size() == dp_size
        assert get_engram_dp_group().ranks == [
            tp_rank + replica * tp_size for replica in range(dp_size)
        ]
        assert engram_head_shard_rank() == tp_rank * dp_size + dp_rank

        for failure in ("create", "open", "mmap", "register", "pinned", None):
            _check_shared_storage_lifetime_and_failures(failure)

        # GPU peer reads need NVLink P2P, which CI's L4s lack.
        p2p = current_platform.is_fully_connected(
            [
                current_platform.visible_device_id_to_physical_device_id(i)
                for i in range(WORLD_SIZE)
            ]
        )
        # Reuse the processes and communication groups across storage modes.
        for (cpu_offload, dp_shared_memory), n_heads, sequence_parallel in product(
            [(False, False), (True, False), (True, True)],
            [8, 7],
            [False, True] if tp_size > 1 else [False],
        ):
            _check_table(
                vllm_config,
                cpu_offload,
                dp_shared_memory,
                n_heads,
                sequence_parallel,
                p2p,
            )
        if tp_size == 1 and p2p:
            # Without NVLink P2P, GPU tables keep the DP collectives.
            _check_table(vllm_config, False, False, 8, False, p2p=False)
        if tp_size == 1:
            _check_fp8_batch(vllm_config)
    finally:
        cleanup_dist_env_and_memory()


def _check_fp8_batch(vllm_config):
    """MXFP8 staging matches the tables across peer/all-to-all slots, idle
    replicas and graph replays."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    dp_rank = vllm_config.parallel_config.data_parallel_rank
    layers = []
    for index in range(2):
        weight, scale = _full_table(sum(HEAD_SIZES))
        weight = (weight.float() * (1 - 2 * index)).to(torch.float8_e4m3fn)
        table = ParallelEngramEmbedding(
            sum(HEAD_SIZES), DIM, HEAD_SIZES, cpu_offload=True
        )
        table.weight.weight_loader(table.weight, weight)
        table.weight_scale_inv.weight_loader(table.weight_scale_inv, scale)
        staged = torch.empty(0, device="cuda")
        reference = (weight.cuda(), scale.cuda())
        layers.append(SimpleNamespace(embed_tokens=table, staged_rows=staged))
        layers[-1].layer_hash_index, layers[-1].reference = index, reference
    batch = EngramBatch(layers, 257)

    def check(ids):
        tokens = ids.shape[0]
        for layer in layers:
            x = batch.wkv_input(layer, tokens)
            sf = convert_swizzled_to_linear(x.scale, tokens, x.data.shape[1], BLOCK)
            actual = dequant_mxfp8_to_bf16(x.data, sf).unflatten(-1, (-1, DIM))
            weight, scale = layer.reference
            expected = _reference(weight, scale, ids[:, layer.layer_hash_index])
            torch.testing.assert_close(actual, expected, atol=0, rtol=0)

    for counts in ((7, 0, 5, 1), (127,) * 4, (128,) * 4, (257, 0, 129, 1)):
        tokens = counts[dp_rank]
        seed = 700 + 10 * dp_rank
        ids = torch.stack([_make_ids(HEAD_SIZES, tokens, seed + i) for i in (0, 1)], 1)
        with set_forward_context(
            None,
            vllm_config,
            num_tokens=tokens,
            num_tokens_across_dp=torch.tensor(counts, dtype=torch.int32),
        ):
            batch.prepare_embeddings(ids)
            check(ids)
            for capture in ("full", "breakable") if len(set(counts)) == 1 else ():
                warmup = torch.cuda.Stream()
                warmup.wait_stream(torch.cuda.current_stream())
                if capture == "full":
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=warmup):
                        batch.prepare_embeddings(ids)
                else:
                    graph = BreakableCUDAGraphCapture()
                    with torch.cuda.stream(warmup), graph:
                        batch.prepare_embeddings(ids)
                torch.cuda.current_stream().wait_stream(warmup)
                for step in (2, 3):
                    replay_ids = _make_ids(HEAD_SIZES, tokens, seed + step)
                    ids.copy_(torch.stack([replay_ids] * 2, 1))
                    graph.replay()
                    check(ids)
                del graph


def _check_shared_storage_lifetime_and_failures(failure):
    """One peer's failure must roll back every mapping/registration, without hangs."""
    import gc
    import weakref

    group = get_engram_dp_group()
    runtime = torch.cuda.cudart()
    make_file = engram_ops.tempfile.NamedTemporaryFile
    map_file = engram_ops.mmap.mmap
    paths, mappings, registrations, unregistrations = [], [], [], []
    failed_rank = 0 if failure == "create" else 1

    def fail():
        raise OSError(f"injected {failure} failure")

    def temporary_file(*args, **kwargs):
        if failure == "create":
            fail()
        file = make_file(*args, **kwargs)
        paths.append(Path(file.name))
        return file

    def open_file(*args, **kwargs):
        if failure == "open" and group.rank_in_group == failed_rank:
            fail()
        return open(*args, **kwargs)

    def mapping(*args, **kwargs):
        if failure == "mmap" and group.rank_in_group == failed_rank:
            fail()
        result = map_file(*args, **kwargs)
        mappings.append(weakref.ref(result))
        return result

    def register(pointer, size, flags):
        if failure == "register" and group.rank_in_group == failed_rank:
            return SimpleNamespace(value=1)
        result = runtime.cudaHostRegister(pointer, size, flags)
        assert result.value == 0
        registrations.append(pointer)
        return result

    def unregister(pointer):
        unregistrations.append(pointer)
        result = runtime.cudaHostUnregister(pointer)
        assert result.value == 0
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engram_ops,
            "tempfile",
            SimpleNamespace(NamedTemporaryFile=temporary_file),
        )
        patch.setattr(engram_ops, "open", open_file, raising=False)
        patch.setattr(
            engram_ops,
            "mmap",
            SimpleNamespace(mmap=mapping, MAP_SHARED=engram_ops.mmap.MAP_SHARED),
        )
        patch.setattr(
            torch.cuda,
            "cudart",
            lambda: SimpleNamespace(
                cudaHostRegister=register,
                cudaHostUnregister=unregister,
            ),
        )
        if failure == "pinned" and group.rank_in_group == failed_rank:
            patch.setattr(torch.Tensor, "is_pinned", lambda self: False)
        if failure is not None:
            stage = "cudaHostRegister" if failure in ("register", "pinned") else failure
            with pytest.raises(RuntimeError, match=f"EDP rank {failed_rank}.*{stage}"):
                engram_ops.DPSharedEngramStorage(128, DIM, BLOCK, group)
            assert unregistrations == registrations
        else:
            storage = engram_ops.DPSharedEngramStorage(128, DIM, BLOCK, group)
            assert all(not path.exists() for path in paths)
            storage_ref = weakref.ref(storage)
            parameter = torch.nn.Parameter(storage.weight, requires_grad=False)
            views = storage.get_views(parameter, storage.weight_scale_inv)
            del storage
            gc.collect()
            assert storage_ref() is None
            assert not unregistrations
            del parameter
            gc.collect()
            assert not unregistrations  # UVA views still retain the CPU allocation.
            del views
        gc.collect()
        assert unregistrations == registrations
        for ref in mappings:
            mapped = ref()
            assert mapped is None or mapped.closed
        assert all(not path.exists() for path in paths)


def _check_table(
    vllm_config, cpu_offload, dp_shared_memory, n_heads, sequence_parallel, p2p
):
    parallel = vllm_config.parallel_config
    dp_size, tp_size = parallel.data_parallel_size, parallel.tensor_parallel_size
    dp_rank = parallel.data_parallel_rank
    tp_rank = engram_ops.get_tensor_model_parallel_rank()
    multithread = (
        dp_shared_memory and n_heads == 7 and sequence_parallel == (tp_size > 1)
    )
    load_config = (
        LoadConfig(
            load_format="safetensors",
            use_tqdm_on_load=False,
            model_loader_extra_config={
                "enable_multithread_load": True,
                "num_threads": 2,
            },
        )
        if multithread
        else vllm_config.load_config
    )
    with pytest.MonkeyPatch.context() as m:
        head_sizes = HEAD_SIZES[:n_heads]
        rows = sum(head_sizes)
        config = SimpleNamespace(
            hidden_size=DIM,
            hc_mult=2,
            rms_norm_eps=1e-6,
            engram_layer_ids=[0],
            engram_num_embeddings=[rows],
            engram_max_ngram_size=2,
            engram_n_heads=n_heads,
            engram_head_dim=DIM,
            engram_compressed_vocab_size=32,
            engram_pad_token_id=0,
            engram_vocab_size=HEAD_SIZES[0],
        )
        with set_current_vllm_config(vllm_config):
            weight, scale_inv = _full_table(rows)
            layout = EngramLayout(config)
            # Stub configuration inputs, not Engram's initialization or execution.
            component_config = SimpleNamespace(
                engram_config=EngramConfig(
                    cpu_offload=cpu_offload,
                    dp_shared_memory=dp_shared_memory,
                ),
                scheduler_config=vllm_config.scheduler_config,
                load_config=load_config,
            )
            with m.context() as init_patch, torch.device("cuda"):
                init_patch.setattr(
                    engram_ops, "get_current_vllm_config", lambda: component_config
                )
                init_patch.setattr(
                    engram_ops.current_platform, "is_fully_connected", lambda _: p2p
                )
                engram = Engram(
                    config,
                    quant_config=None,
                    layout=layout,
                    layer_hash_index=0,
                    use_sequence_parallel=sequence_parallel,
                    prefix="model.layers.0.engram",
                )
            layer = engram.embed_tokens
            if multithread:
                _load_shared_multithread(layer, weight, scale_inv, load_config)
            else:
                # Only the leader has valid checkpoint payload in shared mode.
                loader_weight = weight if not dp_shared_memory or dp_rank == 0 else None
                loader_scale = (
                    scale_inv if not dp_shared_memory or dp_rank == 0 else None
                )
                layer.weight.weight_loader(layer.weight, loader_weight)
                layer.weight_scale_inv.weight_loader(
                    layer.weight_scale_inv, loader_scale
                )
            # Shared host tables and GPU peer reads look up only local tokens.
            local = layer.dp_size == 1
            assert (layer.peer_rows > 0) == (not cpu_offload and tp_size == 1 and p2p)
            if dp_shared_memory:
                assert layer.dp_size == 1
                assert layer.head_start == tp_rank * layer.part_n_hash_cols
                assert layer.weight.is_pinned() and layer.weight_scale_inv.is_pinned()
            if local:

                def unexpected_collective(*args, **kwargs):
                    raise AssertionError("local lookups must not use DP collectives")

                m.setattr(get_engram_dp_group(), "all_gather", unexpected_collective)

            token_counts = _token_counts(dp_size)

        # Production forward runs after the construction-time config has exited.
        assert get_current_vllm_config_or_none() is None
        for batch_idx, counts in enumerate(token_counts):
            num_tokens = counts[dp_rank]
            # Ids differ per replica but must agree across its TP ranks.
            ids = _make_ids(head_sizes, num_tokens, seed=100 + dp_rank)
            if batch_idx == 2 and dp_rank == 1:
                ids.fill_(engram_ops.DEAD_ID)
            with set_forward_context(
                None,
                vllm_config,
                num_tokens=num_tokens,
                num_tokens_across_dp=torch.tensor(counts, dtype=torch.int32),
            ):
                gathered = gather_engram_hashes(ids, dp_shared_memory=local)
                expected_tokens = num_tokens if local else max(counts) * dp_size
                assert gathered.shape[0] == expected_tokens
                engram.prepare_embeddings(gathered)
                looked_up = engram.embed(ids)
                standalone = layer(ids)
            expected = _reference(weight.cuda(), scale_inv.cuda(), ids)
            torch.testing.assert_close(standalone, expected, atol=0, rtol=0)
            if sequence_parallel:
                # SP hands back only this rank's token shard, zero-padded.
                chunk = -(-num_tokens // tp_size)
                expected = torch.nn.functional.pad(
                    expected, (0, 0, 0, 0, 0, chunk * tp_size - num_tokens)
                )
                expected = expected[tp_rank * chunk : (tp_rank + 1) * chunk]
            torch.testing.assert_close(looked_up, expected, atol=0, rtol=0)

        if (
            cpu_offload
            and n_heads == 7
            and not sequence_parallel
            and (not dp_shared_memory or tp_size == 1)
        ):
            _check_dummy_hash_model_forward(
                vllm_config,
                engram,
                head_sizes,
                weight,
                scale_inv,
                dp_shared_memory,
            )

        replay = n_heads == 7 and (
            (dp_shared_memory and sequence_parallel == (tp_size > 1))
            or (
                cpu_offload
                and not dp_shared_memory
                and sequence_parallel == (tp_size > 1)
            )
            or layer.peer_rows > 0
        )
        if replay:
            # Peer reads have no eager breaks to count.
            captures = ("full",) if layer.peer_rows else ("full", "breakable")
            for capture in captures:
                _check_prefetch_replay(
                    engram,
                    head_sizes,
                    weight,
                    scale_inv,
                    local,
                    capture,
                )
        if dp_shared_memory and n_heads == 7 and sequence_parallel == (tp_size > 1):
            with m.context() as storage_patch:
                storage_patch.setattr(layer.weight, "data", layer.weight.data.clone())
                with pytest.raises(RuntimeError, match="storage must not be replaced"):
                    layer(ids)


def _check_dummy_hash_model_forward(
    vllm_config, engram, head_sizes, weight, scales, dp_shared_memory
):
    """A metadata-less replica joins DP sharding but skips a shared lookup."""
    from vllm.models.deepseek_v41.common.engram import NgramHashState

    if current_platform.is_rocm():
        from vllm.models.deepseek_v41.amd import model as model_ops
    else:
        from vllm.models.deepseek_v41.nvidia import model as model_ops

    dp_rank = vllm_config.parallel_config.data_parallel_rank
    if dp_shared_memory and dp_rank != 1:
        return
    tokens = 4
    ids = _make_ids(head_sizes, tokens, seed=300 + dp_rank)
    state = NgramHashState.__new__(NgramHashState)
    torch.nn.Module.__init__(state)
    state.multipliers = torch.empty(1, 2, dtype=torch.int64, device="cuda")
    state.primes = torch.empty(1, 1, len(head_sizes), dtype=torch.int64, device="cuda")
    state.ensure_cache = lambda: True
    # Hash arithmetic is covered separately; keep the real model's branch and
    # NgramHashState.dummy_hashes, plus real preparation/lookup collectives.
    state.forward = lambda *args: ids.unsqueeze(1)

    class Decoder(SimpleNamespace):
        # Engram hashes and the mask stay the last positional arguments;
        # **kwargs absorbs the decoder's keyword-only flags.
        def __call__(self, hidden, positions, input_ids, *args, **kwargs):
            hashes, keep = args[-2:]
            if dp_shared_memory and dp_rank == 1:
                assert hashes is None and keep is None
                output = hidden.new_zeros(
                    tokens, len(head_sizes), DIM, dtype=torch.bfloat16
                )
            else:
                assert hashes is not None and keep is not None
                assert bool(keep.all()) == (dp_rank != 1)
                if dp_rank == 1:
                    assert torch.all(hashes == engram_ops.DEAD_ID)
                output = engram.embed(hashes[:, 0])
            # Trailing None is the NVIDIA layer's previous_aux; this stub
            # captures no aux states.
            outputs = (output, hidden, hidden, hidden, hidden, None)
            return outputs[:5] if current_platform.is_rocm() else outputs

    model = model_ops.DeepseekV4Model.__new__(model_ops.DeepseekV4Model)
    torch.nn.Module.__init__(model)
    model.parallel_config = vllm_config.parallel_config
    model.use_native_mega_moe = False
    model.use_mega_moe = False
    model.use_sequence_parallel = False
    model.fuse_mhc_all_reduce = False
    model.engram_batch = None
    model.engram_hash = state
    model.engram_swa_prefix = "swa"
    model.engram_dp_shared_memory = dp_shared_memory
    model.layers = [Decoder(engram=engram)]
    model.start_layer = 0
    model.end_layer = 1
    model.decoder_replay_start = model.end_layer
    model.decoder_replay_layers = None
    model.aux_hidden_state_layers = ()
    model.mhc_post = lambda hidden, *args: hidden
    metadata = (
        None
        if dp_rank == 1
        else {
            "swa": SimpleNamespace(
                query_start_loc=None, slot_mapping=None, block_table=None
            )
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            model_ops,
            "get_pp_group",
            lambda: SimpleNamespace(
                is_first_rank=True,
                is_last_rank=False,
            ),
        )
        patch.setattr(
            model_ops, "mhc_post_tilelang", lambda hidden, *args: hidden, raising=False
        )
        with set_forward_context(
            metadata,
            vllm_config,
            num_tokens=tokens,
            num_tokens_across_dp=torch.full(
                (vllm_config.parallel_config.data_parallel_size,),
                tokens,
                dtype=torch.int32,
            ),
        ):
            output = model(
                torch.arange(tokens, device="cuda"),
                torch.arange(tokens, device="cuda"),
                intermediate_tensors=None,
                inputs_embeds=torch.zeros(tokens, DIM, device="cuda"),
                lookback_token_ids=torch.full((1, 1), -1, device="cuda"),
            )["hidden_states"]
    expected_ids = torch.full_like(ids, engram_ops.DEAD_ID) if dp_rank == 1 else ids
    expected = _reference(weight.cuda(), scales.cuda(), expected_ids)
    torch.testing.assert_close(output, expected, atol=0, rtol=0)


def _load_shared_multithread(layer, weight, scale_inv, load_config):
    """Opposite shard completion orders must leave every shared parameter ready."""
    from safetensors.torch import save_file

    from vllm.model_executor.model_loader import weight_utils
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    tensors = {
        "weight": weight,
        "weight_scale_inv": scale_inv.view(torch.float8_e8m0fnu),
    }
    order = list(tensors)
    if get_engram_dp_group().rank_in_group % 2:
        order.reverse()
    first_loaded = Event()
    original_load = weight_utils.load_file

    def load_file(path, **kwargs):
        if Path(path).stem != order[0]:
            assert first_loaded.wait(timeout=30), "First shared weight load stalled"
        return original_load(path, **kwargs)

    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as m:
        for name, tensor in tensors.items():
            save_file({name: tensor}, str(Path(directory) / f"{name}.safetensors"))
        m.setattr(weight_utils, "load_file", load_file)
        loader = DefaultModelLoader(load_config)
        source = DefaultModelLoader.Source(directory, revision=None)
        loaded = []
        for name, tensor in loader._get_weights_iterator(source):
            param = getattr(layer, name)
            param.weight_loader(param, tensor)
            loaded.append(name)
            first_loaded.set()
        assert loaded == order

    # Check before any further collective could mask incomplete shared writes.
    for name, tensor in tensors.items():
        param = getattr(layer, name)
        expected = tensor.narrow(0, param.engram_vocab_start, param.shape[0])
        torch.testing.assert_close(
            param.view(torch.uint8), expected.view(torch.uint8), atol=0, rtol=0
        )


def _check_prefetch_replay(
    engram, head_sizes, weight, scale_inv, dp_shared_memory, capture
):
    """DP-sharded and shared prefetches must replay with new IDs."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    ids = _make_ids(head_sizes, 8, seed=501)
    tp_rank = engram_ops.get_tensor_model_parallel_rank()
    tokens = 8 // engram.embed_tokens.tp_size if engram.use_sequence_parallel else 8
    output = torch.empty(
        tokens, len(head_sizes), DIM, device="cuda", dtype=torch.bfloat16
    )

    def step():
        gathered = gather_engram_hashes(ids.clone(), dp_shared_memory=dp_shared_memory)
        engram.prepare_embeddings(gathered)
        output.copy_(engram.embed(ids))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engram_ops, "engram_gathered_num_tokens", lambda: 8)
        warmup = torch.cuda.Stream()
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup):
            step()
        if capture == "breakable":
            graph = BreakableCUDAGraphCapture()
            with torch.cuda.stream(warmup), graph:
                step()
            assert graph.num_eager_breaks == 2
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=warmup):
                step()
        torch.cuda.current_stream().wait_stream(warmup)
        for iteration in range(2):
            ids.copy_(_make_ids(head_sizes, 8, seed=600 + iteration))
            graph.replay()
            expected = _reference(weight.cuda(), scale_inv.cuda(), ids)
            if engram.use_sequence_parallel:
                expected = expected[tp_rank * tokens : (tp_rank + 1) * tokens]
            torch.testing.assert_close(output, expected, atol=0, rtol=0)
        torch.accelerator.synchronize()


@pytest.mark.skipif(not current_platform.is_cuda(), reason="CUDA required")
@pytest.mark.parametrize("tp_size", [1, 2])
def test_engram_table_shared_across_dp_replicas(tp_size, monkeypatch):
    """Check all storage modes with one process launch per TP/DP topology."""
    if torch.accelerator.device_count() < WORLD_SIZE:
        pytest.skip(f"Need {WORLD_SIZE} GPUs to run the test.")
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    mp.spawn(_worker, args=(tp_size, get_open_port()), nprocs=WORLD_SIZE)
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize(
    "cpu_offload,dp_size,error",
    [
        (False, 4, "requires cpu_offload=True"),
        (True, 1, "effective Engram DP size is 1"),
    ],
)
def test_engram_dp_shared_memory_runtime_requirements(
    monkeypatch, cpu_offload, dp_size, error
):
    """Report unmet storage/topology requirements before allocating CUDA memory."""
    monkeypatch.setattr(engram_ops, "get_engram_dp_size", lambda: dp_size)
    with pytest.raises(ValueError, match=error):
        ParallelEngramEmbedding(
            sum(HEAD_SIZES),
            DIM,
            HEAD_SIZES,
            cpu_offload=cpu_offload,
            dp_shared_memory=True,
        )


@pytest.mark.parametrize("query_fails", [False, True])
def test_engram_tables_too_large_for_shm_are_not_shared(monkeypatch, query_fails):
    """A /dev/shm that is too small or cannot be queried must fall back, and the
    leader must still broadcast that decision so its peers do not hang."""
    broadcasts = []

    def broadcast(obj):
        broadcasts.append(obj)
        return obj

    def query(*args, **kwargs):
        raise OSError("statvfs failed")

    monkeypatch.setattr(engram_ops, "get_engram_dp_size", lambda: 2)
    monkeypatch.setattr(
        engram_ops,
        "get_engram_dp_group",
        lambda: SimpleNamespace(rank_in_group=0, broadcast_object=broadcast),
    )
    if query_fails:
        monkeypatch.setattr(engram_ops, "check_shm_free_space", query)
    layout = SimpleNamespace(num_embeddings=(1 << 50,), head_dim=DIM)
    assert not engram_ops.can_share_engram_tables(layout)
    assert len(broadcasts) == 1 and broadcasts[0] is not None


@pytest.mark.parametrize(
    "node_ids,dp_size,replica_size,expected",
    [
        ([0] * 4, 1, 4, 1),
        ([0] * 4, 4, 1, 4),
        ([0] * 4, 2, 2, 2),
        ([0] * 8 + [1] * 8, 8, 2, 4),
        ([0] * 6 + [1] * 6, 4, 1, 2),
        ([0] * 3 + [1] * 4, 7, 1, 1),
        ([0] * 8 + [1] * 8 + [2] * 8, 8, 3, 1),
        ([0, 1] * 4, 4, 2, 1),
        ([0] * 3 + [1] * 5, 4, 2, 1),
    ],
)
def test_engram_dp_shard_size_respects_node_boundaries(
    node_ids, dp_size, replica_size, expected, monkeypatch
):
    """Sharing must fall back when replicas or node rank ranges do not align."""
    monkeypatch.setattr(parallel_state, "get_node_count", lambda: len(set(node_ids)))
    monkeypatch.setattr(
        parallel_state, "get_world_group", lambda: SimpleNamespace(cpu_group=None)
    )
    monkeypatch.setattr(
        parallel_state,
        "in_the_same_node_as",
        lambda group, src: [node == node_ids[src] for node in node_ids],
    )
    assert (
        parallel_state._engram_dp_shard_size(len(node_ids), dp_size, replica_size)
        == expected
    )


@pytest.mark.parametrize("num_tokens", [0, 2, 4, 5])
def test_engram_hash_padding_has_no_valid_rows(num_tokens, monkeypatch):
    """Idle/padded slots must not query row zero; oversized batches are rejected."""
    monkeypatch.setattr(engram_ops, "engram_gathered_num_tokens", lambda: 4)
    monkeypatch.setattr(
        engram_ops,
        "get_engram_dp_group",
        lambda: SimpleNamespace(all_gather=lambda ids, dim: torch.cat([ids, ids], dim)),
    )
    ids = torch.full((num_tokens, 2, 3), 17, dtype=torch.int32)
    if num_tokens > 4:
        with pytest.raises(ValueError, match="exceeds the DP token slot"):
            gather_engram_hashes(ids)
        return
    gathered = gather_engram_hashes(ids).reshape(2, 4, 2, 3)
    for replica in gathered:
        torch.testing.assert_close(replica[:num_tokens], ids)
        assert torch.all(replica[num_tokens:] == engram_ops.DEAD_ID)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("uniform", [False, True])
def test_engram_hash_padding_ignores_other_nodes(tp_size, uniform, monkeypatch):
    """Two four-GPU nodes pad only to their own maximum, including TP x DP."""
    group_size = 4 // tp_size
    counts = (
        [4] * (8 // tp_size)
        if uniform
        else [4096] + [2] * (group_size - 1) + [1, 3] + [0] * (group_size - 2)
    )
    monkeypatch.setattr(
        engram_ops,
        "get_forward_context",
        lambda: SimpleNamespace(
            dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(counts))
        ),
    )
    for dp_rank in range(8 // tp_size):
        slot = 4 if uniform else (4096 if dp_rank < group_size else 3)
        ids = torch.full((counts[dp_rank], 2, 3), 17, dtype=torch.int32)
        monkeypatch.setattr(
            engram_ops,
            "get_dp_group",
            lambda rank=dp_rank: SimpleNamespace(rank_in_group=rank),
        )
        monkeypatch.setattr(
            engram_ops,
            "get_engram_dp_group",
            lambda rank=dp_rank: SimpleNamespace(
                rank_in_group=rank % group_size,
                world_size=group_size,
                all_gather=lambda tensor, dim: torch.cat([tensor] * group_size, dim),
            ),
        )
        gathered = gather_engram_hashes(ids)
        expected = ids.new_full((slot, 2, 3), engram_ops.DEAD_ID)
        expected[: ids.shape[0]] = ids
        torch.testing.assert_close(
            gathered, expected.repeat(group_size, 1, 1), msg=f"DP rank {dp_rank}"
        )
