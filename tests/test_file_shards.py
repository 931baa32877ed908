"""Head groups: pages by rank, files cut and joined by copying, and what happens where copying is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_support import SMALL, part, same, tensors, with_header_crc, write
from hypothesis import given, settings
from hypothesis import strategies as st

import dquantcodec.file as dqkv
from dquantcodec.codec import Codec
from dquantcodec.compare import error_sums
from dquantcodec.errors import ChecksumError, DQuantError, FormatError, IdentityError, InputError
from dquantcodec.file import Layer, append, create, repack
from dquantcodec.file.reader import Reader
from dquantcodec.file.resharding import cut_groups, reshard
from dquantcodec.file.shards import Shards

#: Six heads can be cut into 1, 2, 3 and 6 parts, and so can everything else here.
HEADS = 6
LAYERS = [
    Layer(HEADS, 4, "float32", SMALL, head_groups=6),
    Layer(HEADS, 5, "bfloat16", storage="exact"),
    Layer(HEADS, 9, storage="absent"),
    Layer(2 * HEADS, 3, "float16", SMALL, number=9, head_groups=6),
]
#: Sequences of a batch, of any length: none, only exact tokens, pages cut at their end.
LENGTHS = [75, 0, 9, 140]


def written(path: Path, layers: Sequence[Layer] = LAYERS, lengths: Sequence[int] = LENGTHS, **options: Any) -> Path:
    options = {"sinks": 2, "recent": 10, "model": "m", "positions_start": 7, **options}
    with create(path, layers, sequences=len(lengths), **options) as writer:
        for sequence, length in enumerate(lengths):
            writer.append(*part(tensors(layers, length, sequence), 0, length), sequence=sequence)
    return path


def resharded(paths: Sequence[Path], folder: Path, ranks: int, **options: Any) -> list[Path]:
    folder.mkdir()
    outputs = [folder / f"{rank}.dqkv" for rank in range(ranks)]
    readers = [dqkv.open(path) for path in paths]
    try:
        assert reshard(readers, outputs, **options) == []
    finally:
        for reader in readers:
            reader.close()
    for output in outputs:
        with dqkv.open(output, mode="strict") as reader:
            assert list(reader.verify()) == []
    return outputs


def content(paths: Sequence[Path]) -> list[Any]:
    """All tokens as read and all pages as stored, heads of all files in order."""
    readers = sorted((dqkv.open(path) for path in paths), key=lambda reader: reader.header.info.shard)
    found = content_of(readers)
    for reader in readers:
        reader.close()
    return found


def content_of(readers: Sequence[Reader]) -> list[Any]:
    found: list[Any] = []
    for sequence in zip(*(reader.sequences for reader in readers)):
        for layers in zip(*(one.layers for one in sequence)):
            if layers[0].spec.storage == "absent":
                continue
            both = [[getattr(layer, kind)[:] for layer in layers] for kind in ("key", "value")]
            found += [np.concatenate(rows, axis=1) for rows in both]
            runs = [run for layer in layers for group in layer.groups for run in group.page_runs()]
            found += [run.pages.data for run in runs]
    return found


def equal(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("profile", [SMALL, "2.26"], ids=["rotated", "fitted"])
def test_a_group_is_a_codec_of_its_heads(tmp_path: Path, profile: Any) -> None:
    layers = [Layer(4, 32, "float32", profile, head_groups=2), Layer(4, 3, "float16", storage="exact")]
    pairs = tensors(layers, 150)
    write(tmp_path / "x.dqkv", layers, pairs, sinks=3, recent=20, threads=2)
    query = np.random.default_rng(0).standard_normal((2, 8, 32)).astype(np.float32)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        layer = reader.layers[0]
        assert layer.plan is None and len(layer.plans) == 2 and reader.header.info.shard == (0, 1)
        if profile == "2.26":
            assert not np.array_equal(layer.plans[0].key.grouping.order, layer.plans[1].key.grouping.order)
        parts = []
        for rank, heads in enumerate((slice(0, 2), slice(2, 4))):
            rows = [x[3:130, heads] for x in pairs[0] if x is not None]
            codec = Codec(layer.plans[rank])
            pages = codec.encode(*rows)
            assert same(layer.groups[rank].pages().data, pages.data)
            parts.append(codec.decode(pages))
            with dqkv.open(tmp_path / "x.dqkv", shard=(rank, 2), expect={"kv_heads": 2, "shard": [rank, 2]}) as mine:
                assert same(mine.layers[0].key[:], layer.key[:][:, heads]) and mine.layers[0].spec.kv_heads == 2
                assert same(mine.layers[1].value[5:9], reader.layers[1].value[5:9][:, heads])
                assert same(mine.layers[0].exact_rows()[1], layer.exact_rows()[1][:, heads])
                assert mine.pages_checked == len(pages.data)
                out, sums = mine.layers[0].attend(query[:, 4 * rank : 4 * rank + 4])
                whole, whole_sums = layer.attend(query)
                assert same(out, whole[:, 4 * rank : 4 * rank + 4])
                assert same(sums, whole_sums[:, 4 * rank : 4 * rank + 4])
        for kind, decoded in zip(("key", "value"), zip(*parts)):
            assert same(getattr(layer, kind)[3:130], np.concatenate(decoded, axis=1))
        with pytest.raises(InputError) as caught:
            layer.pages()
        assert caught.value.code == "layer-groups"
        with pytest.raises(InputError) as caught:
            layer.attend(query[:, :6])
        assert caught.value.code == "input-shape"


def test_a_rank_does_not_touch_the_pages_of_others(tmp_path: Path) -> None:
    path = written(tmp_path / "x.dqkv", [replace(LAYERS[0], head_groups=3)], [100])
    with dqkv.open(path) as reader:
        record = reader.sequences[0].layers[0].groups[1].stretches[1].record
        place = reader.rules.run.page_place(1, 0, record.header.tokens)
        wanted = [reader.layers[0].key[:][:, heads] for heads in (slice(0, 2), slice(4, 6))]
    data = bytearray(path.read_bytes())
    data[record.payload + place.offset + place.size // 2] ^= 1
    path.write_bytes(data)
    for rank, rows in zip((0, 2), wanted):
        with dqkv.open(path, shard=(rank, 3)) as reader:
            assert same(reader.layers[0].key[:], rows)
    with dqkv.open(path) as reader, pytest.raises(ChecksumError, match="layer 0, heads 2 to 3") as caught:
        reader.layers[0].key[:]
    assert caught.value.code == "page-crc"


@pytest.mark.parametrize(
    ("shard", "error", "code"),
    [
        ((0, 4), InputError, "shard-heads"),
        ((0, 2), InputError, "shard-groups"),
        ((3, 3), InputError, "info-field"),
    ],
)
def test_a_part_that_cannot_be_read(tmp_path: Path, shard: Any, error: type[DQuantError], code: str) -> None:
    path = written(tmp_path / "x.dqkv", [replace(LAYERS[0], head_groups=3)], [50])
    with pytest.raises(error) as caught, dqkv.open(path, shard=shard):
        pass
    assert caught.value.code == code


def test_a_rank_reads_its_part_of_a_part(tmp_path: Path) -> None:
    path = written(tmp_path / "x.dqkv", LAYERS, [50], shard=(1, 2))
    with dqkv.open(path) as whole, dqkv.open(path, shard=(3, 4)) as reader:
        assert same(reader.layers[0].key[:], whole.layers[0].key[:][:, 3:])
    with dqkv.open(path, shard=(3, 4)) as reader:
        repack(reader, tmp_path / "quarter.dqkv")
        reshard([reader], [tmp_path / "same.dqkv"])
        for name in ("quarter", "same"):
            assert equal(content([tmp_path / f"{name}.dqkv"]), content_of([reader]))
    with dqkv.open(tmp_path / "quarter.dqkv", expect={"shard": (3, 4), "kv_heads": [3, 3, 6]}) as reader:
        assert list(reader.verify()) == []
    for shard in ((1, 4), (0, 2), (0, 3), (0, 1)):
        with pytest.raises(IdentityError) as caught, dqkv.open(path, shard=shard):
            pass
        assert caught.value.code == "identity-shard"


@given(chain=st.lists(st.sampled_from([1, 2, 3, 6]), min_size=1, max_size=3), groups=st.sampled_from([6, 3]))
@settings(max_examples=8)
def test_copying_changes_no_bit(chain: list[int], groups: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("chain")
    layers = [replace(layer, head_groups=groups) if layer.storage == "coded" else layer for layer in LAYERS]
    paths = [written(folder / "x.dqkv", layers)]
    before = content(paths)
    allowed = [ranks for ranks in chain if groups % ranks == 0]
    for step, ranks in enumerate(allowed):
        paths = resharded(paths[::-1], folder / str(step), ranks)  # in any order
        for rank, path in enumerate(paths):
            with dqkv.open(path, expect={"model": "m", "positions_start": 7, "shard": (rank, ranks)}) as reader:
                assert [sequence.tokens for sequence in reader.sequences] == LENGTHS
                assert [layer.spec.number for layer in reader.layers] == [0, 1, 2, 9]
        assert equal(content(paths), before)


def test_files_that_ranks_wrote_are_one(tmp_path: Path) -> None:
    """Ranks fit their own plans; joined they are what one program with as many head groups writes."""
    layers = [Layer(6, 32, "float32", "2.26", head_groups=3), Layer(6, 3, "float16", storage="exact")]
    pairs = tensors(layers, 200)
    write(tmp_path / "whole.dqkv", layers, pairs, recent=20)
    ranks = []
    for rank in range(3):
        mine = [replace(layer, kv_heads=2, head_groups=1) for layer in layers]
        rows: Any = [tuple(x[:, 2 * rank : 2 * rank + 2] for x in pair if x is not None) for pair in pairs]
        ranks.append(tmp_path / f"{rank}.dqkv")
        write(ranks[-1], mine, rows, recent=20, shard=(rank, 3))
    joined = resharded(ranks, tmp_path / "joined", 1)
    assert equal(content(joined), content([tmp_path / "whole.dqkv"]))
    with dqkv.open(joined[0]) as reader:
        assert reader.header.info.shard == (0, 1) and len(reader.layers[0].plans) == 3


def test_unequal_groups_stay_as_they_are(tmp_path: Path) -> None:
    plans = [Layer(heads, 4, "float32", SMALL).resolved(0).plan for heads in (3, 1, 4)]
    path = written(tmp_path / "x.dqkv", [Layer(8, 4, "float32", plans)], [90])  # type: ignore[arg-type]
    outputs = resharded([path], tmp_path / "two", 2)
    with dqkv.open(outputs[0]) as reader:
        assert [plan.kv_heads for plan in reader.layers[0].plans] == [3, 1]
    assert equal(content(outputs), content([path]))


def test_a_file_that_was_appended_to_and_rewound(tmp_path: Path) -> None:
    layers = LAYERS[:2]
    path = written(tmp_path / "x.dqkv", layers, [75])
    rows = tensors(layers, 200, 5)
    with append(path) as writer:
        writer.append(*part(rows, 0, 90))
        writer.flush()
        writer.rewind(120)  # within a page
        writer.append(*part(rows, 90, 200))
    outputs = resharded([path], tmp_path / "three", 3)
    with dqkv.open(path) as reader:
        assert len(reader.layers[0].groups[0].page_runs()) > 1
        assert reader.tokens == 230
    assert [x.shape for x in content(outputs)] == [x.shape for x in content([path])]
    assert equal(content(resharded(outputs, tmp_path / "one", 1)), content(outputs))
    for a, b in zip(content(outputs), content([path])):
        if a.ndim == 3:
            assert same(a, b)


def test_what_cannot_be_copied_is_coded_again_only_when_asked(tmp_path: Path) -> None:
    # Layer 0 can be cut, layer 1 cannot; the second sequence has too little to code.
    layers = [Layer(4, 32, "float32", "2.26", head_groups=2), Layer(4, 32, "float32", "2.26", number=5)]
    path = written(tmp_path / "x.dqkv", layers, [300, 5])
    outputs = [tmp_path / "a.dqkv", tmp_path / "b.dqkv"]
    with dqkv.open(path) as reader:
        with pytest.raises(InputError, match=r"1 of 2 layers.*layer 5") as caught:
            reshard([reader], outputs)
        assert caught.value.code == "shard-groups" and caught.value.where["layers"] == [5]
        assert not any(output.exists() for output in outputs)
        recoded = reshard([reader], outputs, recode=True)
        assert [(one.layer, one.heads) for one in recoded] == [(5, range(0, 2)), (5, range(2, 4))]
        for rank, (output, told) in enumerate(zip(outputs, recoded)):
            heads = slice(2 * rank, 2 * rank + 2)
            with dqkv.open(output) as mine:
                assert list(mine.verify()) == []
                assert same(mine.layers[0].groups[0].pages().data, reader.layers[0].groups[rank].pages().data)
                old, new = reader.layers[1], mine.layers[1]
                assert (new.sinks, new.coded_tokens, new.recent) == (2, 288, 10)
                # As many container bytes as the heads had, to a word.
                assert abs(2 * new.plan.key.container - old.plan.key.container) <= 8
                for ends in (slice(0, 2), slice(290, 300)):
                    assert same(new.value[ends], old.value[ends][:, heads])
                assert same(mine.sequences[1].layers[1].key[:], reader.sequences[1].layers[1].key[:][:, heads])
                keys, values = (
                    error_sums(getattr(old, kind)[2:290][:, heads], getattr(new, kind)[2:290])
                    for kind in ("key", "value")
                )
                assert told.key_nmse == pytest.approx(keys.centred_nmse)
                assert told.value_nmse == pytest.approx(values.nmse)
                assert 0 < keys.centred_nmse < 0.2 and 0 < values.nmse < 0.3
    # Joining into larger groups likewise; a profile may be named.
    readers = [dqkv.open(output) for output in outputs]
    told = reshard(readers, [tmp_path / "c.dqkv"], head_groups=1, recode=True, profile="3.0")
    assert [(one.layer, one.heads) for one in told] == [(0, range(4)), (5, range(4))]
    with dqkv.open(tmp_path / "c.dqkv") as reader:
        assert [layer.plan.profile_name for layer in reader.layers] == ["3.0", "3.0"]
    for reader in readers:
        reader.close()


def test_pages_of_an_unknown_profile_need_one_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "x.dqkv", [replace(LAYERS[0], head_groups=1)], [50])
    with dqkv.open(path) as reader, pytest.raises(InputError) as caught:
        reshard([reader], [tmp_path / "a", tmp_path / "b"], recode=True)
    assert caught.value.code == "profile-unknown" and not (tmp_path / "a").exists()


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model": "n"},
    "revision": {"revision": "r"},
    "positions-start": {"positions_start": 8},
    "layers": {"layers": [*LAYERS[:3], replace(LAYERS[3], number=8)]},
    "kv-heads": {"layers": [replace(LAYERS[0], kv_heads=12), *LAYERS[1:]]},
    "head-dim": {"layers": [replace(LAYERS[0], head_dim=8), *LAYERS[1:]]},
    "dtype": {"layers": [replace(LAYERS[0], dtype="bfloat16"), *LAYERS[1:]]},
    "window": {
        "layers": [replace(x, profile=replace(SMALL, window=64)) if x.storage == "coded" else x for x in LAYERS]
    },
    "tokens": {"lengths": [75, 0, 9, 141]},
    "shard": {"shard": (0, 2)},
}


@pytest.mark.parametrize("field", OTHERS)
def test_files_that_do_not_belong_together(tmp_path: Path, field: str) -> None:
    paths = [
        written(tmp_path / "a.dqkv", shard=(0, 2)),
        written(tmp_path / "b.dqkv", **{"shard": (1, 2), **OTHERS[field]}),
    ]
    readers = [dqkv.open(path) for path in paths]
    with pytest.raises(IdentityError) as caught:
        reshard(readers, [tmp_path / "c.dqkv"])
    assert caught.value.code == f"identity-{field}" and not (tmp_path / "c.dqkv").exists()
    if field != "shard":
        assert "a.dqkv" in str(caught.value) and str(caught.value.where["path"]).endswith("b.dqkv")
    for reader in readers:
        reader.close()


def test_nothing_is_left_of_files_that_could_not_be_written(tmp_path: Path) -> None:
    path = written(tmp_path / "x.dqkv")
    with dqkv.open(path) as reader:
        record = next(s.record for s in reader.sequences[3].layers[0].stretches if s.paged)
    data = bytearray(path.read_bytes())
    data[record.payload + 600] ^= 1
    path.write_bytes(data)
    (tmp_path / "out").mkdir()
    with dqkv.open(path) as reader, pytest.raises(ChecksumError):
        reshard([reader], [tmp_path / "out" / name for name in "ab"])
    assert list((tmp_path / "out").iterdir()) == []


def entry(data: bytes, place: int, field: int, value: int) -> bytes:
    """A u16 of a layer entry changed, the header's checksum made right."""
    at = int.from_bytes(data[80:84], "little") + 32 * place + field
    return with_header_crc(data[:at] + value.to_bytes(2, "little") + data[at + 2 :])


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        (16, 5, "layer-profile"),  # heads that do not sum to the layer's
        (16, 7, "layer-groups"),
        (2, 1, "layer-profile"),  # the last one missing, or all
        (2, 9, "layer-profile"),
    ],
)
def test_hostile_head_groups(tmp_path: Path, field: int, value: int, code: str) -> None:
    path = written(tmp_path / "x.dqkv", [LAYERS[0]], [40])
    path.write_bytes(entry(path.read_bytes(), 0, field, value))
    with pytest.raises(FormatError) as caught, dqkv.open(path):
        pass
    assert caught.value.code == code


