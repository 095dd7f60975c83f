"""The bundled demo checkpoint."""
