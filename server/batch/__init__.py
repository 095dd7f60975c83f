"""``trencadis run-batch``: runs a file of requests in OpenAI's batch format on its own engine or on a server."""
