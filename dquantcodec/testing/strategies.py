"""Hypothesis strategies: plans, tables, symbols, containers, tensors and pages, sound, damaged and random.

Everything is small, so that plain Python can follow, and shrinks: towards few heads of few values, even tables, equal
symbols and containers of zeros.
"""

from __future__ import annotations

from .container_strategies import (
    CODERS,
    ContainerCase,
    classes,
    container_plans,
    containers,
    groupings,
    streams,
    symbols,
    tables,
)
from .page_strategies import (
    PageCase,
    TensorCase,
    kv_tensors,
    page_geometries,
    page_tensors,
    pages,
    plans,
    profiles,
    stream_profiles,
    tightest,
)

__all__ = [
    "CODERS",
    "ContainerCase",
    "PageCase",
    "TensorCase",
    "classes",
    "container_plans",
    "containers",
    "groupings",
    "kv_tensors",
    "page_geometries",
    "page_tensors",
    "pages",
    "plans",
    "profiles",
    "stream_profiles",
    "streams",
    "symbols",
    "tables",
    "tightest",
]
