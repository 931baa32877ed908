"""The command ``dqkv``: one file per sub-command, heavy imports inside them."""

from .main import main

__all__ = ["main"]
