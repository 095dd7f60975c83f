"""Engines of this server as actors of a Ray cluster; only ``--data-parallel-backend ray`` imports Ray."""
