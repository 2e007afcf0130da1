"""Fullspan: LoRA fine-tuning of sparse-attention language models at their full context length."""

__version__ = "0.1.0"
