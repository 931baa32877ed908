"""A second reader, written from ``formats/dqkv.md`` alone, gets the same bits out of a file as the library.

Slow and plain on purpose: nothing here is shared with the library, and every function is one clause.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from file_support import tensors, write

import dquantcodec.file as dqkv
from dquantcodec.file import Layer
from dquantcodec.profile import PROFILES, Profile, StreamProfile

F32 = np.float32
DTYPES = {1: np.dtype(ml_dtypes.bfloat16), 2: np.dtype("<f2"), 3: np.dtype("<f4")}


def align(x: int, k: int) -> int:
    return -(-x // k) * k


def crc32c(data: bytes) -> int:
    """Clause 1, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def read_header(data: bytes) -> dict[str, Any]:
    """Clause 3."""
    assert data[:8] == bytes.fromhex("8944514B0D0A1A0A") and struct.unpack_from("<HH", data, 8) == (0, 9)
    (size,) = struct.unpack_from("<I", data, 12)
    assert crc32c(data[:124] + data[128:size]) == struct.unpack_from("<I", data, 124)[0]
    layers, _, profiles, tables, signs = struct.unpack_from("<5I", data, 48)
    profiles_at, layers_at, tables_at, signs_at, json_at, json_bytes = struct.unpack_from("<6I", data, 76)
    stored_tables, at = [], tables_at
    for _ in range(tables):
        letters, precision = struct.unpack_from("<II", data, at)
        stored_tables.append(list(struct.unpack_from(f"<{letters}H", data, at + 8)))
        assert sum(stored_tables[-1]) == 2**precision and min(stored_tables[-1]) > 0
        at += align(8 + 2 * letters, 8)
    assert at == signs_at
    stored_signs = []
    for _ in range(signs):
        (bits,) = struct.unpack_from("<I", data, at)
        stored_signs.append([-1 if data[at + 8 + i // 8] >> i % 8 & 1 else 1 for i in range(bits)])
        at += 8 + align(-(-bits // 8), 8)
    classes, groupings, classes_at, groupings_at = struct.unpack_from("<4I", data, 100)
    assert at == classes_at
    stored_classes = []
    for _ in range(classes):
        q, zero, gain = struct.unpack_from("<BBH", data, at)
        upper = struct.unpack_from(f"<{q + 1}H", data, at + 4)
        assert zero == 0 and min(upper) > 0 and max(upper) == upper[0] and 2 * sum(upper) - upper[0] == 2**14
        stored_classes.append({"q": q, "gain": gain, "f": [*upper[:0:-1], *upper]})
        at += align(4 + 2 * (q + 1), 8)
    assert at == groupings_at
    stored_groupings = []
    for _ in range(groupings):
        grouping, at = read_grouping(data, at, stored_classes)
        stored_groupings.append(grouping)
    assert at == json_at and align(json_at + json_bytes, 4096) == size
    plans = []
    for number in range(profiles):
        at = profiles_at + 192 * number
        plan: dict[str, Any] = dict(zip(("H", "D", "W"), struct.unpack_from("<III", data, at)))
        for kind, base in (("key", at + 64), ("value", at + 128)):
            coder, _, grid, k, m, p, s, mean = struct.unpack_from("<8B", data, base)
            words, table, rotation, _, vector = struct.unpack_from("<HHBBH", data, base + 8)
            plan[kind] = {"coder": coder, "S": s, "mean": mean, "words": words, "grid": grid}
            if rotation == 1:
                plan[kind] |= {"k": k, "M": m, "p": p, "f": stored_tables[table]}
            else:
                (number_of_grouping,) = struct.unpack_from("<H", data, base + 26)
                assert (rotation, coder, grid, k, m, p, table) == (0, 2, 1, 0, 0, 0, 0)
                plan[kind]["grouping"] = stored_groupings[number_of_grouping]
                assert [plan[kind]["grouping"][x] for x in "HD"] == [plan["H"], plan["D"]]
            plan["signs"] = np.array(stored_signs[vector], F32).reshape(plan["H"], plan["D"])
        plans.append(plan)
    entries = []
    for number in range(layers):
        storage, dtype, profile, h, d, _, groups = struct.unpack_from("<BBHIIIH", data, layers_at + 32 * number)
        named = plans[profile : profile + groups]
        assert (sum(plan["H"] for plan in named) == h) == (storage == 1)
        entries.append({"storage": storage, "dtype": DTYPES[dtype], "H": h, "D": d, "plans": named})
    return {"size": size, "layers": entries}


def read_grouping(data: bytes, at: int, classes: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """Clause 3.8, and the code of every table by clause 6.6."""
    h, d, z, g, tables, *zeros = struct.unpack_from("<HHHH8B", data, at)
    assert not any(zeros)
    start, at = at, at + 16
    found: dict[str, Any] = {"H": h, "D": d, "tables": []}
    for _ in range(tables):
        p, f, zero, *numbers = struct.unpack_from("<BBH4H", data, at)
        assert zero == 0 and numbers[f:] == [0xFFFF] * (4 - f)
        fields = [classes[number] for number in numbers[:f]]
        weights = [1]
        for field in fields:
            weights = [a * b for b in field["f"] for a in weights]
        found["tables"].append({"fields": fields, "codes": canonical(package_merge(weights, p))})
        at += 12
    found["shapes"] = [struct.unpack_from("<BB", data, at + 2 * i) for i in range(g)]
    at += 2 * g
    assert sum(letters * fields for letters, fields in found["shapes"]) == z
    found["heads"] = struct.unpack_from(f"<{h}H", data, at)
    at += 2 * h
    found["choice"] = [data[at + g * i : at + g * (i + 1)] for i in range(h)]
    at += h * g
    width, form = (2, "H") if d > 256 else (1, "B")
    found["channels"] = [struct.unpack_from(f"<{z}{form}", data, at + width * z * i) for i in range(h)]
    at += width * h * z
    end = start + align(at - start, 8)
    assert not any(data[at:end]) and sorted(found["heads"]) == list(range(h))
    return found, end


def package_merge(weights: list[int], p: int) -> list[int]:
    """Clause 6.6; packages are pairs of -1 and their weight."""
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    leaves = [(weights[i], i) for i in order]
    lists = [leaves]
    while len(lists) < p:
        last = [weight for weight, _ in lists[-1]]
        packages = [(a + b, -1) for a, b in zip(last[::2], last[1::2])]
        # Stable: among equals leaves stand first, and packages in the order of their pairs.
        lists.append(sorted(leaves + packages, key=lambda item: item[0]))
    lengths, taken = [0] * len(weights), 2 * len(weights) - 2
    for items in lists[::-1]:
        k = [letter >= 0 for _, letter in items[:taken]].count(True)
        for i in order[:k]:
            lengths[i] += 1
        taken = 2 * (taken - k)
    return lengths


def read_file(data: bytes) -> list[dict[str, list[Any]]]:
    """Clauses 2, 4.3 and 4.4: per layer and kind, float32 rows of all records in order."""
    header = read_header(data)
    layers = header["layers"]
    out: list[dict[str, list[Any]]] = [{"key": [], "value": []} for _ in layers]
    coded = [(i, plan) for i, layer in enumerate(layers) for plan in layer["plans"]]
    offset = header["size"]
    while offset < len(data):
        assert data[offset : offset + 4] == b"DQKR"
        kind, _, payload, _, tokens, _, _, flags = struct.unpack_from("<HHQQIIII", data, offset + 4)
        assert crc32c(data[offset : offset + 60]) == struct.unpack_from("<I", data, offset + 60)[0]
        (table_crc,) = struct.unpack_from("<I", data, offset + 52)
        body = data[offset + 64 : offset + 64 + payload]
        if kind == 1:
            window = coded[0][1]["W"]
            count = -(-tokens // window)
            at = align(4 * len(coded) * count, 64)
            assert crc32c(body[:at]) == table_crc
            crcs = iter(struct.unpack_from(f"<{len(coded) * count}I", body))
            groups: dict[tuple[int, str], list[Any]] = {(i, name): [] for i, _ in coded for name in out[i]}
            for i, plan in coded:
                windows = []
                for w in range(count):
                    used = min(window, tokens - w * window)
                    size = page_sizes(plan)[0] + -(-used // 32) * page_sizes(plan)[1]
                    page = body[at : at + size]
                    assert crc32c(page) == next(crcs)
                    windows.append(read_page(page, plan, used))
                    at += size
                for name in out[i]:
                    groups[i, name].append(np.concatenate([rows[name] for rows in windows]))
            for (i, name), parts in groups.items():
                out[i][name].append(np.concatenate(parts, axis=1))
            assert at == payload
        elif kind == 2:
            stored = [
                i for i, layer in enumerate(layers) if layer["storage"] == 2 or (not flags and layer["storage"] == 1)
            ]
            at = align(32 * len(stored), 64)
            for j, (i, name) in enumerate((i, name) for i in stored for name in ("key", "value")):
                encoding, crc, size = struct.unpack_from("<B3xIQ", body, 16 * j)
                assert crc32c(body[at : at + size]) == crc
                out[i][name].append(read_rows(body[at : at + size], encoding, tokens, layers[i]))
                at += align(size, 64)
            assert at == payload
        offset = align(offset + 64 + payload, 4096)
    return out


def read_rows(block: bytes, encoding: int, tokens: int, layer: dict[str, Any]) -> Any:
    """Clause 7."""
    values, size = tokens * layer["H"] * layer["D"], layer["dtype"].itemsize
    if encoding == 1:
        lengths = struct.unpack_from(f"<{size}I", block)
        raw, at = bytearray(values * size), 4 * size
        for b, length in enumerate(lengths):
            plane = block[at : at + length]
            raw[b::size] = plane if length == values else zstandard.ZstdDecompressor().decompress(plane)
            at += length
        block = bytes(raw)
    return np.frombuffer(block, layer["dtype"]).reshape(tokens, layer["H"], layer["D"]).astype(F32)


def page_sizes(plan: dict[str, Any]) -> tuple[int, int]:
    """Clause 5.1: head and tile."""
    means = sum(2 * plan["H"] + plan["H"] * plan["D"] for kind in ("key", "value") if plan[kind]["mean"])
    return align(4 + means, 64), sum(32 * container(plan[kind]) + affine(plan[kind]) for kind in ("key", "value"))


def affine(stream: dict[str, Any]) -> int:
    return 64 if stream["grid"] == 1 else 128


def container(stream: dict[str, Any]) -> int:
    return int(stream["S"] * stream["words"] * (2 if stream["coder"] == 1 else 4))


def read_page(page: bytes, plan: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Clauses 5 and 6.4."""
    h, d = plan["H"], plan["D"]
    head, tile = page_sizes(plan)
    out = {}
    mean_at, words_at = 4, 0
    for kind, exponent_at in (("key", 0), ("value", 2)):
        stream = plan[kind]
        (exponent,) = struct.unpack_from("<h", page, exponent_at)
        mean = np.zeros((h, d), F32)
        if stream["mean"]:
            scale = np.frombuffer(page, "<f2", h, mean_at).astype(F32)
            mean = scale[:, None] * np.frombuffer(page, np.int8, h * d, mean_at + 2 * h).reshape(h, d).astype(F32)
            mean_at += 2 * h + h * d
        rows = np.zeros((tokens, h, d), F32)
        for t in range(tokens):
            base = head + t // 32 * tile + words_at
            if "grouping" in stream:
                y = read_groups(page, base, t % 32, stream).reshape(h, d)
                rows[t] = y + mean if stream["mean"] else y
                continue
            width = 2 if stream["coder"] == 1 else 4
            symbols: list[int] = []
            for j in range(stream["S"]):
                words = [
                    int.from_bytes(page[at : at + width], "little")
                    for at in (base + width * ((j * stream["words"] + w) * 32 + t % 32) for w in range(stream["words"]))
                ]
                letters = h // stream["S"] * -(-d // stream["k"])
                coded = (
                    read_rans(words, stream, letters) if stream["coder"] == 1 else read_prefix(words, stream, letters)
                )
                symbols += to_symbols(coded, stream, d)
            at = base + 32 * container(stream)
            if stream["grid"] == 1:
                (scale,) = np.frombuffer(page, "<f2", 1, at + 2 * (t % 32)).astype(F32)
                offset = F32(-(stream["M"] - 1) / 2) * scale
            else:
                offset, scale = np.frombuffer(page, "<f2", 2, at + 4 * (t % 32)).astype(F32)
            y = (offset + scale * np.array(symbols, F32)).reshape(h, d)
            if stream["mean"]:
                y = y + mean
            rows[t] = rotate_back(y) * plan["signs"]
        out[kind] = np.ldexp(rows.astype(np.float64), exponent).astype(F32)
        words_at += 32 * container(stream) + affine(stream)
    return out


def read_rans(words: list[int], stream: dict[str, Any], letters: int) -> list[int]:
    """Clause 6.2."""
    f, p = stream["f"], stream["p"]
    slots = [letter for letter, count in enumerate(f) for _ in range(count)]
    c = [sum(f[:letter]) for letter in range(len(f))]
    x, following, out = words[0] << 16 | words[1], 2, []
    for _ in range(letters):
        slot = x % 2**p
        letter = slots[slot]
        x = f[letter] * (x >> p) + slot - c[letter]
        if x < 65536:
            x, following = x << 16 | words[following], following + 1
        out.append(letter)
    assert x == 65536 and not any(words[following:])
    return out


def read_prefix(words: list[int], stream: dict[str, Any], letters: int) -> list[int]:
    """Clause 6.3."""
    codes = canonical([stream["p"] - (count.bit_length() - 1) for count in stream["f"]])
    bits = "".join(f"{word:032b}"[::-1] for word in words)
    at, out = 1, []
    for _ in range(letters):
        length = next(n for n in range(1, 16) if bits[at : at + n] in codes)
        out.append(codes[bits[at : at + length]])
        at += length
    assert bits[0] == "0" and "1" not in bits[at:]
    return out


def canonical(lengths: list[int]) -> dict[str, int]:
    """Clause 6.3: the letter of every code."""
    codes, code, before = {}, 0, 0
    for number, letter in enumerate(sorted(range(len(lengths)), key=lambda i: (lengths[i], i))):
        code = (code + 1 if number else 0) << (lengths[letter] - before)
        before = lengths[letter]
        codes[f"{code:0{before}b}"] = letter
    return codes


def read_groups(page: bytes, base: int, lane: int, stream: dict[str, Any]) -> Any:
    """Clauses 6.4 and 6.6: ``y`` of a token, float32 ``[H * D]``."""
    grouping, words = stream["grouping"], stream["words"]
    (scale,) = np.frombuffer(page, "<f2", 1, base + 32 * container(stream) + 2 * lane).astype(F32)
    y = np.zeros(grouping["H"] * grouping["D"], F32)
    for place, head in enumerate(grouping["heads"]):
        part, inside = divmod(place, grouping["H"] // stream["S"])
        if inside == 0:
            column = [base + 4 * ((part * words + w) * 32 + lane) for w in range(words)]
            bits = "".join(f"{int.from_bytes(page[i : i + 4], 'little'):032b}"[::-1] for i in column)
            at = 1
        channels = list(grouping["channels"][place])
        for (letters, fields), number in zip(grouping["shapes"], grouping["choice"][place]):
            table = grouping["tables"][number]
            mine, channels = channels[: letters * fields], channels[letters * fields :]
            for i in range(letters):
                length = next(n for n in range(1, 15) if bits[at : at + n] in table["codes"])
                letter = table["codes"][bits[at : at + length]]
                at += length
                for f, field in enumerate(table["fields"]):
                    letter, m = divmod(letter, 2 * field["q"] + 1)
                    level = F32(field["gain"]) / F32(256) * F32(m - field["q"])
                    y[head * grouping["D"] + mine[f * letters + i]] = scale * level
        if inside == grouping["H"] // stream["S"] - 1:
            assert bits[0] == "0" and "1" not in bits[at:]
    return y


def to_symbols(letters: list[int], stream: dict[str, Any], d: int) -> list[int]:
    """Clause 6.1."""
    out: list[int] = []
    head: list[int] = []
    for letter in letters:
        head += [letter // stream["M"] ** i % stream["M"] for i in range(stream["k"])]
        if len(head) >= d:
            out += head[:d]
            head = []
    return out


PALEY = {3: (11, 1), 5: (19, 1), 7: (13, 2), 9: (17, 2), 11: (43, 1), 15: (59, 1)}


def rotate_back(y: Any) -> Any:
    """Clause 6.5 without the signs; ``y`` is float32 ``[H, D]``."""
    out = y.copy()
    d, start = y.shape[1], 0
    while start < d:
        order = max(n for n in range(1, d - start + 1) if odd_part(n) == 1 or (odd_part(n) in PALEY and n % 4 == 0))
        base = paley(odd_part(order))
        run = order // len(base)
        for row in out[:, start : start + order]:
            h = 1
            while h < run:
                for i in range(0, order, 2 * h):
                    for j in range(i, i + h):
                        row[j], row[j + h] = row[j] + row[j + h], row[j] - row[j + h]
                h *= 2
            if len(base) > 1:
                for c in range(run):
                    u = row[c::run].copy()
                    for i in range(len(base)):
                        total = F32(base[0][i]) * u[0]
                        for k in range(1, len(base)):
                            total = total + F32(base[k][i]) * u[k]
                        row[i * run + c] = total
            row *= F32(1 / np.sqrt(np.float64(order)))
        start += order
    return out


def odd_part(n: int) -> int:
    return n // (n & -n)


def paley(r: int) -> Any:
    if r == 1:
        return np.ones((1, 1), int)
    q, construction = PALEY[r]
    squares = {a * a % q for a in range(1, q)}
    c = np.zeros((q + 1, q + 1), int)
    c[0, 1:] = 1
    c[1:, 0] = -1 if construction == 1 else 1
    for i in range(q):
        for j in range(q):
            a = (j - i) % q
            c[1 + i, 1 + j] = 0 if a == 0 else 1 if a in squares else -1
    one = np.eye(q + 1, dtype=int)
    if construction == 1:
        return c + one
    return np.kron(c, [[1, 1], [1, -1]]) + np.kron(one, [[1, -1], [-1, -1]])


def test_checksum() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("r", sorted(PALEY))
def test_paley_matrices(r: int) -> None:
    p = paley(r)
    assert len(p) == 4 * r and (p @ p.T == 4 * r * np.eye(4 * r)).all()


BOTH_MEANS = Profile(
    key=StreamProfile(5, 600, "rans", precision=11, letter=2, mean=True),
    value=StreamProfile(4, 500, precision=9, letter=3, mean=True),
    window=64,
    substreams=4,
    name="both means",
)


#: Values rotated, and pages of another length.
FOUR = replace(
    PROFILES["2.26"], substreams=4, window=128, value=replace(PROFILES["2.26"].value, classes=None), name="four"
)


@pytest.mark.parametrize(
    ("layers", "factor"),
    [
        ([Layer(2, 64, "bfloat16", "2.26"), Layer(1, 3, "float32", storage="exact"), Layer(1, 1, storage="absent")], 1),
        ([Layer(3, 40, "float16", "paper-2.26"), Layer(3, 40, "float16", "paper-1.96")], 1),
        ([Layer(1, dim, "float32", BOTH_MEANS) for dim in (1, 7, 12, 80, 100)], 1),
        ([Layer(1, dim, "float32", BOTH_MEANS) for dim in (28, 36, 44, 60)], 1e9),
        ([Layer(2, 64, "bfloat16", "2.26"), Layer(4, 20, "float32", FOUR), Layer(3, 80, "float16", "1.96")], 1),
        ([Layer(4, 64, "bfloat16", "2.26", head_groups=2), Layer(4, 80, "float16", "paper-2.26", head_groups=4)], 1),
        ([Layer(1, 300, "float32", "3.0"), Layer(1, 256, "bfloat16", "1.96"), Layer(5, 7, "float32", "1.96")], 1e9),
    ],
    ids=["prefix", "rans", "both-means", "odd-orders", "fitted", "head-groups", "fitted-wide"],
)
def test_the_specification_is_enough(tmp_path: Path, layers: list[Layer], factor: float) -> None:
    fitted = [layer for layer in layers if layer.storage == "coded" and layer.fitted_profile]
    pairs = tensors(layers, 90 if fitted else 150)
    if fitted:
        pairs = [
            pair
            if pair[0] is None
            else tuple((array * np.geomspace(0.1, 4, array.shape[2])).astype(array.dtype) for array in pair)  # type: ignore[misc, union-attr]
            for pair in pairs
        ]
    if factor != 1:
        pairs = [tuple((array * np.float32(factor)).astype(array.dtype) for array in pair) for pair in pairs]  # type: ignore[misc, union-attr]
    data = write(tmp_path / "x.dqkv", layers, pairs, sinks=3, recent=9, _record_target=1)
    mine = read_file(data)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        grouped = [plan for layer in reader.layers for plan in layer.plans if plan.key.grouping]
        assert len(grouped) >= len(fitted) - 1 and (not fitted or grouped)
        for place, layer in enumerate(layers):
            if layer.storage == "absent":
                continue
            for kind in ("key", "value"):
                theirs = getattr(reader.layers[place], kind).read()
                rows = np.concatenate(mine[place][kind])
                assert rows.tobytes() == theirs.tobytes()
