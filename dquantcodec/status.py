"""Status codes that decoding kernels return per stream, and the reason codes they stand for."""

from __future__ import annotations

OK = 0
#: The stream read beyond its container.
OVERRUN = 1
#: rANS: the state after the last letter is not the one every encoder starts from.
STATE = 2
#: Bits after the last letter are not zero (checked when asked to be strict).
PADDING = 3

REASONS = {OVERRUN: "container-overrun", STATE: "container-state", PADDING: "container-padding"}

MESSAGES = {
    OVERRUN: "the code runs past the end of its container",
    STATE: "the coder's final state is wrong",
    PADDING: "the container's unused bits are not zero",
}
