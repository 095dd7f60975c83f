"""LoRA adapters: reads PEFT's files, merges them into a checkpoint, and keeps several of them beside one model."""
