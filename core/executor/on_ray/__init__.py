"""Ranks on a Ray cluster.

Ray places, starts and ends them; Steps do not pass through it. Imported only for the ``ray`` backend.
"""
