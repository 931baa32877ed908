"""Profiles: what an encoder is asked to do, before any tensor geometry is known.

A profile names levels, container bytes, coder and table rule for keys and for values.  It is validated once, here;
:mod:`dquantcodec.plan` turns it into the integers that encoder, decoder and file share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import InputError

#: Container sizes of a profile are stated for a stream of this many values and scale with the stream.
REFERENCE_VALUES = 1024

#: Tokens whose words are interleaved (specification, clause 5.2).
TILE = 32

MAX_LETTERS = 4096
MAX_SINKS = 4096
CODERS = ("rans", "prefix")
GRIDS = ("min-max", "mid-tread")
GAINS = ("least-squares", "unbiased")
SOURCES = ("normal", "student")
QUANTISERS = ("scalar", "trellis-4", "trellis-8")
#: States of every quantiser.
STATES = {"scalar": 1, "trellis-4": 4, "trellis-8": 8}


@dataclass(frozen=True)
class ClassRule:
    """How channels are sorted into variance classes when a plan is fitted to data (:func:`dquantcodec.fit_plan`).

    source
        Distribution of a channel: ``"student"`` (8 degrees of freedom, for keys) or ``"normal"``.
    field_bits
        Most bits of a letter's fields together, 4 to 12: more bits make fewer letters, which GPUs decode one by one,
        with longer tables.
    precision
        Longest code of any table, 9 to 14.
    table_bytes
        What a decoder's tables of one kind and layer may take, two bytes for each of ``2**p`` entries.
    """

    source: str = "student"
    field_bits: int = 10
    precision: int = 12
    table_bytes: int = 24 << 10

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise InputError(f"source must be one of {SOURCES}, not {self.source!r}", code="profile-classes")
        if not (4 <= self.field_bits <= 12 and 9 <= self.precision <= 14 and self.table_bytes >= 2 << self.precision):
            raise InputError(
                "field_bits are 4 to 12, precision 9 to 14 and table_bytes enough for one table, not "
                f"{self.field_bits}, {self.precision} and {self.table_bytes}",
                code="profile-classes",
            )


@dataclass(frozen=True)
class StreamProfile:
    """How the streams of one kind (keys or values) are coded.

    levels
        ``M``, 2 to 64 reconstruction levels of the affine grid (paper, section 4.2).
    container
        Bytes of one container for a stream of 1024 values; other stream lengths scale it (see :meth:`words`).
    coder
        ``"prefix"`` (length-limited prefix code, 32-bit words) or ``"rans"`` (32-bit state, 16-bit words).
    precision
        ``p``: letter frequencies sum to ``2**p``; for ``prefix`` also the longest code.
    alpha
        Sharpening exponent of the analytic table (paper, section 4.4).
    letter
        Symbols per letter, 1 to 4; ``None`` takes the most, up to three, that leave the table sixteen times as many
        slots as letters.
    mean
        Remove the mean of every channel over a window before quantising (paper, section 3.2; meant for keys).
    grid
        ``"min-max"`` (the paper's: offset and scale of a token reach from its least to its largest value) or
        ``"mid-tread"`` (an odd number of levels around zero, ``step`` root mean squares apart, a scale alone).
    step, weights
        Of a mid-tread grid: the step, and the levels' shares as integers, from :mod:`dquantcodec.mid_tread`.
    gain
        Of a mid-tread grid, how the scale is fitted to the final symbols: ``"least-squares"``, or ``"unbiased"``,
        better for values, whose errors average out in attention while shrinkage does not.
    classes
        Variance classes instead of the rotation, once a plan is fitted to data; a plan made without data rotates.
    quantiser
        Of variance classes: ``"scalar"``, or ``"trellis-4"`` or ``"trellis-8"`` (dependent quantisation with so many
        states: less error at the same bits, more work for the encoder, as many times the tables).
    """

    levels: int
    container: float
    coder: str = "prefix"
    precision: int = 12
    alpha: float = 1.4
    letter: int | None = None
    mean: bool = False
    grid: str = "min-max"
    step: float = 0.0
    weights: tuple[int, ...] = ()
    gain: str = "least-squares"
    classes: ClassRule | None = None
    quantiser: str = "scalar"

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= 64:
            raise InputError(f"levels must be 2 to 64, not {self.levels}", code="profile-levels")
        if self.coder not in CODERS:
            raise InputError(f"coder must be one of {CODERS}, not {self.coder!r}", code="profile-coder")
        if not 8 <= self.precision <= 15:
            raise InputError(f"precision must be 8 to 15 bits, not {self.precision}", code="profile-precision")
        if not 0.25 <= self.alpha <= 8.0:
            raise InputError(f"alpha must be 0.25 to 8, not {self.alpha}", code="profile-alpha")
        if self.grid not in GRIDS or self.gain not in GAINS:
            raise InputError(
                f"grid must be one of {GRIDS} and gain one of {GAINS}, not {self.grid!r} and {self.gain!r}",
                code="profile-grid",
            )
        mid_tread = self.grid == "mid-tread"
        if mid_tread and not (self.levels % 2 and 0 < self.step <= 16 and len(self.weights) == self.levels):
            raise InputError(
                f"a mid-tread grid has an odd number of levels, a step up to 16 and a weight of every level; here are "
                f"{self.levels} levels, step {self.step} and {len(self.weights)} weights",
                code="profile-grid",
            )
        if not mid_tread and (self.step or self.weights or self.gain != GAINS[0]):
            raise InputError("step, weights and gain belong to a mid-tread grid", code="profile-grid")
        if self.classes and not (mid_tread and self.coder == "prefix"):
            raise InputError("classes need a mid-tread grid and the prefix coder", code="profile-classes")
        if self.quantiser not in QUANTISERS:
            raise InputError(f"quantiser must be one of {QUANTISERS}, not {self.quantiser!r}", code="profile-quantiser")
        if self.quantiser != "scalar" and not self.classes:
            raise InputError("a trellis needs classes", code="profile-quantiser")
        if any(weight < 1 for weight in self.weights):
            raise InputError("weights of levels are positive integers", code="profile-grid")
        if not 4 <= self.container <= 65535:
            raise InputError(f"container must be 4 to 65535 bytes, not {self.container}", code="profile-container")
        if self.letter is None:
            fitting = [k for k in (3, 2, 1) if 16 * self.levels**k <= 2**self.precision]
            object.__setattr__(self, "letter", fitting[0] if fitting else 1)
        letters = self.levels**self.symbols_per_letter
        if not 1 <= self.symbols_per_letter <= 4 or letters > min(MAX_LETTERS, 2**self.precision):
            raise InputError(
                f"{self.symbols_per_letter} symbols of {self.levels} levels make {letters} letters; "
                f"a table of 2**{self.precision} slots holds at most {min(MAX_LETTERS, 2**self.precision)}",
                code="profile-letter",
            )

    @property
    def states(self) -> int:
        return STATES[self.quantiser]

    @property
    def symbols_per_letter(self) -> int:
        assert self.letter is not None
        return self.letter

    @property
    def word_bytes(self) -> int:
        """2 for rANS (16-bit words), 4 for prefix codes (32-bit words)."""
        return 2 if self.coder == "rans" else 4

    def words(self, values: int) -> int:
        """Words of the container of a (sub-)stream of ``values`` values: scaled, rounded to the nearest, at least 2."""
        return max(2, round(self.container * values / REFERENCE_VALUES / self.word_bytes))


@dataclass(frozen=True)
class Profile:
    """Everything an encoder needs beyond the tensors: one :class:`StreamProfile` for keys and one for values.

    window
        Tokens of a page, a multiple of 32 up to 4096; key means are taken over it.
    substreams
        1, 2 or 4 equal parts of a stream, cut between heads, each with its own container; a geometry whose heads do
        not divide takes the next smaller number.
    sinks
        Leading tokens that a file keeps exact unless it is told otherwise: models attend to the first one far more than
        to any other.
    name
        Shown by tools and stored in files; never used to decode.

    >>> Profile.named("2.26").key.levels
    9
    """

    key: StreamProfile
    value: StreamProfile
    window: int = 128
    substreams: int = 2
    sinks: int = 0
    name: str = "custom"

    def __post_init__(self) -> None:
        if self.window % TILE or not TILE <= self.window <= 4096:
            raise InputError(
                f"window must be a multiple of {TILE} up to 4096, not {self.window}", code="profile-window"
            )
        if not 0 <= self.sinks <= MAX_SINKS:
            raise InputError(f"sinks must be 0 to {MAX_SINKS} tokens, not {self.sinks}", code="profile-sinks")
        if self.substreams not in (1, 2, 4):
            raise InputError(f"substreams must be 1, 2 or 4, not {self.substreams}", code="profile-substreams")

    @staticmethod
    def named(name: str) -> Profile:
        """The profile called ``name``; see :data:`PROFILES`."""
        try:
            return PROFILES[name]
        except KeyError:
            known = ", ".join(PROFILES)
            raise InputError(f"no profile is called {name!r}; there are {known}", code="profile-unknown") from None


def _named(name: str, key: StreamProfile, value: StreamProfile, substreams: int, sinks: int = 0) -> Profile:
    return Profile(key=replace(key, mean=True), value=value, substreams=substreams, sinks=sinks, name=name)


def _mid_tread(
    levels: int, container: int, precision: int, letter: int, step: float, half: tuple[int, ...], gain: str
) -> StreamProfile:
    """A stream on a mid-tread grid, in classes once it is fitted; ``half`` the weights from the middle level up."""
    classes = ClassRule("normal" if gain == "unbiased" else "student")
    return StreamProfile(
        levels, container, precision=precision, letter=letter, grid="mid-tread", step=step,
        weights=(*half[:0:-1], *half), gain=gain, classes=classes,
    )  # fmt: skip


def _with_trellis(name: str) -> Profile:
    """The named profile with a trellis of four states and twice the bytes of tables; its bytes stay the same."""
    profile = PROFILES[name]
    key, value = (
        replace(stream, quantiser="trellis-4", classes=replace(stream.classes, table_bytes=48 << 10))
        for stream in (profile.key, profile.value)
        if stream.classes
    )
    return replace(profile, key=key, value=value, name=f"{name}-t")


#: Bits per value are stated for n = 1024 with every byte of a page counted.  Numbers of mid-tread grids come from
#: :mod:`dquantcodec.mid_tread`.
PROFILES: dict[str, Profile] = {
    "2.26": _named(
        "2.26",
        _mid_tread(
            9, 328, 13, 3, 0.7093, (318573936460, 244755182612, 110985345048, 29501333419, 5226984579), "least-squares"
        ),
        _mid_tread(7, 232, 12, 3, 1.1609, (538979352372, 254134187562, 25623891182, 508058958), "unbiased"),
        substreams=2,
        sinks=1,
    ),
    "1.96": _named(
        "1.96",
        _mid_tread(7, 280, 12, 3, 0.9043, (411710272432, 265253689548, 70498297007, 8148691117), "least-squares"),
        _mid_tread(7, 200, 12, 3, 1.3551, (637393073860, 222931056421, 8106706132, 21514406), "unbiased"),
        substreams=2,
        sinks=1,
    ),
    "3.0": _named(
        "3.0",
        _mid_tread(
            15,
            424,
            12,
            2,
            0.4318,
            (191109909627, 173806933424, 130742196675, 81343924175, 41853991401, 17834134041, 6158155978, 2461523380),
            "least-squares",
        ),
        _mid_tread(
            9, 320, 13, 3, 0.7408, (333402721616, 249807407504, 105037121211, 24641211768, 3568712596), "unbiased"
        ),
        substreams=2,
        sinks=1,
    ),
    "paper-2.26": _named(
        "paper-2.26", StreamProfile(8, 332, "rans", letter=3), StreamProfile(6, 230, "rans", letter=3), substreams=1
    ),
    "paper-1.96": _named(
        "paper-1.96", StreamProfile(8, 286, "rans", letter=3), StreamProfile(5, 200, "rans", letter=3), substreams=1
    ),
}
PROFILES |= {profile.name: profile for profile in (_with_trellis("2.26"), _with_trellis("1.96"))}

DEFAULT_PROFILE = "2.26"
