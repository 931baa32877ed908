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
from dquantcodec.classes import classes
from dquantcodec.codec import Codec, Pages
from dquantcodec.grouping import Grouping, Table
from dquantcodec.plan import Plan, StreamPlan, grouped, make_plan
from dquantcodec.profile import PROFILES

#: The page of a plan with groups, made by hand.
GROUPED = "grouped"
#: Without data a profile with a trellis codes as the one of its size without.
NAMES = (*(name for name in PROFILES if not name.endswith("-t")), GROUPED)

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


def grouped_plan() -> Plan:
    """Two heads of 64, the second first, 52 keys and 40 values of each coded; four tables, two and one field."""

    def order(coded: int) -> NDArray[np.uint16]:
        return np.array([[64 * head + (37 * i + head) % 64 for i in range(coded)] for head in (1, 0)], np.uint16)

    narrow, middle, wide = (classes("student")[number].levels("least-squares") for number in (4, 7, 10))
    keys = Grouping(
        head_dim=64,
        classes=(narrow, middle, wide),
        tables=(Table((2, 0), 9), Table((1, 1), 8), Table((1, 0), 8), Table((0,), 8)),
        letters=(8, 8, 8, 4),
        fields=(2, 2, 2, 1),
        choice=np.array([[0, 1, 2, 3], [0, 2, 1, 3]], np.uint8),
        order=order(52),
    )
    values = Grouping(
        head_dim=64,
        classes=tuple(classes("normal")[number].levels("unbiased") for number in (3, 8)),
        tables=(Table((0, 0, 1), 10), Table((1, 0), 8)),
        letters=(8, 7, 1),
        fields=(3, 2, 2),
        choice=np.array([[0, 1, 1], [0, 1, 1]], np.uint8),
        order=order(40),
    )
    base = make_plan(PROFILES["2.26"], 2, 64)
    return Plan(
        2, 64, 128, base.signs, grouped(5, 2, True, 0.45, "least-squares", keys),
        grouped(4, 2, False, 0.6, "unbiased", values), GROUPED,
    )  # fmt: skip


def page(name: str) -> tuple[Codec, Pages]:
    """The used tile of a page of five tokens, two heads of 64, keys with channel means, in steps of 1/64."""
    codec = Codec(grouped_plan()) if name == GROUPED else Codec(name, 2, 64)
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
    "2.26": "99d473d3c7917a7d1b19a43af05cbf6f",
    "1.96": "1b5ad3aa6880c12b9b0a56485c53121b",
    "3.0": "ae81d5efe8a4a980abd9f3dcb700f876",
    "paper-2.26": "da4df78adf4b3a85170b39ed08d2bb9a",
    "paper-1.96": "7aeefba83967c2dd3c8205194182461c",
    "grouped": "13b43416aefb6aca26ea554936c9658e",
}

