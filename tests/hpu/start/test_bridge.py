"""The real branch of the bridge over a stub of the plug-in, in a process of its own, and the choice of a card."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.hpu.conftest import Run
from trencadis.backends.hpu import make_backend
from trencadis.backends.hpu.habana_bridge import Bridge, EmulatorHooks
from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection, gaudi_mode_and_env
from trencadis.backends.hpu.start.bridge_loader import open_bridge
from trencadis.core.device.backend import BackendConfig
from trencadis.core.errors import StartupError

ROOT = Path(__file__).resolve().parents[3]

CODE = """
import dataclasses, itertools, os, sys
import numpy as np
import torch
from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection as gaudi_detection
gaudi_detection.find_stack = lambda: gaudi_detection.Stack("1.23.1.25", "2.9.0+git1234", "2.9.0", True)
gaudi_detection.find_machine = lambda environ: gaudi_detection.Machine(1, 1)
from trencadis.backends.hpu.habana_bridge import emulator_hooks
from trencadis.backends.hpu.start import bridge_loader
bridge_loader.drop_wrong_kernels = lambda bridge: bridge  # the stub has tensors of the CPU alone
bridge = bridge_loader.open_bridge(0)
assert emulator_hooks(bridge) is None and bridge.label == "hpu" and bridge.device.type == "hpu"
assert not any(m.startswith("trencadis.backends.hpu.emulator.") for m in sys.modules)
assert bridge.is_lazy() is (sys.argv[1] == "1")
from habana_frameworks.torch import AT_IMPORT
assert AT_IMPORT["PT_HPU_LAZY_MODE"] == sys.argv[1], "settled before the plug-in was imported"
assert sys.modules["habana_frameworks.torch.distributed.hccl"].LAZY_COLLECTIVES
with bridge.metric_localcontext("graph_compilation") as metric:
    assert bridge.compilations(metric) == 0
with bridge.compile_only():
    from habana_frameworks.torch.internal.bridge_config import KNOWN
    assert KNOWN["PT_COMPILE_ONLY_MODE"]
assert bridge.device_name() == "GAUDI2" and bridge.mem_get_info() == (90 << 30, 96 << 30)
bridge = dataclasses.replace(bridge, device=torch.device("cpu"), compile=lambda m, fullgraph=True: m)
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.shape_policy import policy
from trencadis.core.device.backend import BackendConfig, ProgramState
from trencadis.core.buckets import Bucket, Stage
from tests.oracles import gaudi_launches as ops
assert bridge.sdpa_parts is not None and bridge.product is None and bridge.block_adjustment is None
from trencadis.backends.hpu.hpu_settings import HpuSettings
for (stage, dims, lengths), tokens in itertools.product(ops.LAUNCHES.values(), (8192, 8)):
    inputs = ops.step_inputs(lengths, np.random.default_rng(1))
    n = len(inputs.tokens)
    want, _ = ops.reference(inputs)
    backend = HpuBackend(BackendConfig(block_size=ops.BLOCK), policy(""), bridge, HpuSettings(context_slice=tokens))
    layer = ops.AttentionLayer(backend, float("nan"))
    program = backend.program(Bucket(stage, dims), layer)
    program.capture()
    backend.fill(program, inputs)
    program.replay()
    torch.testing.assert_close(layer.out[1 : n + 1], want, rtol=1e-5, atol=1e-5)
    assert program.state is (ProgramState.CAPTURED if bridge.is_lazy() else ProgramState.COMPILED), program.state
    program.release()
    assert program.state is ProgramState.COMPILED
print("fine")
"""


@pytest.mark.parametrize(("lazy", "env"), [("1", {}), ("0", {"PT_HPU_LAZY_MODE": "0"})])
def test_real_branch_over_the_stub(lazy: str, env: dict[str, str], over_stub: Run) -> None:
    done = over_stub(CODE, lazy, **env)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


NUMBERED = """
import json, os, sys
from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection as gaudi_detection
gaudi_detection.find_stack = lambda: gaudi_detection.Stack("1.23.1.25", "2.9.0+git1234", "2.9.0", True)
gaudi_detection.find_machine = lambda environ: gaudi_detection.Machine(8, 8, tuple(range(8)))
from trencadis.backends.hpu.start.bridge_loader import open_bridge
from trencadis.core.errors import StartupError
for card, world, env in json.loads(sys.argv[1]):
    assert not any(name.startswith("habana_frameworks") for name in sys.modules)
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        continue
    os.environ.update(env)
    try:
        open_bridge(card, world=world, named="NAMED" in os.environ)
        from habana_frameworks.torch.hpu import CHOSEN
        print(CHOSEN, os.environ.get("LOCAL_RANK"), flush=True)
    except StartupError as error:
        print(error, flush=True)
    os._exit(0)
