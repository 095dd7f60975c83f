"""Worker processes that decode media: the pool, its processes, their protocol and jobs."""
