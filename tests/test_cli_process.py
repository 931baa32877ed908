"""What only a process of its own shows: interruption and memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dquantcodec.cli.main import main
from dquantcodec.tensors import Geometry, OutputTensor, SafetensorsWriter

#: Runs a command that stops in the middle of its work, says so, and waits for a signal.  What a shell runs in the
#: background ignores SIGINT, these tests and all that they start included: the command must not.
STUCK = """\
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import dquantcodec.{module} as module
work = module.{owner}.{method}
calls = []
def stuck(*args, **options):
    calls.append(1)
    result = work(*args, **options)
    if len(calls) == {call}:
        print("stuck", flush=True)
        time.sleep(600)
    return result
module.{owner}.{method} = stuck
from dquantcodec.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

#: The first four reads are the sample that a plan is fitted to, two windows of each kind; the file begins after them.
COMPRESS = {"module": "tensors.stored", "owner": "StoredTensor", "method": "read", "call": 6}
DECOMPRESS = {"module": "tensors.write", "owner": "SafetensorsWriter", "method": "write", "call": 2}


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_a_signal_leaves_no_partial_file(
    tmp_path: Path, command: str, number: signal.Signals, status: int, word: str
) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((1, 2, 300, 64)).astype(np.float16) for name in ("key_0", "value_0")}
    save_file(arrays, tmp_path / "in.safetensors")
    assert main(["compress", "--quiet", str(tmp_path / "in.safetensors"), str(tmp_path / "in.dqkv")]) == 0
    source, output, script = (
        ("in.safetensors", "out.dqkv", STUCK.format(**COMPRESS))
        if command == "compress"
        else ("in.dqkv", "out.safetensors", STUCK.format(**DECOMPRESS))
    )
    (tmp_path / output).write_text("old")
    process = subprocess.Popen(
        [sys.executable, "-c", script, command, "--quiet", str(tmp_path / source), str(tmp_path / output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stuck\n"
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")], "the unfinished file lies beside"
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == status
    assert errors == f"dqkv: {word}\n"
    assert (tmp_path / output).read_text() == "old"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


#: Prints the most memory the process ever held, in bytes.  VmHWM belongs to this program alone; getrusage's figure
#: would begin with that of the test process it was started from.
PEAK = """\
import sys
if len(sys.argv) > 1:
    from dquantcodec.cli.main import main
    assert main(sys.argv[1:]) == 0
print([int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def peak(*argv: object) -> int:
    result = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, argv)], stdout=subprocess.PIPE, text=True, check=True
    )
    return int(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """300 MB over the bare interpreter, Numba included, for an input of more than that."""
    geometry = Geometry(1, 8, 12_000, 128)
    tensors = [
        OutputTensor(f"layers.{layer}.{kind}", "float16", "BHTD", geometry)
        for layer in range(8)
        for kind in ("key", "value")
    ]
    # Tokens never written are zeros that take no room on the disk.
    with SafetensorsWriter(tmp_path / "in.safetensors", tensors, {}) as writer:
        writer.write("layers.0.key", 0, 0, np.random.default_rng(0).standard_normal((500, 8, 128)).astype(np.float16))
    assert (tmp_path / "in.safetensors").stat().st_size > 390_000_000
    bare = peak()
    compressing = peak("compress", "--quiet", tmp_path / "in.safetensors", tmp_path / "x.dqkv", "--threads", 2)
    assert compressing - bare < 300_000_000
    out = tmp_path / "out.safetensors"
    assert peak("decompress", "--quiet", tmp_path / "x.dqkv", out, "--layers", "0-1") - bare < 300_000_000
