"""Estimates the time of a decoding step on a card: recorded launches, published constants, host and device in
parallel.
"""
