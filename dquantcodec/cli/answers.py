"""What the commands print with ``--json``: for every command the keys of its document, their types and meaning.

A text is "type: meaning", an inner mapping an object, a list with one mapping a list of such objects.  A key that ends
with ``?`` may be null.  The reference is generated from this, and the tests hold every command to it.
"""

from __future__ import annotations

from typing import Any

Shape = dict[str, Any]

_SECONDS = "number: time taken"
_REPLACED = "integer: numbers that were not finite and were replaced"

#: What ``info`` says of a file, and other commands of the file they wrote.
INFO: Shape = {
    "file": "string: the file",
    "format_version": "string: as in 1.0",
    "model": "string: name of the model, empty if not given",
    "profile": "string: names of the profiles, joined by commas, or exact",
    "layers": "integer: stored layers",
    "layer_numbers": "list: their numbers in the model",
    "exact_layers": "list: numbers of those kept exact",
    "sequences": "integer: sequences",
    "tokens": "integer: length of the longest sequence",
    "tokens_by_sequence": "list: lengths of all",
    "kv_heads": "integer or list: KV heads, by layer where layers differ",
    "head_dim": "integer or list: values of a head, by layer where layers differ",
    "dtype": "string or list: element type of the original, by layer where layers differ",
    "sinks": "integer: first tokens kept exact",
    "recent": "integer: newest tokens kept exact",
    "torn": "boolean: the file was not closed or lost its end",
    "head_groups?": "integer or list: head groups of coded layers, by layer where layers differ",
    "shard": "list: [i, n], part i of n of the model's KV heads",
    "window?": "integer: tokens of a page",
    "bytes": "integer: size of the file",
    "values": "integer: key and value numbers in it",
    "dead_bytes": "integer: bytes that hold nothing any more",
    "bits_per_value": "number: all bytes of the file over all values",
    "bits_per_value_coded?": "number: coded pages alone",
    "names?": {"key": "string: pattern of the key tensors", "value": "string: pattern of the value tensors"},
    "layout?": "string: axes of the tensors",
}

_FINDING: Shape = {
    "code": "string: stable reason code",
    "message": "string: what is wrong",
    "where": "object: the place: offset, record, layer, token, ... as far as known",
}

_COPIED: Shape = {
    "output": "string: the file written",
    "bytes": "integer: its size",
    "bytes_before": "integer: size of the input",
    "tokens_by_sequence": "list: tokens of every sequence",
    "seconds": _SECONDS,
}

_QUALITY: Shape = {
    "layer": "integer: number of the layer in the model",
    "profile": "string: profile, or exact",
    "values": "integer: key and value numbers",
    "stored_bytes": "integer: every byte stored for the layer",
    "bits_per_value": "number: the same by value",
    "ratio_to_bf16": "number: how many times smaller than BF16",
    "key_nmse": "number: error energy of keys over their energy",
    "key_centred_nmse": "number: over the energy of keys less their means of 128 tokens",
    "value_nmse": "number: error energy of values over their energy",
    "attention_error?": "number: relative error of attention outputs; null without queries",
    "key_drift?": "number: share of key symbols moved to a cheaper level",
    "value_drift?": "number: share of value symbols moved to a cheaper level",
    "encode_speed?": "number: values a second, where measured",
    "decode_speed?": "number: values a second, one thread",
}

_TOTALS: Shape = {
    "bytes": "integer: size of the file",
    "values": "integer: key and value numbers",
    "bits_per_value": "number: every byte counted",
}

