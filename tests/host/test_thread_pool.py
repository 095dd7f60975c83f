"""The threads of the CPU's kernels: equal bits for any number, no wait for one that is put aside, which is left out."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import kernel_kinds
from tests.host.test_decode_attention import decoding
from tests.ops.test_many_queries import prompts
from tests.ops.test_rotary import make_parts
from trencadis.backends.cpu.backend import torch_is_idle
from trencadis.backends.cpu.native import dense_linear, kernel_threads, threads_on_busy_cpus, weight_packing
from trencadis.backends.cpu.native.attention_and_row_kernels import rotate
from trencadis.backends.cpu.native.kernel_choice_by_cpu import VARIABLE
from trencadis.backends.cpu.native.threads_on_busy_cpus import ThreadUse, run_delay, stolen_time
from trencadis.backends.cpu.ops import CpuOps, PackedWeight
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme

pytestmark = pytest.mark.skipif(not kernel_kinds.OWN, reason="own kernels do not run on this CPU")
MILLISECOND = 1_000_000
LONG = 2_000 * MILLISECOND
"""For which a thread is held: what waits for it is told apart from what does not, on the busiest of machines."""


@pytest.fixture
def pool() -> Iterator[kernel_threads.PoolCalls]:
    """The library's threads, none of them left out; afterwards as before."""
    made = kernel_threads.calls().pool
    made.patient(0)
    made.on_torch(0)
    made.tend(1)
    yield made
    made.patient(0)
    made.on_torch(0)
    made.tend(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def coded(bits: int) -> Callable[[CpuOps], Tensor]:
    """A product of 8- or 4-bit weights of more rows than are rounded at once on one thread."""
    made, x = quantise(normal(1100, 640), Scheme(bits, group=128 if bits == 4 else 0), torch.float32), normal(300, 640)
    return lambda ops: ops.linear(x, ops.pack_quantised(made))


def launches() -> dict[str, Callable[[CpuOps], Tensor | None]]:
    """Each kernel with enough work for several threads."""
    gates, hidden, weight = normal(90, 2800).bfloat16(), normal(90, 1400).bfloat16(), normal(1400).bfloat16()
    rows, many = (
        decoding((5, 255, 1030, 14, 2, 64, 0), torch.bfloat16),
        prompts(([(70, 130), (0, 3), (500, 65)], 14, 2, 64, 0), torch.float32),
    )
    rotary = make_parts(1000, 4, 4, 72, torch.bfloat16)
    made: dict[str, Callable[[CpuOps], Tensor | None]] = {
        "quantised_linear 8": coded(8),
        "quantised_linear 4": coded(4),
        "gate": lambda ops: ops.silu_mul(gates),
        "norm": lambda ops: ops.rms_norm(hidden.clone(), weight, 1e-6)[0],
        "rotary": lambda ops: rotate(*rotary, ops.table),
        "decode_attention": rows.run,
        "attention": many.run,
    }
    for dtype in kernel_kinds.dense_types():
        large, x = normal(3000, 512).to(dtype), normal(37, 512).to(dtype)
        made[f"linear {dtype}"] = lambda _, large=large, x=x: dense_linear.product(x, panels_of(large))  # type: ignore[misc]
        made[f"best {dtype}"] = lambda _, large=large, x=x: dense_linear.best(x, panels_of(large), 2900, 1.0)  # type: ignore[misc]
    return made


def panels_of(weight: Tensor) -> dense_linear.Panels:
    made = CpuOps().pack_weight(weight, None)
    assert isinstance(made, PackedWeight) and made.panels is not None
    return made.panels


@pytest.mark.parametrize("on_torch", [0, 1])
def test_bits_are_equal_for_one_to_eight_threads(
    on_torch: int, pool: kernel_threads.PoolCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.on_torch(on_torch)
    monkeypatch.setenv(VARIABLE, kernel_kinds.DENSE or kernel_kinds.OWN[-1])
    pool.patient(1)
    for name, launch in launches().items():
        with kernel_kinds.threads(1):
            wanted = launch(CpuOps())
        assert wanted is not None, name
        for count in range(2, 9):
            with kernel_kinds.threads(count):
                for _ in range(3):
                    found = launch(CpuOps())
                    assert found is not None and torch.equal(found, wanted), (name, count)
    assert pool.in_use(8) == 8 and pool.system_id(7) > 0


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Tensor]]:
    """A launch of two threads."""
    if not kernel_kinds.dense_types():
        pytest.skip("own kernels do not multiply dense weights on this CPU")
    monkeypatch.setenv(VARIABLE, kernel_kinds.DENSE)
    dtype = kernel_kinds.dense_types()[0]
    made, x = panels_of(normal(4096, 512).to(dtype)), normal(64, 512).to(dtype)
    with kernel_kinds.threads(2):
        dense_linear.product(x, made)
        yield lambda: dense_linear.product(x, made)


