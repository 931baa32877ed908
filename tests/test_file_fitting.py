"""Writers fit plans to the first tokens to be coded: which ones, whatever the portions, threads and sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_support import FILE_ID, SMALL, Pairs, expected, part, same, tensors, write
from hypothesis import given, settings
from hypothesis import strategies as st

import dquantcodec.file as dqkv
from dquantcodec.codec import Codec
from dquantcodec.errors import InputError
from dquantcodec.file import Layer, create
from dquantcodec.file.groupings import plan_bytes
from dquantcodec.fit import fit_plan
from dquantcodec.plan import Plan, make_plan
from dquantcodec.profile import PROFILES

#: Fitted layers, and others between them that are not.
LAYERS = [
    Layer(2, 16, "float32", "2.26"),
    Layer(1, 5, "float32", storage="exact"),
    Layer(2, 12, "bfloat16", "2.26"),
    Layer(3, 4, storage="absent"),
    Layer(2, 8, "float16", replace(SMALL, window=128)),
]
FITTED = (0, 2)


def spread(layers: list[Layer], tokens: int, seed: int = 0) -> Pairs:
    """As :func:`tensors`, channels of different variance, other ones in every sequence."""
    rng = np.random.default_rng(seed)
    scaled: Pairs = []
    for pair in tensors(layers, tokens, seed):
        if pair[0] is None:
            scaled.append((None, None))
            continue
        factor = rng.permutation(np.geomspace(0.05, 4, pair[0].shape[2]))
        scaled.append(tuple((array * factor).astype(array.dtype) for array in pair))  # type: ignore[arg-type, union-attr]
    return scaled


def numbers(plan: Plan | None) -> list[Any]:
    """Everything a plan holds, but classes and tables by what they are."""
    assert plan is not None
    found: list[Any] = [plan.kv_heads, plan.head_dim, plan.window, plan.signs.tolist(), plan.profile_name]
    for stream in (plan.key, plan.value):
        found += [v for k, v in sorted(stream.__dict__.items()) if k not in ("grouping", "frequencies")]
        found.append(stream.frequencies.tolist())
        if stream.grouping is not None:
            g = stream.grouping
            tables = [(tuple(g.classes[c] for c in table.classes), table.precision) for table in g.tables]
            found += [g.head_dim, tables, g.letters, g.fields, g.choice.tolist(), g.order.tolist()]
    return found


def plans(path: Path) -> list[Plan | None]:
    with dqkv.open(path) as reader:
        assert list(reader.verify()) == []
        return [layer.plan for layer in reader.layers]


def fitted_to(pairs: Pairs, place: int, start: int, stop: int) -> Plan:
    return fit_plan("2.26", *(array[start:stop] for array in pairs[place] if array is not None))


@pytest.mark.parametrize("tokens", [62, 300, 700])
def test_plans_are_fitted_to_the_first_tokens_to_be_coded(tmp_path: Path, tokens: int) -> None:
    sinks, recent = 3, 20
    pairs = spread(LAYERS, tokens)
    path = tmp_path / "x.dqkv"
    write(path, LAYERS, pairs, sinks=sinks, recent=recent)
    found = plans(path)
    for place in FITTED:
        stop = sinks + min(512, tokens - sinks - recent)
        assert numbers(found[place]) == numbers(fitted_to(pairs, place, sinks, stop))
        plan = found[place]
        assert plan is not None and plan.key.grouping is not None and plan.value.grouping is not None
    assert numbers(found[4]) == numbers(make_plan(replace(SMALL, window=128), 2, 8))
    with dqkv.open(path) as reader:
        for place, layer in enumerate(LAYERS):
            if layer.storage == "absent":
                continue
            wanted = expected(layer, pairs[place], sinks, recent, plan=found[place])
            for tensor, array in zip((reader.layers[place].key, reader.layers[place].value), wanted):
                assert same(tensor[:], array)


@settings(max_examples=15)
@given(data=st.data())
def test_portions_and_threads_do_not_change_a_byte(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("portions")
    tokens = data.draw(st.sampled_from([0, 40, 300, 514, 515, 535, 536, 700]))
    options: dict[str, Any] = {
        "sinks": data.draw(st.sampled_from([0, 3])),
        "recent": data.draw(st.sampled_from([0, 20])),
        "_record_target": data.draw(st.sampled_from([1, 8 << 20])),
    }
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens) | st.sampled_from([3, 512, 515, 535]), max_size=5)))
    cuts = [min(cut, tokens) for cut in cuts]
    pairs = spread(LAYERS, tokens)
    whole = write(folder / "a.dqkv", LAYERS, pairs, **options)
    assert write(folder / "b.dqkv", LAYERS, pairs, cuts, threads=data.draw(st.sampled_from([1, 3])), **options) == whole


@pytest.mark.parametrize("tokens", [600, 100])
def test_token_by_token_is_all_the_same(tmp_path: Path, tokens: int) -> None:
    layers = LAYERS[:2]
    pairs = spread(layers, tokens)
    whole = write(tmp_path / "a.dqkv", layers, pairs, recent=10)
    assert write(tmp_path / "b.dqkv", layers, pairs, range(1, tokens), recent=10) == whole


@pytest.mark.parametrize("coded", [0, 1, 31, 32])
def test_few_tokens_stay_rotated(tmp_path: Path, coded: int) -> None:
    pairs = spread(LAYERS, 23 + coded)
    write(tmp_path / "x.dqkv", LAYERS, pairs, sinks=3, recent=20)
    for place in FITTED:
        plan = plans(tmp_path / "x.dqkv")[place]
        assert plan is not None
        assert (plan.key.grouping is not None) == (plan.value.grouping is not None) == (coded >= 32)
        if coded < 32:
            layer = LAYERS[place]
            assert numbers(plan) == numbers(make_plan(PROFILES["2.26"], layer.kv_heads, layer.head_dim))


@pytest.mark.parametrize("last", [False, True])
def test_files_without_tokens_are_whole(tmp_path: Path, last: bool) -> None:
    path = tmp_path / "x.dqkv"
    with create(path, LAYERS, sequences=2) as writer:
        if last:
            writer.append(*part(spread(LAYERS, 0), 0, 0), sequence=1)
    with dqkv.open(path) as reader:
        assert reader.tokens == 0 and list(reader.verify()) == []


def test_the_sequence_that_has_them_first_decides(tmp_path: Path) -> None:
    """Sequence 0 waits with few tokens while sequence 1 brings enough; both are coded by its plans."""
    path = tmp_path / "x.dqkv"
    layers = LAYERS[:1]
    pairs = [spread(layers, 200, 1), spread(layers, 900, 2), spread(layers, 50, 3)]
    with create(path, layers, sinks=2, recent=10, sequences=3, _file_id=FILE_ID) as writer:
        for start in range(0, 900, 100):
            for sequence, mine in enumerate(pairs):
                length = len(mine[0][0])  # type: ignore[arg-type]
                writer.append(*part(mine, min(start, length), min(start + 100, length)), sequence=sequence)
    (plan,) = plans(path)
    assert numbers(plan) == numbers(fitted_to(pairs[1], 0, 2, 514))
    with dqkv.open(path) as reader:
        for sequence, mine in zip(reader.sequences, pairs):
            wanted = expected(layers[0], mine[0], 2, 10, plan=plan)
            assert same(sequence.layers[0].key[:], wanted[0]) and same(sequence.layers[0].value[:], wanted[1])


def test_short_sequences_are_fitted_to_the_first_that_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "x.dqkv"
    layers = LAYERS[:1]
    pairs = [spread(layers, 90, 1), spread(layers, 120, 2)]
    with create(path, layers, sinks=2, recent=10, sequences=2) as writer:
        for sequence, mine in enumerate(pairs):
            writer.append(*part(mine, 0, 200), sequence=sequence)
        writer.finish(1)
    (plan,) = plans(path)
    assert numbers(plan) == numbers(fitted_to(pairs[1], 0, 2, 110))


def test_ready_plans_are_not_fitted_again(tmp_path: Path) -> None:
    other = spread(LAYERS, 128, 9)
    ready = fitted_to(other, 0, 0, 128)
    layers = [Layer(2, 16, "float32", ready), Layer(2, 12, "bfloat16", "2.26")]
    pairs = spread(layers, 600)
    write(tmp_path / "x.dqkv", layers, pairs, sinks=0, recent=0)
    found = plans(tmp_path / "x.dqkv")
    assert numbers(found[0]) == numbers(ready)
    assert numbers(found[1]) == numbers(fitted_to(pairs, 1, 0, 512))
    # The plan a file holds is ready, too.
    again = [Layer(2, 16, "float32", found[0])]
    write(tmp_path / "y.dqkv", again, spread(again, 200), sinks=0)
    assert numbers(plans(tmp_path / "y.dqkv")[0]) == numbers(ready)


def test_a_shared_plan_is_stored_once(tmp_path: Path) -> None:
    ready = fitted_to(spread(LAYERS, 128, 9), 0, 0, 128)

    def header(count: int) -> bytes:
        layers = [Layer(2, 16, "float32", ready)] * count
        return write(tmp_path / "x.dqkv", layers, tensors(layers, 0))

    for count in (1, 7):
        data = header(count)
        assert [int.from_bytes(data[at : at + 4], "little") for at in (56, 104)] == [1, 2]
    # Groupings stand between their offset and the JSON's.
    offsets = [int.from_bytes(header(1)[at : at + 4], "little") for at in (112, 92)]
    assert offsets[1] - offsets[0] == plan_bytes(ready)
    assert plan_bytes(make_plan(SMALL, 2, 8)) == 0


def test_equal_classes_of_layers_are_stored_once(tmp_path: Path) -> None:
    layers = [Layer(2, 16, "float32", "2.26")] * 3
    pairs = [spread(layers, 100)[0]] * 3
    data = write(tmp_path / "x.dqkv", layers, pairs, recent=0)
    profiles, classes, groupings = (int.from_bytes(data[at : at + 4], "little") for at in (56, 100, 104))
    assert (profiles, groupings) == (3, 6)
    distinct = {
        levels
        for plan in plans(tmp_path / "x.dqkv")
        if plan is not None
        for stream in (plan.key, plan.value)
        for levels in (stream.grouping.classes if stream.grouping else ())
    }
    assert classes == len(distinct)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("kind", "place", "token"), [(0, 2, 7), (1, 0, 300), (1, 2, 514), (0, 0, 515), (1, 2, 640)])
def test_what_is_not_finite_is_told_with_layer_and_token(
    tmp_path: Path, kind: int, place: int, token: int, threads: int
) -> None:
    pairs = spread(LAYERS, 700)
    array = pairs[place][kind]
    assert array is not None
    array[token, 1, 2] = np.nan
    with pytest.raises(InputError) as caught:
        write(tmp_path / "x.dqkv", LAYERS, pairs, sinks=3, recent=20, threads=threads)
    assert caught.value.code == "input-nonfinite"
    where = {k: caught.value.where[k] for k in ("kind", "layer", "token", "head", "channel")}
    assert where == {"kind": ("key", "value")[kind], "layer": place, "token": token, "head": 1, "channel": 2}
    assert f"layer {place}, token {token}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_exact_tokens_may_hold_anything(tmp_path: Path) -> None:
    layers = LAYERS[:1]
    pairs = spread(layers, 600)
    for token in (0, 2, 595):
        pairs[0][0][token] = np.nan  # type: ignore[index]
    write(tmp_path / "x.dqkv", layers, pairs, sinks=3, recent=20)
    (plan,) = plans(tmp_path / "x.dqkv")
    assert numbers(plan) == numbers(fitted_to(pairs, 0, 3, 515))
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert np.isnan(reader.layers[0].key[[0, 2, 595][0]]).all() and np.isnan(reader.layers[0].key[595]).all()


def test_a_silent_layer_stays_rotated_beside_others(tmp_path: Path) -> None:
    pairs = spread(LAYERS, 100)
    pairs[0][1][...] = 0  # type: ignore[index]
    write(tmp_path / "x.dqkv", LAYERS, pairs, recent=0)
    found = plans(tmp_path / "x.dqkv")
    assert found[0] is not None and found[0].key.grouping is not None and found[0].value.grouping is None


def test_an_aborted_writer_leaves_nothing(tmp_path: Path) -> None:
    writer = create(tmp_path / "x.dqkv", LAYERS)
    writer.append(*part(spread(LAYERS, 100), 0, 100))
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_what_waits_for_fitting(tmp_path: Path) -> None:
    taken: list[int] = []
    write(tmp_path / "x.dqkv", LAYERS, spread(LAYERS, 100), [30, 60], progress=taken.append)
    assert taken == [30, 30, 40]


def test_short_sequences_wait_for_one_with_enough_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    layer = Layer(2, 64, "float32", "2.26")
    long, short = (tuple(rng.standard_normal((2, tokens, 2, 64)).astype(np.float32)) for tokens in (900, 150))
    with create(tmp_path / "x.dqkv", [layer], sequences=3, recent=120) as writer:
        for sequence, (keys, values) in ((0, short), (2, short), (1, long)):
            writer.append([keys], [values], sequence=sequence)
            writer.finish(sequence)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert [s.tokens for s in reader.sequences] == [150, 900, 150]
        plan = reader.layers[0].plan
        assert plan is not None and plan.key.grouping is not None
        codec = Codec(plan)
        for sequence, (keys, values) in ((0, short), (1, long)):
            decoded = codec.decode(codec.encode(keys[1:-120], values[1:-120]))
            assert (reader.sequences[sequence].layers[0].key[1:-120] == decoded[0]).all()
        assert list(reader.verify()) == []


def test_without_a_long_enough_sequence_nothing_is_fitted_and_nothing_lost(tmp_path: Path) -> None:
    keys, values = np.random.default_rng(6).standard_normal((2, 20, 2, 64)).astype(np.float32)
    with create(tmp_path / "x.dqkv", [Layer(2, 64, "float32", "2.26")], sequences=70, recent=0) as writer:
        for sequence in range(70):
            writer.append([keys], [values], sequence=sequence)
            writer.finish(sequence)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert reader.layers[0].plan is not None and reader.layers[0].plan.key.grouping is None
        assert [s.tokens for s in reader.sequences] == [20] * 70
        assert (reader.sequences[69].layers[0].key[0] == keys[0]).all()
