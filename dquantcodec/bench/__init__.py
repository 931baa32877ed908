"""How fast this machine is: what ``dqkv bench`` measures, and what ``benchmarks/`` measures with the same code.

Nothing here is imported by the codec.
"""
