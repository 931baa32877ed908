"""Many files at once: compressed, decompressed or checked, each by itself; what is done already is passed over.

:func:`run_item` is the whole of it for one file.  :func:`run_all` calls it in processes of this machine
(``dqkv compress DIR OUTDIR --jobs 4``), :mod:`dquantcodec.integrations.ray` on a cluster.

>>> from dquantcodec.batch import Item
>>> Item("s3://bucket/a.safetensors", "out/a.dqkv").files
('s3://bucket/a.safetensors',)
"""

from ..cli.compress import Settings
from ..cli.decompress import Decoding
from .items import Item, plan_items
from .outcome import Outcome, run_item
from .processes import run_all
from .work import Compress, Decompress, Verify, Work

__all__ = [
    "Compress",
    "Decoding",
    "Decompress",
    "Item",
    "Outcome",
    "Settings",
    "Verify",
    "Work",
    "plan_items",
    "run_all",
    "run_item",
]
