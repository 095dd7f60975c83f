"""The checks of ``trencadis check-model``: a checkpoint's family against transformers, which is imported only here."""