def test_a_launch_does_not_wait_for_a_thread_that_has_not_begun(
    pool: kernel_threads.PoolCalls, product: Callable[[], Tensor]
) -> None:
    wanted = product()
    pool.hold(1, LONG, 0)
    begin = time.monotonic()
    for _ in range(20):
        assert torch.equal(product(), wanted)
    assert time.monotonic() - begin < LONG / 2e9


def test_a_thread_that_is_late_inside_of_a_launch_is_left_out_until_it_is_taken_back(
    pool: kernel_threads.PoolCalls, product: Callable[[], Tensor]
) -> None:
    """The launch waits for its piece; those after it do not."""
    wanted, held, deadline = product(), 0.0, time.monotonic() + 60
    while held < 0.2 and time.monotonic() < deadline:  # until the thread comes to one in time
        pool.hold(1, 300 * MILLISECOND, 1)
        begin = time.monotonic()
        assert torch.equal(product(), wanted)
        held = time.monotonic() - begin
    assert held >= 0.2 and pool.in_use(2) == 1
    pool.hold(1, LONG, 1)
    begin = time.monotonic()
    assert torch.equal(product(), wanted) and time.monotonic() - begin < LONG / 2e9
    pool.hold(1, 0, 1)
    pool.tend(1)
    assert pool.in_use(2) == 2 and torch.equal(product(), wanted)


def test_a_thread_that_waited_for_a_cpu_is_left_out(
    pool: kernel_threads.PoolCalls, product: Callable[[], Tensor]
) -> None:
    wanted = product()
    pool.charge(1, LONG)
    assert torch.equal(product(), wanted) and pool.in_use(2) == 1
    pool.patient(1)
    pool.tend(1)
    pool.charge(1, LONG)
    assert torch.equal(product(), wanted) and pool.in_use(2) == 2


def test_launches_of_several_callers_at_once(pool: kernel_threads.PoolCalls, product: Callable[[], Tensor]) -> None:
    wanted, wrong = product(), list[int]()

    def call(number: int) -> None:
        torch.set_num_threads(2)
        for _ in range(50):
            if not torch.equal(product(), wanted):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong and not any(caller.is_alive() for caller in callers)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(pool: kernel_threads.PoolCalls, product: Callable[[], Tensor]) -> None:
    wanted, parents = product().view(torch.uint8).numpy().tobytes(), pool.system_id(1)
    child = os.fork()
    if not child:
        # Of torch nothing that computes on its threads: OpenMP's do not survive a fork.
        found = product().view(torch.uint8).numpy().tobytes()
        os._exit(0 if found == wanted and pool.system_id(1) != parents else 1)
    deadline, ended = time.monotonic() + 30, (0, 0)
    while not ended[0] and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_packed_weights_are_the_same_from_any_number_of_threads(pool: kernel_threads.PoolCalls) -> None:
    weight, made = normal(1000, 96), list[Tensor]()
    table = kernel_kinds.table(kernel_kinds.DENSE or kernel_kinds.OWN[-1])
    for count in (1, 2, 5):
        with kernel_kinds.threads(count):
            found = weight_packing.pack_rows([weight], [1024], 96, torch.float32, table)
        if found is None:
            pytest.skip("weights are not packed by the library here")
        made.append(found.memory.clone())
    assert all(torch.equal(one, made[0]) for one in made)


class FakePool:
    """``threads_on_busy_cpus.ThreadPool`` of three threads beside the caller's."""

    def __init__(self) -> None:
        self.charged, self.tended, self.lates = dict[int, int](), list[int](), dict[int, int]()
        self.left = self.shared = 0

    def in_use(self, asked: int, /) -> int:
        return max(asked - self.left, 1)

    def system_id(self, worker: int, /) -> int:
        return 100 + worker if worker < 4 else 0

    def charge(self, worker: int, nanoseconds: int, /) -> None:
        self.charged[worker] = self.charged.get(worker, 0) + nanoseconds

    def late(self, worker: int, /) -> int:
        return self.lates.pop(worker, 0)

    def tend(self, everyone: int, /) -> None:
        self.tended.append(everyone)

    def on_torch(self, on: int, /) -> None:
        self.shared = on


class Account:
    """A fake of /proc: what the system says of threads, and of stolen time."""

    def __init__(self, root: Path) -> None:
        self.tasks, self.stat = root / "task", root / "stat"
        self.steal(0)
        for worker in (1, 2, 3):
            self.wait(worker, 0)

    def wait(self, worker: int, nanoseconds: int) -> None:
        folder = self.tasks / str(100 + worker)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"5000000 {nanoseconds} 12\n")

    def steal(self, ticks: int) -> None:
        lines = [f"cpu{cpu} 10 0 5 100 0 0 0 {ticks} 0 0" for cpu in range(os.cpu_count() or 1)]
        self.stat.write_text("cpu  1 2 3 4 5 6 7 8 9 10\n" + "\n".join(lines) + "\nintr 5\n")


@pytest.fixture
def kept_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def watched(tmp_path: Path, count: int = 4) -> tuple[ThreadUse, FakePool, Account, list[float]]:
    account, fake, time_now = Account(tmp_path), FakePool(), [100.0]
    return ThreadUse(count, 128, fake, account.tasks, account.stat, lambda: time_now[0]), fake, account, time_now


