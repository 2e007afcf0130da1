"""GLM-5.x and DeepSeek-V3.2: latent attention with DeepSeek sparse attention (DSA)."""
