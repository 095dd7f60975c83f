"""A stub of Gaudi's plug-in: the signatures that the product uses, over CPU tensors. Only tests put it on the path."""
