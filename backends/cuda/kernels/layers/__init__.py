"""Decoder layers of few rows in six launches: products fused with norm, activation and residual; attention that also
stores keys and values.
"""
