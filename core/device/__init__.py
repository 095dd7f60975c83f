"""The interface between the engine and a device: protocols of a backend, and the tensors of launches."""
