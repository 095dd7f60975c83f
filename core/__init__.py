"""The engine: requests, scheduler, KV cache pool, bucket plan and model runner.

It is independent of the device, of HTTP and of image file formats.
"""