ANSWERS: dict[str, Shape] = {
    "demo": {
        "output": "string: the file written",
        "profile": "string: profile",
        "threads": "integer: threads that encoded",
        "layers": [_QUALITY],
        "totals": _TOTALS,
    },
    "compress": {
        "input": "string: IN",
        "output": "string: OUT",
        "info": INFO,
        "replaced": _REPLACED,
        "out_of_line?": [
            {
                "layer": "integer: a layer whose estimated attention error is out of line",
                "attention_error": "number: estimate, relative",
                "logit_error": "number: estimate",
            }
        ],
        "seconds": _SECONDS,
    },
    "append": {
        "input": "string: IN",
        "added_tokens": "integer: tokens added, all sequences together",
        "replaced": _REPLACED,
        "info": INFO,
        "seconds": _SECONDS,
    },
    "decompress": {
        "input": "string: IN",
        "output": "string: OUT",
        "bytes": "integer: size of OUT",
        "values": "integer: key and value numbers decoded",
        "tensors": [{"name": "string: its name", "dtype": "string: its element type", "shape": "list: its axes"}],
        "seconds": _SECONDS,
    },
    "info": INFO,
    "verify": {
        "file": "string: the file",
        "bytes": "integer: its size",
        "sound": "boolean: nothing is wrong; the exit status is 1 if something is",
        "findings": [_FINDING],
        "salvaged?": {**_COPIED, "lost": [_FINDING]},
    },
    "compare": {
        "original": "string: ORIGINAL",
        "file": "string: the file",
        "torn": "boolean: the file was not closed or lost its end",
        "page?": "string: the page written",
        "layers": [_QUALITY],
        "totals": _TOTALS,
    },
    "repack": {"input": "string: IN", **_COPIED},
    "reshard": {
        "inputs": "list: the files read",
        "outputs": [{"file": "string: a file written", "bytes": "integer: its size"}],
        "recoded": [
            {
                "layer": "integer: number of the layer in the model",
                "heads": "list: KV heads that were encoded again",
                "key_nmse?": "number: error energy beside the pages before, keys without their means; null if exact",
                "value_nmse?": "number: the same of values",
            }
        ],
        "seconds": _SECONDS,
    },
    "convert": {
        "input": "string: IN",
        "output": "string: OUT",
        "bytes": "integer: size of OUT",
        "bytes_before": "integer: size of IN",
        "seconds": _SECONDS,
    },
    "plan": {
        "model": "string: name of the model, or of the input",
        "profile": "string: profile",
        "layers": [
            {
                "layer": "integer: number of the layer",
                "kv_heads": "integer: KV heads",
                "head_dim": "integer: values of a head",
                "sliding_window?": "integer: tokens the layer looks back at most",
                "bits_per_value": "number: in pages",
                "bytes_per_token": "number: in pages",
            }
        ],
        "token_bytes": "object: bytes of a token in all layers, by format (the profile, bf16, fp8)",
        "tokens_per_gib": "object: tokens in 2^30 bytes, by format",
        "contexts": [
            {
                "tokens": "integer: a context",
                "bytes": "object: size of a sequence, by format",
                "sequences?": "object: sequences that fit the memory, by format",
            }
        ],
        "smaller_from": "object: tokens from which on the profile is smaller, by format; null for never",
        "head_groups": [
            {"groups": "integer: devices that share the heads", "bits_per_value": "number: in pages, all layers"}
        ],
        "memory?": "integer: bytes, as asked",
        "batch?": "integer: sequences, as asked",
        "longest_context?": "object: tokens that batch sequences reach in memory, by format",
        "target?": {
            "bits_per_value": "number: in pages, all layers",
            "attention_error": "number: predicted, root mean square of the layers",
            "layers": [
                {
                    "layer": "integer: number of the layer",
                    "key_bytes": "integer: container of a token's keys",
                    "value_bytes": "integer: container of a token's values",
                    "bits_per_value": "number: in pages",
                    "attention_error": "number: predicted",
                }
            ],
        },
        "out?": "string: the profile file written",
    },
    "bench": {
        "profile": "string: profile",
        "fitted": "boolean: plans have variance classes, fitted to the data",
        "kv_heads": "integer: KV heads",
        "head_dim": "integer: values of a head",
        "threads": "integer: the most threads",
        "quick": "boolean: fewer runs of less work",
        "machine": {
            "processor": "string: its name",
            "cores": "integer: cores of the machine",
            "simd": "string: vector extensions in use",
            "system": "string: operating system",
        },
        "gpu?": {
            "device": "string: its name",
            "multiprocessors": "integer: multiprocessors",
            "driver": "string: the driver's version",
            "driver_cuda": "string: newest CUDA of the driver",
        },
        "versions": "object: of Python and packages",
        "rows": [
            {
                "device": "string: cpu or cuda",
                "threads?": "integer: threads; null on a GPU",
                "section": "string: memory, codec, coder or file",
                "name": "string: what was measured",
                "values_per_s": "number: key and value numbers a second, the median run",
                "values_per_s_least": "number: the slowest run",
                "values_per_s_most": "number: the fastest run",
                "bf16_bytes_per_s": "number: the median run, in bytes that the numbers take in BF16",
                "ratio_to_copy": "number: beside copying BF16 numbers, same device and threads",
                "bits_per_value?": "number: of the pages, containers or file",
                "stored_bytes_per_s?": "number: bytes of the file a second, of section file",
                "note": "string: how much was worked on, and remarks",
            }
        ],
        "seconds": _SECONDS,
    },
    "doctor": {
        "sound": "boolean: what is needed works; the exit status is 1 if not",
        "facts": [
            {
                "name": "string: what was looked at",
                "found": "string: what was found",
                "state": "string: good, absent, poor (works, but worse than it could) or bad",
                "remedy": "string: what to do, empty if good",
            }
        ],
    },
    "completion": {"shell": "string: bash, zsh or fish", "script": "string: what that shell is to run"},
}

#: What ``compress``, ``decompress`` and ``verify`` answer where they take every file by itself.
BATCH: Shape = {
    "files": [
        {
            "input": "string: IN, or what it stands for",
            "output": "string: the file made of it; empty for verify",
            "state": "string: done, skipped (it was finished before) or failed; the exit status is 1 if one failed",
            "attempts": "integer: how often it was tried",
            "code": "string: stable reason code of the failure, or empty",
            "message": "string: file, place and what is wrong, or empty",
            "seconds": "number: all attempts together",
        }
    ],
    "seconds": _SECONDS,
}

#: The document that stands in the place of any of them if a command fails.
ERROR: Shape = {
    "error": {
        "type": "string: class of the error",
        "code": "string: stable reason code, as in brackets on standard error",
        "message": "string: what is wrong and what to do",
        "where": "object: the place: path, layer, token, ... as far as known",
    }
}


def rows(shape: Shape, prefix: str = "") -> list[tuple[str, str, str]]:
    """Path, type and meaning of every key, ``layers[].layer`` for keys of objects in lists."""
    found = []
    for key, inner in shape.items():
        path = prefix + key.removesuffix("?")
        null = " or null" if key.endswith("?") else ""
        if isinstance(inner, str):
            kind, _, meaning = inner.partition(": ")
            found.append((path, kind + null, meaning))
        elif inner is INFO and prefix == "" and key == "info":
            found.append((path, "object", "what `info` says of the file"))
        elif isinstance(inner, list):
            found += [(path, "list of objects" + null, ""), *rows(inner[0], f"{path}[].")]
        else:
            found += [(path, "object" + null, ""), *rows(inner, f"{path}.")]
    return found
