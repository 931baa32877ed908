"""The codec inside other programs: one module for each, imported only by those who use it.

Every module needs what it is named after (the extras in ``pyproject.toml``) and nothing else does.
"""
