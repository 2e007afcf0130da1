"""What a run will take, from its configuration and the model's config.json alone: bytes, FLOPs,
traffic and time. Imports no torch and needs no GPU.
"""