def test_many_groups_are_refused_before_they_are_built(tmp_path: Path) -> None:
    """Nine layers that name the same 1024 profiles: a few kilobytes that would become 9216 groups."""
    with pytest.raises(DQuantError) as caught:
        written(tmp_path / "x.dqkv", [Layer(1024, 2, "float32", SMALL, head_groups=1024, number=i) for i in range(9)])
    assert caught.value.code == "limit-groups"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"head_groups": 5}, "layer-groups"),
        ({"head_groups": 0}, "layer-groups"),
        ({"profile": [Layer(3, 4, profile=SMALL).resolved(0).plan]}, "layer-profile"),
        ({"profile": []}, "layer-profile"),
    ],
)
def test_layers_that_cannot_be(options: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError) as caught:
        Layer(**{"kv_heads": 12, "head_dim": 4, "profile": SMALL, **options})
    assert caught.value.code == code


def test_cutting_is_exact() -> None:
    groups = [slice(0, 3), slice(3, 8), slice(8, 12)]
    assert cut_groups(groups, slice(2, 10), None) == [slice(2, 3), slice(3, 8), slice(8, 10)]
    assert cut_groups(groups, slice(4, 8), 2) == [slice(4, 6), slice(6, 8)]
    with pytest.raises(InputError):
        cut_groups(groups, slice(4, 8), 3)


def test_shards_read_heads_across_files(tmp_path: Path) -> None:
    paths = resharded([written(tmp_path / "x.dqkv")], tmp_path / "three", 3)
    with dqkv.open(tmp_path / "x.dqkv") as whole:
        readers: list[Reader] = [dqkv.open(path) for path in paths]
        shards = Shards(readers)
        rows = shards.read(3, 3, "key", (50, 140), slice(3, 10), np.float16)
        assert same(rows, whole.sequences[3].layers[3].key[50:140][:, 3:10])
        for reader in readers:
            reader.close()
