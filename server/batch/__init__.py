"""``trencadis run-batch``: a file of requests in OpenAI's batch form, for an engine of its own or a server."""
