"""Measurements against what a user would pick instead: repeated, interleaved, with spread and peak memory."""