#: Rows of 64 bytes, a comma between them.
PAGES = {
    "2.26":
        "000000000827e025f8d0e6ce09a43ccbcfe80bcc200be1f712e9030ef505c8d97a0c052e2ff82607fd16ebec1a0e4b433beac83b175f"
        "cd20117fb802e9f5c73b,abf018006c1c1415d0fcc9c4b7c2020f06f98e15da40e5d66ef1f1ba0cc2e84bcd1c25152c81f71d28f6003"
        "f58d71b389638ecf61d0234282bffcaf2abdac388,f4f7f1e43c11d714,e28c81d84cb7310d2e59b006a25ed22f6641f655,,5ed5a11"
        "7131ad0202cebe2a69ac78de06e1748d0,,3124ecfad8e43a58992055d029e6fccde0c4dad0,,7e540f16a9a5ac9c487b099c1132205"
        "68eb0d25e,,0c35d33083460414f7413e23e61d0dc1d94e9206,,8ceb62c036a2b6411c8250138a8852f12a21d64d,,345c6512107d8"
        "f4261bf337654819088347611ea,,e12ce57e89aa4a445e63b9b32eff8e0659fa9a38,,607a1e12b9e399ac411e46511f7a901f3b172"
        "aae,,5e464a282bac51a17c3dc6c1296a13612c8c35,,1f36a235fc35e735c736,30225f4d1eab716824b5fc47387fd8eeae8a8bf1,,"
        "aaa1b0adaa07b7439497131b115da9175273e350,,2818db7208fd5673d5e365efb27d2dcf1c2dcc56,,64050000af24a60cf0183628"
        "29d4c00001470615,,326372f1144653edeae00a86e0eb092db64e0033,,cee3f0eec856e3d4f45bab9d4ce7c311a4d6ebd0,,58b940"
        "3157bc0cb7e13a7f2cdd7b58a19f5ad6dc,,e68a85097e5f6d00d530de2cf466b117bc8ab32a,,c2397b39f038e8391d39",
    "1.96":
        "000000000827e025f8d0e6ce09a43ccbcfe80bcc200be1f712e9030ef505c8d97a0c052e2ff82607fd16ebec1a0e4b433beac83b175f"
        "cd20117fb802e9f5c73b,abf018006c1c1415d0fcc9c4b7c2020f06f98e15da40e5d66ef1f1ba0cc2e84bcd1c25152c81f71d28f6003"
        "f58d71b389638ecf61d0234282bffcaf2abdac388,f4f7f1e43c11d714,a895c169acbe25fbd2288666029b324e6ad8f428,,e429c05"
        "086e2c288c02a9a882bba4bac014661bf,,409e4f22d464110c5c85da9849bb8319e548681a,,e6e298126a50c429b816b6b2cf29350"
        "0db8e6912,,e82e03a286148b220c02166104bcc863749151ec,,2295c3907d203750cfd5c6811f030e9a05385991,,d007d3261e106"
        "d93623a201352c6a2656a313445,,f27a660088600d51e2ba1a25860a2e1049d3b801,,20381c386a382d38c738,e8996bdc1e44c135"
        "2c4d6f1374be2e95aa71d645,,07d73848cdc386d6eb411d0a0320d1d477ea494d,,a0b1ef156435010a0d67a273da08c514c40caa0e"
        ",,66a5ca9d9c10a181e812c0e2c88264386c809649,,039d4fe2d293b3ee1cd135f9dd155eb74895615f,,63162c0c633e940a0c0eba"
        "33e06c690da8ae481c,,b13ba13b803b4d3c9c3b",
    "3.0":
        "000000000827e025f8d0e6ce09a43ccbcfe80bcc200be1f712e9030ef505c8d97a0c052e2ff82607fd16ebec1a0e4b433beac83b175f"
        "cd20117fb802e9f5c73b,abf018006c1c1415d0fcc9c4b7c2020f06f98e15da40e5d66ef1f1ba0cc2e84bcd1c25152c81f71d28f6003"
        "f58d71b389638ecf61d0234282bffcaf2abdac388,f4f7f1e43c11d714,c266ffba22f0a5a89ef26ab3dc4560126e12a395,,613c31a"
        "cd1305abe3e7a785c9764e8e5cfc30621,,ea33190b634f49b264a7586cbca5eaf0307400df,,53cc734bb29e1cd9c8d43a1800fed0a"
        "cbe33928f,,fb232b3dd60e56bbcde11dee96686222b7b05269,,ccf19e52a2610444f56074c482ddf087267d7966,,668e0200c3190"
        "0008da30700020000006b4d,,42f6464ce8676195da1a6335366cb0eb8e0d392e,,096b34699c572338d742ce6f27f73a4cb8b49cf6,"
        ",af434dc4fbd5f83c4ff4d51b134c2df2475ef011,,76c980fc933ec2137138f7db07e5d650a49f7533,,321537c031a74f7481b0b68"
        "4ee3b0f86533c42ed,,74fe6ee668fa51d00da3a6a32b814ee24d7f37ef,,87010000a29b780f072a0000038e0000a66d0a,,9d322c3"
        "2ba32a632bd33,c07446be5e905dc3b49c27f07cf257ca0e5ed942,,30e28ead50493b6c5711add94fc64fe16d84ae43,,c890c90e3c"
        "abcdc3c149aac25515d1fbb476732e,,4b9cf327c695ed21df4b7183d691959899f3689a,,4f6ef6a3d02c43a017c03950d6d346a23e"
        "994061,,d2945e7518aed15274224f6114a5d781c21300e9,,c69d4398cebb614e4e207b67757128ee51730ec5,,88ce90d6ab762a6d"
        "690b89fabb4a648ff0d94e90,,94c56279e452f6d6fc8b8ea84b313ae3b6cafd3f,,1db4f02e77cfda516ce0b15dbc328ec160816450"
        ",,27377c37ee360d381637",
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
    "grouped":
        "000000008726d625d7ff36c6cfe9080bbd0bed1ed91c9a0dd2dfe81344f3fa1ad283b8ed3d44e2ffb27f14f83c05f01f3821ef0a1301"
        "a024a80b1435dcc80165,1911d6c0b5fc55bfc0f511bcf72cbd2ae0c4fad53cc3b928e7bbe3dab4cd03d528e0b7da12e1e6a7d201131"
        "2f4df3f06fcff09e1ae2d30bb8138b038e8241472,aa113fa4d7410fd6,60f78b75e669f38f86465fbd74d7f7caee5d2f85,,598e6c6"
        "a1f3fb7f32b6d7bf4afb5d01b3bf367ee,,991821cdf3dc68cb48d399f36e95b27cb6c4c86a,,ccf80c0046be1fe423c7cd6d5e7c4c0"
        "125f05779,,00000000fa6bbb0301,,eead2be3f21ec1c3f443c33ff8f5274b7e2ebbd2,,a7c74fffd5e3babafae9e6bf31bfc536975"
        "8af1e,,5ce7bcce76d39fa2dafc8c50871def96582976df,,665a5cb9ce35920bae5fa731815e000015d536cf,,dd9f0d0000000000f"
        "101,,1137683562362337f337,669fbfd5c4797d737ab545f5da59f1bcc6f7baf9,,35474d1dcbad67fcc023d5781befbfe8b47efe78"
        ",,3db2f037ccf3273f39b99998fce72cd7cae4d734,,99ba06003300000001000000377e3700b609,,d2139c3fcebaa43f26cf999946"
        "e35937ee189b9d,,befb0357339dff782671a4659e7edfec1f5d9d70,,cccbf5bc3bad325f9a97640d9bbe9fbfbacfb291,,8cef2300"
        "8f5f000000000000f98d3f0015,,82340336df3679352836",
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


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_as_they_always_were(name: str) -> None:
    assert page_rows(name) == PAGES[name].split(",")


@pytest.mark.parametrize("name", NAMES)
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
    for name in NAMES:
        print(f'    "{name}": "{decoded_digest(name)}",')
    print("PAGES")
    for name in NAMES:
        print(f'    "{name}":')
        text = ",".join(page_rows(name))
        lines = [text[at : at + 108] for at in range(0, len(text), 108)]
        print("\n".join(f'        "{line}"' for line in lines) + ",")


if __name__ == "__main__":
    _print()
