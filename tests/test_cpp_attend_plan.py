"""What C++ makes of a file's plan for attention kernels (``attend_plan.hpp``) is what Python makes, byte for byte."""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attend_support import MIN_MAX, Geometry
from gpu_support import HOST, needs_compiler, needs_nvrtc
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import dquantcodec as dq
from dquantcodec.cuda import nvrtc, sources
from dquantcodec.cuda.attend_launch import (
    BLOCK_SHARED_BYTES,
    AttendLaunch,
    attend_launch,
    attend_memory,
    attend_params,
)
from dquantcodec.cuda.group_attend import group_kind, is_grouped
from dquantcodec.errors import UnsupportedError
from dquantcodec.grouping import MAX_FIELD_BITS, Grouping, Table
from dquantcodec.plan import Plan, grouped, make_plan
from dquantcodec.trellis import state_bits
from dquantcodec.trellis_classes import dependent_classes

GEOMETRIES = {
    "classes": Geometry(classes="both"),
    "classes, head size 64": Geometry(classes="both", kv_heads=3, head_dim=64, group=3),
    "classes, head size 96": Geometry(classes="both", kv_heads=2, head_dim=96, group=1),
    "classes, head size 256": Geometry(classes="both", kv_heads=2, head_dim=256),
    "classes, one head": Geometry(classes="both", kv_heads=1, group=7, head_dim=64),
    "classes, 3.0": Geometry(classes="both", profile="3.0", kv_heads=2),
    "classes, 1.96": Geometry(classes="both", profile="1.96", kv_heads=4),
    "classes, trellis": Geometry(classes="both", profile="2.26-t", kv_heads=2),
    "classes, trellis, 1.96": Geometry(classes="both", profile="1.96-t", kv_heads=4, head_dim=64),
    "classes, rotated keys": Geometry(classes="value", kv_heads=2),
    "classes, rotated values": Geometry(classes="key", kv_heads=2, head_dim=96),
    "rotated": Geometry(),
    "rotated, head size 192": Geometry(head_dim=192, kv_heads=2),
    "rotated, 1.96": Geometry(profile="1.96", kv_heads=4),
    "rANS": Geometry(profile="paper-2.26", kv_heads=4),
    "min-max grids": Geometry(profile=MIN_MAX, kv_heads=4),
}
EXAMPLES = HOST.parent / "examples"
#: Options that say how a kernel is launched, which is the caller's business.
OF_LAUNCH = {
    "POSITIONS", "WARPS", "ELEMENT", "OUT_ELEMENT", "MASKED", "SOFT_CAP", "SHARED_BYTES", "BLOCKS", "FINISH_THREADS",
    "KEY_RING", "VALUE_RING",
}  # fmt: skip