def look(use: ThreadUse, rows: int = 8) -> None:
    """Runs an empty launch."""
    with use.launch(rows):
        pass


@pytest.mark.usefixtures("kept_threads")
def test_threads_are_charged_with_the_time_for_which_the_system_made_them_wait(tmp_path: Path) -> None:
    use, fake, account, now = watched(tmp_path)
    now[0] += 0.06
    look(use)  # the first look has nothing to compare with
    assert not fake.charged and fake.tended == [0] and torch.get_num_threads() == 4
    fake.lates = {1: LONG}  # the same time, which the system counts better
    account.wait(2, 40 * MILLISECOND)
    account.wait(3, 2 * MILLISECOND)
    look(use)
    assert not fake.charged, "no time has passed"
    now[0] += 0.06
    look(use)
    assert fake.charged == {2: 40 * MILLISECOND}
    account.steal(3)  # 30 ms of each CPU at 100 ticks a second
    now[0] += 0.06
    look(use)
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    assert fake.charged == {1: 3 * tick, 2: 40 * MILLISECOND + 3 * tick, 3: 3 * tick}


@pytest.mark.usefixtures("kept_threads")
def test_torchs_threads_follow_and_a_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use, fake, _, now = watched(tmp_path)
    with caplog.at_level("INFO", "trencadis.engine"):
        fake.left = 2
        now[0] += 0.06
        look(use)
        assert torch.get_num_threads() == use.in_use == 2
        fake.left = 0
        now[0] += 0.06
        look(use)
        assert torch.get_num_threads() == 4
        now[0] += threads_on_busy_cpus.PAUSE + 1
        look(use)
        assert fake.tended[-1] == 1, "what was known is out of date"
        now[0] += threads_on_busy_cpus.QUIET
        look(use)
    lines = [record.getMessage() for record in caplog.records]
    busy = "cpu: 2 of 4 threads in use: the CPUs are busy with other work"
    free = "cpu: 4 of 4 threads in use: all run promptly"
    assert lines == [busy, free], "at most one in ten seconds"


@pytest.mark.usefixtures("kept_threads")
def test_launches_between_onednns_products_run_on_torchs_threads(tmp_path: Path) -> None:
    use, fake, _, _ = watched(tmp_path)
    for rows, shared in ((128, 0), (129, 1), (1, 0)):
        look(use, rows)
        assert fake.shared == shared, rows


@pytest.mark.usefixtures("kept_threads")
def test_torchs_threads_do_not_spin_beside_launches_whose_products_are_the_librarys(tmp_path: Path) -> None:
    use, _, _, _ = watched(tmp_path)
    for rows, alone, of_torch in ((8, True, 1), (128, True, 1), (129, True, 4), (8, False, 4)):
        with use.launch(rows, alone):
            assert (torch.get_num_threads(), kernel_threads.launch_threads()) == (of_torch, 4), (rows, alone)
        assert (torch.get_num_threads(), kernel_threads.launch_threads()) == (4, 4)
    with pytest.raises(KeyError), use.launch(8, True):
        raise KeyError
    assert torch.get_num_threads() == 4, "a launch that fails leaves no trace"


def test_launches_of_few_rows_leave_torch_idle() -> None:
    idle = {Bucket(Stage.DECODE, (8,)), Bucket(Stage.PREFILL, (8, 8)), Bucket(Stage.SAMPLE, (8,), "greedy")}
    others = {Bucket(Stage.SAMPLE, (8,)), Bucket(Stage.SAMPLE, (8,), "draw"), Bucket(Stage.VISION, (64,))}
    assert {bucket for bucket in idle | others if torch_is_idle(bucket)} == idle


@pytest.mark.usefixtures("kept_threads")
def test_where_the_system_keeps_no_account_threads_are_charged_with_how_late_they_came(tmp_path: Path) -> None:
    fake, now = FakePool(), [0.0]
    use = ThreadUse(4, 128, fake, tmp_path / "none", tmp_path / "no", lambda: now[0])
    for late in (0, 10, 20):  # a quarter of the time is let pass
        fake.lates = {3: late * MILLISECOND}
        now[0] += 0.06
        look(use)
    assert fake.charged == {3: 20 * MILLISECOND} and use.in_use == 4


def test_accounts_of_the_system_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    for text, wanted in (("12 34 5\n", 34), ("12\n", None), ("", None), ("a b c\n", None)):
        (folder / "schedstat").write_text(text)
        assert run_delay(7, tmp_path) == wanted
    assert run_delay(8, tmp_path) is None
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 1 1 1 1 1 1 50 0 0\ncpu0 1 1 1 1 1 1 1 20 0 0\ncpu1 1 1 1 1 1 1 1 30 0 0\n")
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    assert stolen_time({1}, stat) == 30 * tick and stolen_time({0, 1}, stat) == 50 * tick
    stat.write_text("cpu0 1 2\n")
    assert stolen_time({0}, stat) == 0 and stolen_time({0}, tmp_path / "no") == 0
