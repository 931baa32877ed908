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

#: What the reason codes of a page mean, in words that follow "the key container of token 7".
EXPLANATIONS = {
    "container-overrun": "runs past its end",
    "container-state": "ends in a wrong state",
    "container-padding": "has unused bits that are not zero",
    "page-exponent": "lies in a page whose exponent is out of range",
    "page-affine": "has an offset, scale or mean that is not finite",
    "page-unused": "lies in a page whose padding, or bytes of tokens that do not exist, are not zero",
}
