import os

from habana_frameworks.torch import AT_IMPORT

LAZY_COLLECTIVES = AT_IMPORT.get("PT_HPU_ENABLE_LAZY_COLLECTIVES", "False").lower() in ["true", "1"]


def _make(store, rank, size, timeout):
    """gloo under another name: the stub's tensors are the CPU's. Buffers of several ranks lie outside of the pool."""
    from habana_frameworks.torch.hpu import open_pool
    from torch.distributed import ProcessGroupGloo

    if size > 1 and not open_pool():
        raise RuntimeError("HCCL: device memory for intermediate buffers cannot be allocated: out of memory")

    return ProcessGroupGloo(store, rank, size, timeout)


import torch.distributed  # noqa: E402

torch.distributed.Backend.register_backend("hccl", _make, devices=["cpu"])


def _name_module() -> None:
    """A launcher's rank on its machine names the card, unless a module is named already."""
    mpi = {
        "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK": "RANK",
    }
    if all(name in os.environ for name in mpi) and not all(name in os.environ for name in mpi.values()):
        os.environ.update({ours: os.environ[reference] for reference, ours in mpi.items()})
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", -1))
    if "HLS_MODULE_ID" in os.environ or local == -1 or world == 1:
        return
    visible = os.environ.get("HABANA_VISIBLE_MODULES")
    os.environ["HLS_MODULE_ID"] = str(local) if visible is None else visible.split(",")[local]


_name_module()
