"""Stand-ins: devices, ranks, checkpoints and worker jobs that tests control."""
