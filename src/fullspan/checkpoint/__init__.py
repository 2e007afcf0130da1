"""Checkpoints in Hugging Face layout: safetensors folders, mapping of names, loading, tiny ones.

Nothing is imported here, so that a model family can declare its mapping without the loader.
"""
