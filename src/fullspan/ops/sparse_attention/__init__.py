"""Attention over selected keys."""
