"""The `fullspan` command: main.py, and one module a sub-command."""
