"""A decoder layer of few rows in six launches: products that normalise, activate and add; attention that also
stores.
"""
