"""Output projection and cross-entropy, without the full logits."""
