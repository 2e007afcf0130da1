"""Operations: tensors in, tensors out. No process group, no module, no configuration file.

Each op is a folder: README.md (formula, shapes, cost), reference.py (plain PyTorch, which is also
what a CPU runs), op.py (checks, the registered custom op, the public function) and, where it has
GPU kernels, *_backend.py (their launches) over kernels_*.py. backend.py chooses among them.
"""
