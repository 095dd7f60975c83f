"""vLLM's own server tests against this server: their source is downloaded, and a shim starts this server for theirs.

``download`` fetches the sdist and keeps its folder ``tests``; ``checkpoints`` makes small models for the names that
the tests ask for; ``plugin`` runs in the process of the tests: it replaces their start of a server, the package
``vllm`` and their ``conftest.py``; ``reasons.toml`` lists what is not run, with a reason each.
"""
