"""Compile mode of the emulated card: Dynamo and AOT autograd make graphs, the card runs them operation by operation."""
