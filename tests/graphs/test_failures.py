"""A lack of memory is told from other failures by what libraries say."""

from __future__ import annotations

import pytest

from trencadis.core.errors import is_out_of_memory


@pytest.mark.parametrize(
    ("said", "lack"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB", True),
        ("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY", True),
        ("NCCL error: unhandled cuda error, Last error: Cuda failure 2 'out of memory'", True),
        ("FATAL ERROR :: MODULE:PT_SYNHELPER workspace Allocation of size ::1024 failed!", True),
        ("Exception in Launch thread...\nFATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1 (1)MB", True),
        ("FATAL ERROR :: MODULE:PT_DEVMEM OOM: No enough memory for defragment.", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", False),
    ],
)
def test_what_a_lack_of_memory_says(said: str, lack: bool) -> None:
    assert is_out_of_memory(RuntimeError(said)) is lack
