"""What a checkpoint's JSON files say: typed fields, the model's configuration, its rotary table."""
