"""GLM-5.x and DeepSeek-V3.2: multi-head latent attention with the DeepSeek sparse attention indexer
(DSA).
"""
