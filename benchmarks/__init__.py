"""Measurements: each module is a program, ``python -m benchmarks.NAME``; ``run.py`` calls them all."""

import os

# Some import torch before an engine has settled its device; torch then keeps plug-ins out, as in every process of ours.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
