from habana_frameworks.torch import AT_IMPORT

LAZY_COLLECTIVES = AT_IMPORT.get("PT_HPU_ENABLE_LAZY_COLLECTIVES", "False").lower() in ["true", "1"]


def _make(store, rank, size, timeout):
    """gloo under another name: the stub's tensors are the CPU's."""
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout)


import torch.distributed  # noqa: E402

torch.distributed.Backend.register_backend("hccl", _make, devices=["cpu"])
