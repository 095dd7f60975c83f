"""Requests and answers of the pooling routes."""
