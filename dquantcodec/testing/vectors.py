"""Vector files: one case that an implementation failed, as JSON that people can read and :func:`replay` runs again.

    format     "dquantcodec vector 1"
    property   which property failed (a function of :mod:`dquantcodec.testing.properties`)
    why        the sentence it failed with; for people
    strict     whether the decoder was asked to check padding (containers only)
    case       "container", "page" or "tensors", and with it

    container: plan (fields of ContainerPlan), data (the container's bytes, hexadecimal),
               symbols (what it holds, or null), finding (what the specification says of it)
    page:      header (a .dqkv header block whose one layer has the plan), page (bytes), tokens
    tensors:   header, keys and values (float32, [tokens, heads, head size]), tokens

Byte strings of pages and tensors are deflated (RFC 1950) and in base 64.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError
from ..file.header import Header, parse_header
from ..file.info import Info
from ..file.layer import Layer
from ..plan import Plan
from .containers import ContainerPlan, plain_decode
from .strategies import ContainerCase, PageCase, TensorCase

FORMAT = "dquantcodec vector 1"

Case = ContainerCase | PageCase | TensorCase


def pack_case(case: Case) -> dict[str, Any]:
    """The fields of a case that a vector file holds."""
    if isinstance(case, ContainerCase):
        symbols, finding = plain_decode(case.plan, case.data)
        found = case.symbols if case.symbols is not None else symbols
        return {
            "case": "container", "plan": case.plan.to_json(), "data": case.data.hex(),
            "symbols": None if found is None else [int(m) for m in found], "finding": finding,
        }  # fmt: skip
    header = _deflated(_header(case.plan))
    if isinstance(case, PageCase):
        return {"case": "page", "header": header, "page": _deflated(case.page), "tokens": case.tokens}
    keys, values = (_deflated(x.astype("<f4").tobytes()) for x in (case.keys, case.values))
    return {"case": "tensors", "header": header, "keys": keys, "values": values, "tokens": len(case.keys)}


def unpack_case(fields: dict[str, Any]) -> Case:
    """The reverse."""
    if fields["case"] == "container":
        plan = ContainerPlan.from_json(fields["plan"])
        sound = fields["finding"] is None
        return ContainerCase(plan, fields["symbols"] if sound else None, bytes.fromhex(fields["data"]))
    found = parse_header(memoryview(_inflated(fields["header"]))).layers[0].plan
    assert found is not None
    if fields["case"] == "page":
        return PageCase(found, _inflated(fields["page"]), fields["tokens"])
    shape = (fields["tokens"], found.kv_heads, found.head_dim)
    keys, values = (np.frombuffer(_inflated(fields[kind]), "<f4").reshape(shape) for kind in ("keys", "values"))
    return TensorCase(found, keys.astype(np.float32), values.astype(np.float32))


def write_vector(path: Path, name: str, why: str, strict: bool, case: Case) -> None:
    """A vector file of ``case``, which failed the property ``name``."""
    fields = {"format": FORMAT, "property": name, "why": why, "strict": strict, **pack_case(case)}
    path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def read_vector(path: Path) -> tuple[str, bool, Case]:
    """Property, strictness and case of a vector file.  Raises :class:`FormatError` (``vector-format``)."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields.get("format") != FORMAT:
        raise FormatError(f"{path} is no {FORMAT!r} file but {fields.get('format')!r}", code="vector-format")
    return fields["property"], fields["strict"], unpack_case(fields)


def _header(plan: Plan) -> bytes:
    layer = Layer(plan.kv_heads, plan.head_dim, "float32", plan, number=0)
    return Header(bytes(16), (layer,), 1, 0, 0, Info()).pack()


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _inflated(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
