"""Devices. Each subpackage is one backend; the CPU is the reference that the others inherit."""
