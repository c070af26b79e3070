"""Modules that own parameters: tokens, multi-head retention, blocks."""
