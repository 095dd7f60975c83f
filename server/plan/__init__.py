"""The ``plan`` command: reports, plots, traces and comparisons, without a device."""