@dataclass
class Made:
    """What the program prints."""

    options: dict[str, str] = field(default_factory=dict)
    arrays: list[bytes] = field(default_factory=list)
    params: bytes = b""
    refused: str = ""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not HOST.is_dir():
        pytest.skip("gpu/host is not beside the tests")
    built = tmp_path_factory.mktemp("plan") / "attend_plan"
    command = [needs_compiler(), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{sources.root() / 'include'}"]
    subprocess.run([*command, str(HOST / "attend_plan.cpp"), "-o", str(built)], check=True)
    return built


def make(program: Path, file: Path, group: int) -> Made:
    printed = subprocess.run([program, file, str(group)], capture_output=True, text=True, check=False)
    assert not printed.stderr
    made = Made()
    for line in printed.stdout.splitlines():
        name, rest = line.split(" ", 1)
        if name == "option":
            option, number = rest.removeprefix("-DDQ_").split("=")
            made.options[option] = number
        elif name == "array":
            made.arrays.append(bytes.fromhex(rest))
        elif name == "params":
            made.params = bytes.fromhex(rest)
        else:
            made.refused = rest
    return made


def written(folder: Path, plan: Plan) -> tuple[Path, Plan]:
    """A file without tokens, and the plan that it holds."""
    path = folder / "plan.dqkv"
    with dq.create(path, [dq.Layer(plan.kv_heads, plan.head_dim, "bfloat16", plan)]):
        pass
    with dq.open(path) as file:
        stored = file.layers[0].plan
    assert stored is not None
    return path, stored


def compare(made: Made, plan: Plan, launch: AttendLaunch) -> None:
    options = dict(option.removeprefix("-DDQ_").split("=") for option in launch.options if option.startswith("-D"))
    assert made.options == {name: number for name, number in options.items() if name not in OF_LAUNCH}
    params = np.frombuffer(made.params, launch.params)[0]
    memory = attend_memory(plan)
    assert len(made.arrays) == len(memory)
    for name, array in memory.items():
        assert made.arrays[int(params[name]) - 1] == array.tobytes(), name
    wanted: NDArray[Any] = attend_params(plan, launch)
    for name in set(launch.params.names or ()) - set(memory):
        assert params[name].tobytes() == wanted[name].tobytes(), name


@pytest.mark.parametrize("name", GEOMETRIES)
def test_plans_are_made_as_in_python(name: str, program: Path, tmp_path: Path) -> None:
    geometry = GEOMETRIES[name]
    path, plan = written(tmp_path, geometry.plan)
    compare(make(program, path, geometry.group), plan, attend_launch(plan, geometry.group))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("classes", "sm_80"),
        ("classes, head size 256", "sm_90"),
        ("classes, trellis", "sm_80"),
        ("rANS", "sm_90"),
    ],
)
def test_blocks_of_the_example_are_those_of_python(
    name: str, architecture: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``gpu/examples/attend_kernels.hpp`` compiles for C++'s options and finds the warps that Python counts."""
    needs_nvrtc()
    if not EXAMPLES.is_dir():
        pytest.skip("the examples are not beside the tests")
    geometry = GEOMETRIES[name]
    path, plan = written(tmp_path, geometry.plan)
    made = make(program, path, geometry.group)
    shared = BLOCK_SHARED_BYTES[architecture]
    shape = attend_launch(plan, geometry.group, dtype="float32", shared=shared).shape
    kernels = (EXAMPLES / "attend_kernels.hpp").read_text().partition('R"(')[2].partition(')"')[0]
    agrees = f"C::warps == {shape.warps} && Shape::shared_bytes == {shape.shared_bytes}"
    agrees += f" && C::Key::ring == {shape.rings[0]} && C::Value::ring == {shape.rings[1]}"
    monkeypatch.setattr(sources, "kernel_source", lambda _: f'{kernels}\nstatic_assert({agrees}, "as Python");')
    numbers = {**made.options, "GROUPED": int(is_grouped(plan)), "BLOCK_SHARED_BYTES": shared}
    assert nvrtc.compile_kernel("attend", tuple(f"-DDQ_{name}={n}" for name, n in numbers.items()), architecture)


def random_grouping(rng: np.random.Generator, heads: int, dim: int, states: int, order: NDArray[Any]) -> Grouping:
    """Groups of any tables of any classes: wider, narrower and more unlike than data make them."""
    known = [levels.levels("unbiased") for levels in dependent_classes("normal", states)]
    dependent = [levels for levels in known if levels.second or states == 1]
    used = [dependent[rng.integers(len(dependent))], *(known[i] for i in rng.choice(len(known), 5))]
    tables = [Table((0,), 9)]
    while len(tables) < 6:
        chosen = rng.integers(0, 6, rng.integers(1, 5)).tolist()
        letters = math.prod(len(used[c].weights) for c in chosen)
        if letters <= 4096 and sum(used[c].field_bits for c in chosen) <= MAX_FIELD_BITS - state_bits(states):
            tables.append(Table(tuple(chosen), int(rng.integers(max(8, (letters - 1).bit_length()), 13))))
    counts = [len(table.classes) for table in tables]
    fields = [int(rng.choice(counts)) for _ in range(rng.integers(1, 6))]
    shapes = [(int(rng.choice([8, 8, 4, 1])), f) for f in fields]
    while sum(letters * f for letters, f in shapes) > dim:
        shapes.pop()
    choice = [[rng.choice([n for n, c in enumerate(counts) if c == f]) for _, f in shapes] for _ in range(heads)]
    coded = sum(letters * f for letters, f in shapes)
    channels = [head * dim + rng.permutation(dim)[:coded] for head in order]
    return Grouping(
        head_dim=dim,
        classes=tuple(used),
        tables=tuple(tables),
        letters=tuple(letters for letters, _ in shapes),
        fields=tuple(f for _, f in shapes),
        choice=np.array(choice, np.uint8),
        order=np.array(channels, np.uint16),
        states=states,
    )


def random_plan(seed: int) -> Plan:
    rng = np.random.default_rng(seed)
    heads, dim = int(rng.integers(1, 5)), int(rng.choice([32, 64, 96]))
    plan = make_plan(dq.Profile.named("2.26"), heads, dim)
    order = rng.permutation(heads)
    found = {}
    for kind in ("key", "value"):
        states = int(rng.choice([1, 1, 4, 8]))
        if rng.random() < 0.1:
            order = rng.permutation(heads)
        grouping = random_grouping(rng, heads, dim, states, order)
        found[kind] = grouped(60, plan.key.substreams, kind == "key", 0.7, "unbiased", grouping)
    return replace(plan, **found)


@given(seed=st.integers(0, 2**32))
def test_any_plan_is_made_or_refused_as_in_python(
    seed: int, program: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, plan = written(tmp_path_factory.mktemp("random"), random_plan(seed))
    made = make(program, path, 2)
    try:
        launch = attend_launch(plan, 2, warps=1)
    except UnsupportedError as error:
        assert made.refused == error.code
        return
    compare(made, plan, launch)


def test_a_table_that_groups_read_with_fields_at_other_places(program: Path, tmp_path: Path) -> None:
    """Together their fields would take 13 bits, one more than there is room for: the table stands in memory twice."""
    known = [levels.levels("unbiased") for levels in dependent_classes("normal", 1)]
    used = tuple(next(c for c in known if c.field_bits == bits) for bits in (3, 5, 6, 7))
    grouping = Grouping(
        head_dim=32,
        classes=used,
        tables=(Table((0, 0), 10), Table((3, 1), 12), Table((1, 2), 12)),
        letters=(8, 8),
        fields=(2, 2),
        choice=np.array([[0, 0], [1, 2]], np.uint8),
        order=np.arange(64, dtype=np.uint16).reshape(2, 32),
    )
    plan = make_plan(dq.Profile.named("2.26"), 2, 32)
    stream = grouped(60, plan.key.substreams, False, 0.7, "unbiased", grouping)
    path, plan = written(tmp_path, replace(plan, key=stream, value=stream))
    assert group_kind(plan, "key").records[0].tolist() == [[2046, 16384], [2046, 18432]]
    compare(make(program, path, 2), plan, attend_launch(plan, 2))


def test_heads_of_keys_and_values_in_other_orders_are_refused(program: Path, tmp_path: Path) -> None:
    plan = Geometry(classes="both", kv_heads=2).plan
    grouping = plan.value.grouping
    assert grouping is not None
    turned = replace(grouping, choice=grouping.choice[::-1], order=grouping.order[::-1])
    path, _ = written(tmp_path, replace(plan, value=replace(plan.value, grouping=turned)))
    assert make(program, path, 4).refused == "device-heads"
