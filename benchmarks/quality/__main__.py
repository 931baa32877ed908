"""Evidence of quality, one command each.

    python benchmarks/quality                        the commands, a line each
    python benchmarks/quality alphabet --json benchmarks/results/quality/alphabet.json

Every command prints a table and writes its figures as JSON; `plots` draws the JSON files and `page` writes
docs/quality.md from them.  Only `evaluate` and `retrieval` need a language model (and PyTorch with transformers); the
others run on captured keys and values.
"""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "alphabet": "levels at fixed storage (the paper's Table 2)",
    "preprocessing": "rotation and mean removal (Table 1)",
    "drift_statistics": "symbols that drift, how full containers are, the analytic model (appendix, Figure 6)",
    "payload": "levels a payload supports (Figure 6, left)",
    "normal_streams": "normal values in 331 and 231 bytes beside what the rate allows",
    "methods": "all methods on captured keys and values: stored bits and errors",
    "hard_cases": "biases, sinks, outliers, tiny and huge layers: what happens and what helps",
    "class_limits": "variance classes: reach, clipping, letters and tables against KL divergence",
    "head_groups": "eight heads coded as one group to eight, as ranks of tensor parallelism do",
    "sensitivities": "what coding one layer's keys or values alone does to a model",
    "evaluate": "KL divergence, agreement and perplexity of real models with coded caches (Table 4)",
    "beyond": "profiles beside the paper's codec at equal bytes, from the rows of evaluate",
    "retrieval": "needles and key-value pairs that the full-precision model finds",
    "plots": "draw the results",
    "page": "write docs/quality.md from the results",
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        for name, what in COMMANDS.items():
            print(f"  {name:17} {what}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return int(import_module(name).main(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
