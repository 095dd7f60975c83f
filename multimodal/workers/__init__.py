"""Worker processes that decode media: the pool, its processes, its pipe and its jobs."""
