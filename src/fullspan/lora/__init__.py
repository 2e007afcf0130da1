"""LoRA adapters: layers that wrap frozen ones, where they go, and PEFT folders in and out."""
