"""Triton kernels, one file per concept; each exports typed functions that launch it and allocate nothing."""

import os

# Products and sums are fused into one rounding. Triton 3.9 warns that 3.10 will do so only if this is set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
