"""Every way a command can fail: one clear line with the reason code, the right exit status, nothing half-done."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from dquantcodec.cli.main import main

Arrays = dict[str, NDArray[Any]]


def cache(
    shape: tuple[int, ...] = (1, 2, 150, 64), layers: tuple[int, ...] = (0, 1), dtype: Any = np.float16
) -> Arrays:
    rng = np.random.default_rng(7)
    return {
        f"layers.{layer}.{kind}": rng.standard_normal(shape).astype(dtype)
        for layer in layers
        for kind in ("key", "value")
    }


NAN_PLACE = "tensor layers.1.key, token 17, head 1, channel 5: NaN"
SHORT = np.zeros((1, 2, 99, 64), np.float16)


def changed(change: Callable[[Arrays], object]) -> Arrays:
    arrays = cache()
    change(arrays)
    return arrays


def put(name: str, place: tuple[int, ...], number: float) -> Arrays:
    arrays = cache()
    arrays[name][place] = number
    return arrays


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


def complaint(capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """The one line of an error, and the list below it."""
    captured = capsys.readouterr().err
    assert "Traceback" not in captured
    first, *rest = captured.splitlines()
    assert first.startswith("dqkv: error: ")
    assert all(line.startswith("  ") for line in rest)
    return first, rest


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    save_file(cache(), tmp_path / "good.safetensors")
    assert run("compress", "--quiet", tmp_path / "good.safetensors", tmp_path / "good.dqkv", "--recent", 10) == 0
    return tmp_path / "good.dqkv"


@pytest.mark.parametrize(
    ("arrays", "code", "says"),
    [
        (put("layers.1.key", (0, 1, 17, 5), np.nan), "input-nonfinite", NAN_PLACE),
        (put("layers.0.value", (0, 0, 149, 63), -np.inf), "input-nonfinite", "token 149, head 0, channel 63: infinity"),
        (cache(dtype=np.int8), "dtype-unsupported", "must be bfloat16, float16 or float32"),
        (cache(dtype=np.float64), "dtype-unsupported", "convert them to float32"),
        (changed(lambda a: a.update({"layers.1.key": SHORT})), "shape-mismatch", "same shape"),
        (changed(lambda a: a.update({"layers.1.key": a["layers.1.key"].astype("f4")})), "dtype-mismatch", "same type"),
        (changed(lambda a: a.pop("layers.1.value")), "names-unpaired", "one key and one value"),
        (changed(lambda a: a.update({"k.0": a["layers.0.key"], "v.0": a["layers.0.key"]})), "names-ambiguous", "--key"),
        ({"weight": np.zeros((3, 4), np.float16)}, "names-unknown", "--key PATTERN and --value PATTERN"),
        (cache((8, 100, 64)), "layout-ambiguous", "--layout HTD or --layout THD"),
        (cache((1, 200, 2, 64)), "layout-ambiguous", "--layout BTHD"),
        (cache((100, 64)), "layout-rank", "2 axes"),
        ({**cache(), **cache((1, 2, 99, 64), (2,))}, "tokens-mismatch", "--layers"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)  # fmt: skip
def test_inputs_that_cannot_be_compressed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arrays: Arrays, code: str, says: str
) -> None:
    save_file(arrays, tmp_path / "in.safetensors")
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 1
    line, _ = complaint(capsys)
    assert line.startswith(f"dqkv: error: {tmp_path / 'in.safetensors'}: ")
    assert f"[{code}]" in line
    assert says in line
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_lists_stand_below_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(cache((8, 100, 64)), tmp_path / "in.safetensors")
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 1
    line, rest = complaint(capsys)
    assert line.endswith("[layout-ambiguous]:")
    assert rest[0] == "  layers.0.key [8, 100, 64]"


def test_a_bad_number_in_another_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = cache((2, 2, 150, 64))
    arrays["layers.0.key"][1, 0, 3, 4] = np.nan
    save_file(arrays, tmp_path / "in.safetensors")
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 1
    assert "tensor layers.0.key, sequence 1, token 3, head 0, channel 4" in complaint(capsys)[0]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("in.safetensors", b"", "input-damaged"),
        ("in.safetensors", b"not a tensor file at all", "input-damaged"),
        ("in.npz", b"PK\x03\x04 not a zip", "input-damaged"),
        ("in.txt", b"text", "input-unknown"),
        ("in.pt", b"PK", "input-unknown"),
    ],
)
def test_unreadable_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, code: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run("compress", tmp_path / name, tmp_path / "x.dqkv") == 1
    line, _ = complaint(capsys)
    assert str(tmp_path / name) in line
    assert line.endswith(f"[{code}]")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_files_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    save_file(cache(), tmp_path / "in.safetensors")
    for argv in (
        ("compress", gone, tmp_path / "x.dqkv"),
        ("decompress", gone, tmp_path / "x.safetensors"),
        ("info", gone),
        ("verify", gone),
        ("compare", tmp_path / "in.safetensors", gone),
        ("compress", tmp_path / "in.safetensors", gone / "x.dqkv"),
    ):
        assert run(*argv) == 1
        line, _ = complaint(capsys)
        assert str(gone) in line
        assert line.endswith("[not-found]")
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser may read everything")
def test_no_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(cache(), tmp_path / "in.safetensors")
    (tmp_path / "in.safetensors").chmod(0)
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 1
    assert complaint(capsys)[0].endswith("Permission denied [no-permission]")


def test_outputs_that_must_not_be_written(tmp_path: Path, coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = coded.read_bytes()
    source = tmp_path / "good.safetensors"
    for argv, code in (
        (("compress", source, tmp_path), "is-folder"),
        (("compress", source, source), "output-is-input"),
        (("decompress", coded, tmp_path), "is-folder"),
        (("decompress", coded, coded), "output-is-input"),
        (("decompress", coded, tmp_path / "x.npz"), "output-type"),
        (("decompress", source, tmp_path / "x.safetensors"), "signature"),
        (("compress", coded, source), "input-unknown"),
    ):
        assert run(*argv) == 1
        assert complaint(capsys)[0].endswith(f"[{code}]")
    assert coded.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.dqkv", "good.safetensors"]


def test_layers_and_tokens_that_are_not_there(tmp_path: Path, coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "good.safetensors", tmp_path / "out"
    for argv, code in (
        (("compress", source, out, "--layers", "7"), "layer-missing"),
        (("compress", source, out, "--exact-layers", "1-2"), "layer-missing"),
        (("decompress", coded, out, "--layers", "2"), "layer-missing"),
        (("decompress", coded, out, "--tokens", "100:151"), "tokens-range"),
        (("decompress", coded, out, "--tokens", "5:5"), "tokens-range"),
        (("decompress", coded, out, "--tokens=-151:"), "tokens-range"),
        (("compare", source, coded, "--layers", "2"), "layer-missing"),
    ):
        assert run(*argv) == 1
        assert complaint(capsys)[0].endswith(f"[{code}]")
    assert not out.exists()


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("nonsense",),
        ("compress", "a"),
        ("compress", "a", "b", "--profile", "9"),
        ("compress", "a", "b", "--recent", "-1"),
        ("compress", "a", "b", "--threads", "0"),
        ("compress", "a", "b", "--layers", "5-3"),
        ("compress", "a", "b", "--layers", "x"),
        ("compress", "a", "b", "--layout", "TDH"),
        ("compress", "a", "b", "--nonfinite", "ignore"),
        ("compress", "a", "b", "--key", "k.{layer}"),
        ("decompress", "a", "b", "--tokens", "5"),
        ("decompress", "a", "b", "--dtype", "int8"),
        ("compare", "a", "b", "--value", "v.{layer}"),
    ],
)
def test_wrong_usage_is_2(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("dqkv: error: ")
    assert first.endswith("[usage]")
    assert second.startswith("help: dqkv")
    assert second.endswith("--help")


def _full(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_while_compressing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(cache(), tmp_path / "in.safetensors")
    (tmp_path / "x.dqkv").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr("dquantcodec.file.disk.DiskFile.write", _full)
        assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 1
    assert complaint(capsys)[0] == f"dqkv: error: {tmp_path / 'x.dqkv'}: No space left on device [disk-full]"
    assert (tmp_path / "x.dqkv").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "x.dqkv"]


def test_a_full_disk_while_decompressing(
    tmp_path: Path, coded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dquantcodec.tensors.write.SafetensorsWriter._write_at", _full)
        assert run("decompress", coded, tmp_path / "out.safetensors") == 1
    assert complaint(capsys)[0] == f"dqkv: error: {tmp_path / 'out.safetensors'}: No space left on device [disk-full]"
    assert not (tmp_path / "out.safetensors").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_file_size_limit_in_a_process_of_its_own(tmp_path: Path) -> None:
    import subprocess

    save_file(cache((1, 8, 2000, 64)), tmp_path / "in.safetensors")
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from dquantcodec.cli.main import main\n"
        "import dquantcodec.codec\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    argv = [sys.executable, "-c", script, "compress", "--quiet", tmp_path / "in.safetensors", tmp_path / "x.dqkv"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stderr.splitlines()[-1].endswith("File too large [disk-full]")
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_other_failures_are_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(cache(), tmp_path / "in.safetensors")
    argv = ["compress", str(tmp_path / "in.safetensors"), str(tmp_path / "x.dqkv")]
    failures = ((MemoryError(), "no-memory"), (OSError(errno.EIO, "I/O error"), "io"), (KeyError("x"), "internal"))
    for error, code in failures:

        def fail(*_: object, _error: Exception = error, **__: object) -> NoReturn:
            raise _error

        with monkeypatch.context() as patch:
            patch.setattr("dquantcodec.tensors.stored.StoredTensor.read", fail)
            assert main(argv) == 1
            assert complaint(capsys)[0].endswith(f"[{code}]")
            with pytest.raises(type(error)):
                main([*argv, "--debug"])
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_caches_that_are_not_the_same(tmp_path: Path, coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arrays, code, says in (
        (cache((1, 2, 151, 64)), "compare-mismatch", "1 x 151 tokens, the file 150"),
        (cache((2, 2, 150, 64)), "compare-mismatch", "2 x 150 tokens"),
        (cache((1, 4, 150, 64)), "compare-mismatch", "4 KV heads of 64"),
        (cache(layers=(1,)), "layer-missing", "no layer 0"),
    ):
        save_file(arrays, tmp_path / "other.safetensors")
        assert run("compare", tmp_path / "other.safetensors", coded) == 1
        line, _ = complaint(capsys)
        assert f"[{code}]" in line
        assert says in line


def test_queries_that_do_not_fit(tmp_path: Path, coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shape in ((1, 3, 8, 64), (1, 4, 8, 32), (1, 4, 200, 64)):
        save_file({"layers.0.query": np.zeros(shape, np.float16)}, tmp_path / "q.safetensors")
        argv = ("compare", tmp_path / "good.safetensors", coded, "--queries", tmp_path / "q.safetensors")
        assert run(*argv) == 1
        line, _ = complaint(capsys)
        assert line.endswith("[query-mismatch]")
        assert str(tmp_path / "q.safetensors") in line
    argv = ("compare", tmp_path / "good.safetensors", coded, "--queries", tmp_path / "good.safetensors")
    assert run(*argv) == 1
    assert complaint(capsys)[0].endswith("[names-unknown]")


def test_damaged_files(tmp_path: Path, coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = coded.read_bytes()
    broken = tmp_path / "broken.dqkv"
    for damage in (b"", whole[:50], whole[:3000], bytes(len(whole)), whole[:4096] + bytes(len(whole) - 4096)):
        broken.write_bytes(damage)
        for argv in (("info", broken), ("decompress", broken, tmp_path / "out.safetensors")):
            status = run(*argv)
            captured = capsys.readouterr()
            assert "Traceback" not in captured.err
            if status:
                assert str(broken) in captured.err.splitlines()[0]
        assert run("verify", broken) == 1
        lines = capsys.readouterr().out.splitlines()
        assert all(line.startswith(f"{broken}: ") and line.endswith("]") for line in lines[:-1])
        assert lines[-1].endswith(("finding", "findings"))
    # One bit in the middle of a page: found by verify, refused by decompress.
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    broken.write_bytes(flipped)
    assert run("verify", broken) == 1
    assert "[" in capsys.readouterr().out


def test_a_file_that_lost_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(cache(), tmp_path / "in.safetensors")
    torn, out = tmp_path / "torn.dqkv", tmp_path / "out.safetensors"
    assert run("compress", "--quiet", tmp_path / "in.safetensors", torn, "--sinks", 7, "--recent", 0) == 0
    torn.write_bytes(torn.read_bytes()[:-5000])
    assert run("decompress", torn, out) == 1
    line, _ = complaint(capsys)
    assert line.endswith("[log-torn]")
    assert "--accept-torn" in line
    assert not out.exists()
    assert run("decompress", torn, out, "--accept-torn", "--quiet") == 0
    assert load_file(out)["layers.0.key"].shape[2] in range(7, 150)
    assert run("info", torn) == 0
    assert "lost its end" in capsys.readouterr().out
    assert run("verify", torn) == 1
