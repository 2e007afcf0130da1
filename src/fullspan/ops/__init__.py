"""Operations: tensors in, tensors out. No process group, no module, no configuration file.

Each op is a folder: README.md (formula, shapes, cost), reference.py (plain PyTorch, also the CPU
product path) and op.py (checks, the registered custom op, the public function).
"""
