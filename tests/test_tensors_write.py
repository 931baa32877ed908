"""Writing safetensors piece by piece, and what is left when it goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from dquantcodec.errors import InputError
from dquantcodec.tensors import LAYOUTS, Geometry, OutputTensor, SafetensorsWriter


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_in_any_order_make_the_whole(tmp_path: Path, layout: str, dtype: Any) -> None:
    sequences = 2 if "B" in layout else 1
    geometry = Geometry(sequences, 3, 50, 4)
    tensors = [OutputTensor(name, np.dtype(dtype).name, layout, geometry) for name in ("b", "a")]
    data = np.random.default_rng(2).standard_normal((2, sequences, 50, 3, 4)).astype(dtype)
    with SafetensorsWriter(tmp_path / "x.safetensors", tensors, {"note": "ü"}) as writer:
        for index, name in enumerate("ba"):
            for sequence in range(sequences):
                for start, stop in ((30, 50), (0, 7), (7, 30)):
                    writer.write(name, sequence, start, data[index, sequence, start:stop])
    loaded = load_file(tmp_path / "x.safetensors")
    for index, name in enumerate("ba"):
        assert loaded[name].shape == geometry.shape(layout)
        assert loaded[name].dtype == dtype
        for sequence in range(sequences):
            whole = loaded[name][sequence] if "B" in layout else loaded[name]
            expected = data[index, sequence]
            assert (whole == (expected if layout.endswith("THD") else expected.transpose(1, 0, 2))).all()
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        assert file.metadata() == {"note": "ü"}
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


TENSORS = [OutputTensor("a", "float16", "HTD", Geometry(1, 2, 5, 4))]


def test_an_exception_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(path, TENSORS, {}):
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with SafetensorsWriter(path, TENSORS, {}):
        pass
    assert not load_file(path)["a"].any()


def test_a_failing_sync_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"), SafetensorsWriter(path, TENSORS, {}):
        pass
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.safetensors", tmp_path / "link.safetensors"
    target.write_text("old")
    link.symlink_to(target)
    with SafetensorsWriter(link, TENSORS, {}):
        pass
    assert link.is_symlink()
    assert load_file(target)["a"].shape == (2, 5, 4)


def test_equal_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        SafetensorsWriter(tmp_path / "x.safetensors", TENSORS * 2, {})
    assert caught.value.code == "tensor-duplicate"
    assert not list(tmp_path.iterdir())
