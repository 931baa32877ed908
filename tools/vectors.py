"""Make the vectors in ``formats/vectors``: small files that every reader of the format must read or must refuse.

    python tools/vectors.py [--check] [OUT]

The vectors are frozen: what stands in ``formats/vectors`` is kept for ever and only added to (docs/compatibility.md).
This script shows how they were made; the encoders it uses may choose otherwise in later versions, and that changes no
vector.  ``--check`` says which files it would make differently now, and writes nothing.

OUT gets ``valid/*.dqkv``, ``invalid/*.dqkv`` and ``manifest.json``:

    valid     sha256, what it shows, tokens of every sequence, what verification finds, and for every sequence, layer
              and kind the SHA-256 of its FP32 values, little-endian, [token][head][value], NaN as 7FC00000
    invalid   sha256, what is wrong, the reason code and its class, and where it shows: at ``open``, when all tokens are
              ``read``, or by ``verify`` alone
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from invalid_vectors import invalid
from valid_vectors import valid

import dquantcodec.file as dqkv
from dquantcodec.errors import DQuantError

ROOT = Path(__file__).parents[1]


def digest(values: Any) -> str:
    values = np.where(np.isnan(values), np.float32("nan"), values).astype("<f4")
    return hashlib.sha256(values.tobytes()).hexdigest()


def read_all(reader: Any) -> dict[str, str]:
    """Digests of everything a file holds."""
    found = {}
    for number, sequence in enumerate(reader.sequences):
        for place, layer in enumerate(sequence.layers):
            if sequence.tokens and layer.spec.storage != "absent":
                for kind in ("key", "value"):
                    found[f"{number}/{place}/{kind}"] = digest(getattr(layer, kind).read())
    return found


def describe_valid(path: Path) -> dict[str, Any]:
    with dqkv.open(path) as reader:
        tokens = {str(n): sequence.tokens for n, sequence in enumerate(reader.sequences) if sequence.tokens}
        findings = sorted({finding.code for finding in reader.verify()})
        return {"tokens": tokens, "findings": findings, "values": read_all(reader)}


def describe_invalid(path: Path) -> dict[str, Any]:
    """Where the library refuses a file, and with what code."""
    try:
        with dqkv.open(path) as reader:
            findings = sorted({finding.code for finding in reader.verify()})
            try:
                read_all(reader)
            except DQuantError as error:
                return {"at": "read", "code": error.code, "findings": findings}
            return {"at": "verify", "findings": findings}
    except DQuantError as error:
        return {"at": "open", "code": error.code}


def make(out: Path) -> dict[str, Any]:
    """Write everything into ``out`` and return the manifest."""
    manifest: dict[str, Any] = {"format": "1.0", "valid": {}, "invalid": {}}
    for folder in ("valid", "invalid"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for vector in valid():
        path = out / "valid" / f"{vector.name}.dqkv"
        assert vector.name not in manifest["valid"], vector.name
        path.write_bytes(vector.data)
        found = describe_valid(path)
        assert tuple(found["findings"]) == vector.findings, (vector.name, found["findings"])
        manifest["valid"][vector.name] = {
            "sha256": hashlib.sha256(vector.data).hexdigest(),
            "shows": vector.shows,
            **found,
        }
    for wrong in invalid():
        path = out / "invalid" / f"{wrong.name}.dqkv"
        assert wrong.name not in manifest["invalid"], wrong.name
        path.write_bytes(wrong.data)
        found = describe_invalid(path)
        assert found["at"] == wrong.at and wrong.code in (found.get("code"), *found.get("findings", ())), (
            wrong.name,
            found,
        )
        manifest["invalid"][wrong.name] = {
            "sha256": hashlib.sha256(wrong.data).hexdigest(), "shows": wrong.shows, "at": wrong.at, "code": wrong.code,
            "findings": found.get("findings", []),
        }  # fmt: skip
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return manifest


def main(arguments: list[str]) -> int:
    import tempfile

    check = "--check" in arguments
    paths = [argument for argument in arguments if argument != "--check"]
    kept = Path(paths[0]) if paths else ROOT / "formats" / "vectors"
    if not check:
        manifest = make(kept)
        print(f"{len(manifest['valid'])} valid, {len(manifest['invalid'])} invalid")
        return 0
    frozen = json.loads((kept / "manifest.json").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        now = make(Path(folder))
    changed = [
        f"{side}/{name}"
        for side in ("valid", "invalid")
        for name in sorted({*frozen[side], *now[side]})
        if frozen[side].get(name) != now[side].get(name)
    ]
    print("\n".join(changed) or "nothing would be made differently")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
