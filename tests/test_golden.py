"""Exact bytes: words of a few streams, and one page per named profile, from inputs made of integers.

Any change of format, tables, arithmetic or encoder decisions fails here.  A change that is meant prints the new
values with ``python tests/test_golden.py``.
"""

from __future__ import annotations

import hashlib

import numpy as np
import oracles
import pytest
from numpy.typing import NDArray

from dquantcodec import letters, prefix, rans, tables
from dquantcodec.codec import Codec, Pages
from dquantcodec.plan import StreamPlan
from dquantcodec.profile import PROFILES

#: (coder, levels, symbols per letter, precision, heads, head_dim, sub-streams)
STREAMS = [
    ("rans", 6, 3, 12, 2, 16, 1),
    ("rans", 8, 2, 11, 2, 15, 2),
    ("rans", 2, 4, 8, 1, 33, 1),
    ("prefix", 8, 3, 13, 2, 16, 2),
    ("prefix", 6, 3, 12, 1, 20, 1),
    ("prefix", 64, 1, 15, 1, 24, 1),
]


def stream(case: tuple[str, int, int, int, int, int, int]) -> tuple[StreamPlan, int, NDArray[np.uint8]]:
    """A plan with 24 words, head_dim, and the symbols of two tokens."""
    coder, levels, letter, precision, heads, dim, substreams = case
    weights = tables.letter_weights(tables.level_weights(levels, 1024, 1.4), letter)
    build = tables.frequencies if coder == "rans" else tables.prefix_frequencies
    plan = StreamPlan(coder, levels, letter, precision, 24, substreams, False, build(weights, precision))
    symbols = [[(v + 128) * levels // 256 for v in oracles.integers(heads * dim, seed)] for seed in (1, 2)]
    return plan, dim, np.array(symbols, np.uint8)


def words(case: tuple[str, int, int, int, int, int, int]) -> list[str]:
    """The used words of every token and sub-stream as hexadecimal, in order."""
    plan, dim, symbols = stream(case)
    packed = letters.pack(symbols, plan, dim).reshape(2, plan.substreams, -1)
    coded, used = (rans if plan.coder == "rans" else prefix).encode(packed, plan)
    digits = 2 * plan.word_bytes
    return [
        " ".join(f"{int(w):0{digits}x}" for w in coded[0, j, : used[t, j], t])
        for t in range(2)
        for j in range(plan.substreams)
    ]


def page(name: str) -> tuple[Codec, Pages]:
    """The used tile of a page of five tokens, two heads of 64, keys with channel means, in steps of 1/64."""
    codec = Codec(name, 2, 64)
    keys = np.array(oracles.integers(5 * 128, 3), np.float32).reshape(5, 2, 64) / 64
    keys += np.array(oracles.integers(128, 4), np.float32).reshape(2, 64) / 32
    values = np.array(oracles.integers(5 * 128, 5), np.float32).reshape(5, 2, 64) / 64
    return codec, codec.encode(keys, values)


def page_rows(name: str) -> list[str]:
    """The page's used bytes as hexadecimal, 64 a row; zeros at the end of a row are left out."""
    codec, pages = page(name)
    data = pages.data[0, : codec.layout.bytes_for(5)].tobytes()
    return [data[at : at + 64].rstrip(b"\0").hex() for at in range(0, len(data), 64)]


def page_bytes(rows: list[str]) -> bytes:
    return b"".join(bytes.fromhex(row).ljust(64, b"\0") for row in rows)


def decoded_digest(name: str) -> str:
    codec, pages = page(name)
    digest = hashlib.sha256()
    for array in codec.decode(pages):
        digest.update(array.astype("<f4").tobytes())
    return digest.hexdigest()[:32]


# fmt: off
WORDS: dict[tuple[str, int, int, int, int, int, int], list[str]] = {
    ("rans", 6, 3, 12, 2, 16, 1): [
        "ddde 7f0c 5e93 9863 d92f",
        "006f b116 903a 4180 a1eb f106 37d3",
    ],
    ("rans", 8, 2, 11, 2, 15, 2): [
        "aacc 9a6a 61ce",
        "003d ed4c 6019 010f",
        "0213 7003 7844 289e",
        "0679 a9f0 9729 a65d",
    ],
    ("rans", 2, 4, 8, 1, 33, 1): [
        "0010 04ce 97c0 0a80",
        "0010 0805 4410 0ba0",
    ],
    ("prefix", 8, 3, 13, 2, 16, 2): [
        "11a47d3a 00000004",
        "051f53fc 0000001d",
        "1354ffde 00000874",
        "7e9cf2fe 00000a74",
    ],
    ("prefix", 6, 3, 12, 1, 20, 1): [
        "88662e56 00000000",
        "9cdaef3e 008ef4af",
    ],
    ("prefix", 64, 1, 15, 1, 24, 1): [
        "85c4384c 4ce1f42f 469a199c 03cfa0f9",
        "64d53fc2 334b61ef 06ddda00 ad78affd 00000084",
    ],
}

DECODED = {
    "2.26": "998f8c1efe80a395a5eec59675359855",
    "1.96": "1eba1187ef5afce0bba64cd9ec249653",
    "paper-2.26": "da4df78adf4b3a85170b39ed08d2bb9a",
    "paper-1.96": "7aeefba83967c2dd3c8205194182461c",
}

#: Rows of 64 bytes, a comma between them.
PAGES = {
    "2.26":
        "000000000827e025f8d0e6ce09a43ccbcfe80bcc200be1f712e9030ef505c8d97a0c052e2ff82607fd16ebec1a0e4b433beac83b175f"
        "cd20117fb802e9f5c73b,abf018006c1c1415d0fcc9c4b7c2020f06f98e15da40e5d66ef1f1ba0cc2e84bcd1c25152c81f71d28f6003"
        "f58d71b389638ecf61d0234282bffcaf2abdac388,f4f7f1e43c11d714,c2d649caacf7b04a9a6b97f8a67d3fce2e529a63,,0b2c1b8"
        "a89670ef9db5fddf7cd4d6b53d303914e,,04cb63efcdc19b482c88d3cdd47b8ea59e7a69e7,,176873cb2a53cc46e1c594a489bf37d"
        "fee6099db,,7142a80188331d007be89e8d5a7d0200ded77435,,cc3903a89e6dba4548965d9214b831ffea8a15aa,,22d628ca687ec"
        "2a4c5bfcbfe39194de90b63f7e8,,34fd25e8219f97e32f57b77778cfdd8d4de58b96,,5ec1dde3f03276ab8ee62863c87cc3bdd8dec"
        "2ea,,fa100000d6ad4b3ae9d8ee0378dd90037a8d79,,5ebd8a3673bdb535d2beb936e2bd283600beea36,,dc21345b3e0356ebba09e"
        "3bfa2e627a70ecfa7f6,,00f9595be51e5f1d0bb47626886e48c4162ef87a,,d199871874283bf266b45a2a537f270a36d4b158,,8d7"
        "51d01661b7b010fa1030003d52e0206ab3847,,ba5837967a1b092ccc4d40a098cd058cba2393c2,,ab1405be37bb6b615a265a72400"
        "7df9a66676b45,,432e3ccb5de47abcce9f911b7eec1e28c3f5bdba,,17838612f9b77b00d6270900c0e3142483197a,,63bdb73805c"
        "05d3945be0539edbd6039cbbed738,",
    "1.96":
        "000000000827e025f8d0e6ce09a43ccbcfe80bcc200be1f712e9030ef505c8d97a0c052e2ff82607fd16ebec1a0e4b433beac83b175f"
        "cd20117fb802e9f5c73b,abf018006c1c1415d0fcc9c4b7c2020f06f98e15da40e5d66ef1f1ba0cc2e84bcd1c25152c81f71d28f6003"
        "f58d71b389638ecf61d0234282bffcaf2abdac388,f4f7f1e43c11d714,b8618082aceb2c40543ce5f1c290c6dc02a08e31,,9042823"
        "18899f269947b08e2344c8aa2011124e3,,f59ea471d0432a53d40cfb944218d0983e590d04,,e4100e0130e09841d088463adbd5000"
        "0d7269002,,f09c015472ecaa100863118b14a8e74b6c8042e8,,111145195789267717edf9d48c523a8e8fa96c88,,d0ef4363380e0"
        "72cf4138e187423c2dd3dce62a0,,81469442d7a82ce94b539b03182b2907da35e601,,13bf413828bfb137a6c0d43806c0573842c0d"
        "938,,5021074aced8a66bc4857f4a583ef082eadd7561,,da94ad5137b56d26c2002bb01b000245602d1337,,03db951920872914914"
        "056142692290cdbdb180a,,84719897d43ab42b501c00c4001ce802a401b69c,,0aa682416cabfac644ac24ff50297ac8fcced9d6,,a"
        "ad35120b2db6d035d05f82200e80c12f6501caa,,dfbd683a46c04a3b14be603abebe9b3b3ebf613a,",
    "paper-2.26":
        "000000000827e025f8d0e6ce09a43ccbcfe80bcc200be1f712e9030ef505c8d97a0c052e2ff82607fd16ebec1a0e4b433beac83b175f"
        "cd20117fb802e9f5c73b,abf018006c1c1415d0fcc9c4b7c2020f06f98e15da40e5d66ef1f1ba0cc2e84bcd1c25152c81f71d28f6003"
        "f58d71b389638ecf61d0234282bffcaf2abdac388,f4f7f1e43c11d714,9f00e9388840a1930963,943b6a776433a25edebb,0d626c0"
        "7ae5f41da1084,4b807f7d1c8ffd361429,78a0258d981f18c30b9c,b75194df05a956b6436f,9cc28f5cfc3457307088,1aafe11312"
        "97fb6d8f94,4114f876c95dafaca278,7038999bb38dc0c206d4,badb5695f4f9aa2e5344,f23601c786097f241921,be2436f1360e9"
        "8e5979b,dd312d1044de252ee65d,fd99724d80b7fd09b460,3de409e8a52e68ff4ea1,e320b516bfc754e1f78e,a53ce19b7fbd241c"
        "aa6c,95b8a5cffe15aefcfb40,420a30dda69d8946c270,000045f26cfc1ebb35f8,5ebd8a3631bd6e35d2beb936e9bd2336dabdca36"
        ",,c813045350136a13d64c,ea129551d4bba0b34432,87c22cbdfd8e7529b89a,0de7c065be4b257b4588,0537e93b10bd4263ea3e,5"
        "615fb06e5b67265938b,72ca5cec085a5fbbbd1b,477b4abd28b3769346a6,1b423cf699b9447dc9dc,c0a4257d2afc7125c3ce,1064"
        "0c5bb86be481d189,23a94bbc40a7a601206a,0e9c052f135797bb76c3,2e26e30d19185286fc03,fdbefb39d1c0b93a8dbf0c3ae5bf"
        "d73a01c0f139,",
    "paper-1.96":
        "000000000827e025f8d0e6ce09a43ccbcfe80bcc200be1f712e9030ef505c8d97a0c052e2ff82607fd16ebec1a0e4b433beac83b175f"
        "cd20117fb802e9f5c73b,abf018006c1c1415d0fcc9c4b7c2020f06f98e15da40e5d66ef1f1ba0cc2e84bcd1c25152c81f71d28f6003"
        "f58d71b389638ecf61d0234282bffcaf2abdac388,f4f7f1e43c11d714,2e2e6b32915fc62f3b57,b5eb3a97ca9399ae92aa,70c43fb"
        "735bb48fce7ed,a11163499e8eed66fc98,1c4585ab68570b9add74,89728e9acad655f07e9c,056ffb339cbba2fa7c14,7b4e78b6a1"
        "1972feb538,5e28c0d60bbcb2621fd5,418585df8f65aa949f57,ea3eaf78e71a5ae55416,5366e20647dcf29ecb48,c07135899507b"
        "6b992c8,52f645d8876e0d0cc921,82c57e662e8aae8526ab,d139fa5a00b6e158ad43,9e5851849b5dc2068a77,016a45f21ebb1ebb"
        "19e9,63beb937afbe243742c0603872bf0338a1bf6338,,c12d8030492af90fb82c,d5665583110650c419e5,2db15acbef2f9d9e877"
        "9,fd8a77d883c607c91ef7,c42a357b8279f4e062e9,8e18e71db462dac1d9eb,e43438279ee3fc634329,acc668da9cae5ca27718,4"
        "9ea429b24cb1a97494e,f2f30b0ebf4337ba8bcb,9eb7b8fb0bdad878e7cd,69199b7feb3460b82c2e,55bed03a50c07a3b56be8a3a1"
        "0bfff3b8abfca3a,",
}
# fmt: on


@pytest.mark.parametrize("case", STREAMS)
def test_words_of_small_streams_are_as_they_always_were(case: tuple[str, int, int, int, int, int, int]) -> None:
    assert words(case) == WORDS[case]


@pytest.mark.parametrize("case", STREAMS)
def test_the_oracle_reads_the_recorded_words(case: tuple[str, int, int, int, int, int, int]) -> None:
    plan, dim, symbols = stream(case)
    size = symbols.shape[1] // plan.substreams
    for i, text in enumerate(WORDS[case]):
        t, j = divmod(i, plan.substreams)
        column = [int(w, 16) for w in text.split()]
        frequencies = tuple(plan.frequencies.tolist())
        count = size // dim * -(-dim // plan.letter)
        decoded = oracles.DECODERS[plan.coder](column, count, frequencies, plan.precision)
        assert decoded.finding is None
        assert decoded.letters is not None
        row = oracles.unpack(decoded.letters, dim, plan.levels, plan.letter)
        assert row == symbols[t, j * size : (j + 1) * size].tolist()


@pytest.mark.parametrize("name", PROFILES)
def test_pages_are_as_they_always_were(name: str) -> None:
    assert page_rows(name) == PAGES[name].split(",")


@pytest.mark.parametrize("name", PROFILES)
def test_recorded_pages_decode_to_what_they_always_did(name: str) -> None:
    codec, _ = page(name)
    data = np.zeros((1, codec.layout.page_bytes), np.uint8)
    recorded = page_bytes(PAGES[name].split(","))
    data[0, : len(recorded)] = np.frombuffer(recorded, np.uint8)
    digest = hashlib.sha256()
    for array in codec.decode(Pages(data, 5)):
        digest.update(array.astype("<f4").tobytes())
    assert digest.hexdigest()[:32] == DECODED[name]
    expected = oracles.decode_page(recorded, codec.plan, 5)
    for kind, array in zip(("key", "value"), codec.decode(Pages(data, 5))):
        assert array.tobytes() == expected[kind].tobytes()


def _print() -> None:
    print("WORDS")
    for case in STREAMS:
        print(f"    {case}: [".replace("'", '"'))
        for text in words(case):
            print(f'        "{text}",')
        print("    ],")
    print("DECODED")
    for name in PROFILES:
        print(f'    "{name}": "{decoded_digest(name)}",')
    print("PAGES")
    for name in PROFILES:
        print(f'    "{name}":')
        text = ",".join(page_rows(name))
        lines = [text[at : at + 108] for at in range(0, len(text), 108)]
        print("\n".join(f'        "{line}"' for line in lines) + ",")


if __name__ == "__main__":
    _print()
