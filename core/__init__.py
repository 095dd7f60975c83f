"""The engine: requests, scheduler, KV pool, plan, runner. It knows no device, no HTTP and no image file."""