"""

OPENED: list[tuple[int, int, dict[str, str], str]] = [
    (1, 2, {}, "[1] None"),
    (1, 2, {"HABANA_VISIBLE_MODULES": "6,3"}, "[3] None"),
    (4, 1, {"LOCAL_RANK": "0", "WORLD_SIZE": "4"}, "[4] 0"),
    (1, 2, {"LOCAL_RANK": "0", "WORLD_SIZE": "4", "HABANA_VISIBLE_MODULES": "6,3"}, "[3] 0"),
    (1, 2, {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, "[1] None"),
    (1, 2, {"HLS_MODULE_ID": "1"}, "[1] None"),
    (0, 1, {"HLS_MODULE_ID": "5"}, "[] None"),
    (0, 1, {}, "[] None"),
    (0, 1, {"HABANA_VISIBLE_MODULES": "6,3"}, "[6] None"),
    (0, 1, {"NAMED": "1"}, "[0] None"),
    (1, 2, {"HLS_MODULE_ID": "0"}, "HLS_MODULE_ID=0 names another card than card 1: unset it"),
    (2, 1, {"HLS_MODULE_ID": "0"}, "HLS_MODULE_ID=0 names another card than card 2: unset it"),
]
"""Card, ranks, variables, and what is said: the opened card and its ``LOCAL_RANK``, or the refusal."""


def test_the_card_that_is_asked_for_is_opened(over_stub: Run) -> None:
    """The plug-in numbers cards by what torchrun, MPI or an earlier opening left in the environment.

    Each case opens its card in a process of its own, forked before the plug-in is imported.
    """
    done = over_stub(NUMBERED, json.dumps([case[:3] for case in OPENED]), HABANA_STUB_CARDS="8")
    said = done.stdout.splitlines()
    assert done.returncode == 0 and len(said) == len(OPENED), done.stderr
    for case, line in zip(OPENED, said, strict=True):
        assert line.startswith(case[3]), (case, line)


@pytest.mark.parametrize(("world", "env", "says"), [
    ("2", {}, "384 None"),
    pytest.param("1", {}, "0 None", marks=pytest.mark.long),
    pytest.param("2", {"WORLD_SIZE": "2"}, "384 2", marks=pytest.mark.long),
])  # fmt: skip
def test_a_card_of_several_ranks_leaves_memory_to_hccl(
    world: str, env: dict[str, str], says: str, over_stub: Run
) -> None:
    """The pool takes all memory but an allowance, which it leaves where ``WORLD_SIZE`` names several ranks."""
    shown = """
        from habana_frameworks.torch.hpu import POOL
        print(POOL["allowance"] >> 20, os.environ.get("WORLD_SIZE"), flush=True)"""
    code = NUMBERED.replace('\n        print(CHOSEN, os.environ.get("LOCAL_RANK"), flush=True)', shown)
    assert "POOL" in code
    case = (1 if world == "2" else 0, int(world), env)
    done = over_stub(code, json.dumps([case]), HABANA_STUB_CARDS="8")
    assert done.stdout.strip() == says, (done.stdout, done.stderr)


def test_an_emulated_card_of_several_ranks_leaves_memory_to_hccl() -> None:
    from trencadis.backends.hpu.emulator.emulated_bridge import bridge
    from trencadis.backends.hpu.emulator.emulated_errors import Refused

    alone, one_of_two = bridge({}), bridge({"WORLD_SIZE": "2"})
    assert alone.mem_get_info()[1] - one_of_two.mem_get_info()[1] == 384 << 20
    with pytest.raises(Refused, match="no memory for HCCL"):
        alone.all_reduce(torch.ones(2).to(alone.device))
    assert open_bridge(0, {"TRENCADIS_HPU_EMULATOR": "1"}, world=2).mem_get_info() == one_of_two.mem_get_info()
    more = bridge({"WORLD_SIZE": "2", "PT_HCCL_MEMORY_ALLOWANCE_MB": "1024"})
    assert alone.mem_get_info()[1] - more.mem_get_info()[1] == 1 << 30


def test_a_group_over_machines_of_one_card_each_leaves_memory_to_hccl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where Ray shows each rank a card of its own."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR_KIND", "meta")  # joins no group
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", f"{tmp_path},false,1")
    alone, one_of_two = (
        make_backend(BackendConfig(block_size=128, world=world, local_rank=0, local_world=1)).memory.total()
        for world in (1, 2)
    )
    assert alone - one_of_two == 384 << 20


def test_cpu_imports_neither_bridge_nor_emulator(over_stub: Run) -> None:
    code = (
        "import sys; from trencadis.core.device.backend import BackendConfig, load\n"
        "load('cpu')(BackendConfig(options={'threads': '1'}))\n"
        "print([m for m in sys.modules if 'habana' in m or 'backends.hpu' in m])"
    )
    done = over_stub(code)
    assert done.stdout == "[]\n", done.stderr


def test_environment_is_settled() -> None:
    assert gaudi_mode_and_env.settle({}, lazy=True) == {
        "PT_HPU_LAZY_MODE": "1", "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true", "PT_HPUGRAPH_DISABLE_TENSOR_CACHE": "0",
        "PT_HPU_WEIGHT_SHARING": "0",
    }  # fmt: skip
    obeyed = gaudi_mode_and_env.settle({"PT_HPU_LAZY_MODE": "0"}, lazy=False)
    assert obeyed == {
        "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true", "PT_HPUGRAPH_DISABLE_TENSOR_CACHE": "0",
        "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE": "0", "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS": "1",
        "PT_HPU_WEIGHT_SHARING": "0", "RUNTIME_SCALE_PATCHING": "1",
    }  # fmt: skip
    assert gaudi_mode_and_env.mode_conflict({"PT_HPU_LAZY_MODE": "1"}, lazy=True) is None
    assert "imported before" in str(gaudi_mode_and_env.mode_conflict({"PT_HPU_LAZY_MODE": "1"}, lazy=False))


HOOKS = re.compile(r"\b(?:EmulatorHooks|EmulatedBridge|emulator_hooks)\b")


def test_only_the_backend_and_the_emulator_see_the_hooks_of_an_emulated_card() -> None:
    assert not {f.name for f in fields(EmulatorHooks)} & {f.name for f in fields(Bridge)}
    folder = ROOT / "backends" / "hpu"
    named = {str(p.relative_to(folder)) for p in folder.rglob("*.py") if HOOKS.search(p.read_text())}
    assert named == {"backend.py", "habana_bridge.py", "emulator/emulated_bridge.py", "start/check_hpu_kernels.py"}


def test_emulator_variables() -> None:
    from trencadis.backends.hpu.emulator.emulated_bridge import bridge

    made = bridge({"TRENCADIS_HPU_EMULATOR_PROFILE": "gaudi3", "TRENCADIS_HPU_EMULATOR_HOST_MEMORY": "2GiB"})
    assert made.mem_get_info()[1] == int(126.5 * (1 << 30)) and made.hooks.backed == 2 << 30 and made.hooks.values
    assert made.label == "hpu (emulated)" and made.device_name() == "Gaudi 3 (emulated)"
    shapes = bridge({"TRENCADIS_HPU_EMULATOR_KIND": "meta", "PT_HPU_LAZY_MODE": "0"})
    assert not shapes.hooks.values and shapes.hooks.backed is None and not shapes.is_lazy()
    for name, value in (("KIND", "fast"), ("PROFILE", "gaudi9"), ("HOST_MEMORY", "much"), ("FAULTS", "oom")):
        with pytest.raises(StartupError, match=value):
            bridge({f"TRENCADIS_HPU_EMULATOR_{name}": value})


def test_a_card_is_found_by_its_vendor(tmp_path: Path) -> None:
    environ = {gaudi_card_and_plugin_detection.ROOT: str(tmp_path)}
    assert gaudi_card_and_plugin_detection.find_machine(environ) == gaudi_card_and_plugin_detection.Machine()
    for number, vendor in enumerate(("0x8086", "0x1da3")):
        folder = tmp_path / "sys/bus/pci/devices" / str(number)
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
    assert gaudi_card_and_plugin_detection.find_machine(environ).cards == 1
