"""Products of LoRA adapters by slots, held against the products over all slots under a mask."""

from __future__ import annotations

import pytest
import torch

from trencadis.backends.cpu.lora_adapter_products import add_masked_adapters
from trencadis.backends.cuda.kernels import lora_shrink_expand
from trencadis.core.device.launch_tensors import AdapterWeights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "rank", "widths"), [(5, 8, (40, 24)), (70, 16, (200,)), (3, 64, (16, 16, 16))])
def test_kernels_compute_what_the_mask_does(
    device: torch.device, n: int, rank: int, widths: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Slots that no token has, tokens without an adapter, a tile that is not full."""
    generator = torch.Generator().manual_seed(n)
    a = torch.randn((3, len(widths), rank, 100), generator=generator).to(dtype)
    w = AdapterWeights(a, tuple(torch.randn((3, rank, width), generator=generator).to(dtype) for width in widths))
    x, y = (torch.randn((n, size), generator=generator).to(dtype) for size in (100, sum(widths)))
    slot = torch.randint(0, 3, (n,), generator=generator, dtype=torch.int32)
    mask = (slot[:, None] == torch.arange(1, 4, dtype=torch.int32)).to(dtype)
    want = add_masked_adapters(y.clone(), x, w, mask)
    w = AdapterWeights(w.a.to(device), tuple(b.to(device) for b in w.b))
    y = y.to(device)
    lora_shrink_expand.add(y, x.to(device), slot.to(device), w)
    y = y.cpu()
    scale = want.abs().max().item()
    torch.testing.assert_close(y, want, rtol=0, atol=scale * (1e-5 if dtype == torch.float32 else 2e-2))
