"""Serving a model of Qwen3-8B's shape from BF16 rows and from pages: memory, batches and tokens a second on one card.

    python benchmarks/gpu/serving --keep .plans                     # without a GPU: fits the plans, measures nothing
    python benchmarks/gpu/serving --keep .plans --out benchmarks/results/gpu-serving.json

Weights are random.  A step of decoding (all layers, output head and argmax) is captured in a CUDA graph and replayed.
BF16 rows go to PyTorch's attention (flash and cuDNN; the faster counts) with all lengths equal and fixed; pages go
through ``dquantcodec.cuda``: the new token is appended, full tails are encoded inside the step, lengths grow, and
sequences are evenly far from their next page.  Caches are filled with random rows and their pages, not by a prefill.
The largest batches are really allocated and run.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from attend import machine
from decoder_model import DecoderShape, random_rows
from kv_caches import Backend, Coded
from measuring import Card
from run import Run, measure

from dquantcodec import Profile, fit_plan
from dquantcodec.plan import Plan, make_plan

PROMPT = 8192
BATCHES = (1, 8, 16, 32, 64, 128, 256)
#: Lengths one sequence grows through.
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
PROFILES = "2.26:classes,2.26,paper-2.26"
REPEATS = 5


def plan_for(name: str, shape: DecoderShape, keep: Path | None) -> Plan:
    """The plan of a profile, fitted to the model's rows if it is called ``...:classes``; ``keep`` holds made ones."""
    file = keep / f"serving-{name.replace(':', '-')}.pickle" if keep else None
    if file and file.is_file():
        plan: Plan = pickle.loads(file.read_bytes())
        return plan
    profile, _, rule = name.partition(":")
    if rule:
        plan = fit_plan(profile, *random_rows(shape, 1024, 1).numpy())
    else:
        plan = make_plan(Profile.named(profile), shape.kv_heads, shape.head_dim)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(plan))
    return plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profiles", default=PROFILES)
    parser.add_argument("--keep", type=Path, help="folder for plans, made once")
    parser.add_argument("--quick", action="store_true", help="three batches, two lengths, fewer repeats")
    parser.add_argument("--seconds", type=float, default=150, help="after which nothing more is begun")
    chosen = parser.parse_args()
    shape = DecoderShape()
    plans = {name: plan_for(name, shape, chosen.keep) for name in chosen.profiles.split(",")}
    if not torch.cuda.is_available():
        print("no GPU: plans are made, nothing is measured")
        return 0
    command = f"python benchmarks/gpu/serving --profiles {chosen.profiles}{' --quick' if chosen.quick else ''}"
    if chosen.out:
        command += f" --out benchmarks/results/{chosen.out.name}"
    header = {
        "command": command, **machine(), "shape": vars(shape), "prompt": PROMPT,
        "card_bytes": torch.cuda.mem_get_info()[1],
    }  # fmt: skip
    batches, lengths = (BATCHES[::3], LENGTHS[::6]) if chosen.quick else (BATCHES, LENGTHS)
    backend = Backend.of_gpu()
    with torch.inference_mode():
        run = Run(
            Card(), shape, header, prompt=PROMPT, sample=PROMPT, positions=max(LENGTHS) + 512,
            repeats=2 if chosen.quick else REPEATS, seconds=chosen.seconds, out=chosen.out,
        )  # fmt: skip
        coded = [
            Coded(name, plan, Profile.named(name.partition(":")[0]).sinks, backend, "cuda")
            for name, plan in plans.items()
        ]
        measure(run, coded, batches, lengths)
    print(f"left out: {run.result['left_out'] or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
