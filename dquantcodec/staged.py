"""Objects held in a file of this machine: while they are written, or while much of them is read."""

from __future__ import annotations

import errno
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from .remote import RemoteBytes
from .urls import appears_whole, base_name, check_writable, filesystem, is_url, plain, shown, storage

#: Requests side by side, and their size, where much is fetched.
FETCHES = 4
FETCH_BYTES = 8 << 20


class Staged:
    """A file of this machine, as large as an object, into which ranges of it are fetched when they are needed.

    It takes no more room on the disk than what was fetched, where the file system has sparse files, and goes with this
    object.
    """

    def __init__(self, url: str) -> None:
        self.remote = RemoteBytes(url)
        folder = tempfile.mkdtemp(prefix="dqkv-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder) / base_name(url)
        with self.path.open("wb") as file:
            file.truncate(self.remote.size)
        self._lock = Lock()
        self._held: set[tuple[int, int]] = set()

    def hold(self, start: int, stop: int) -> None:
        """Fetch bytes ``start`` to ``stop``, once."""
        with self._lock:
            if (start, stop) in self._held:
                return
            starts = range(start, stop, FETCH_BYTES)
            with ThreadPoolExecutor(FETCHES) as pool:
                for _ in pool.map(lambda at: self._fetch(at, min(at + FETCH_BYTES, stop)), starts):
                    pass
            self._held.add((start, stop))

    def _fetch(self, start: int, stop: int) -> None:
        data = self.remote.fetch(start, stop)
        with self.path.open("r+b") as file:
            file.seek(start)
            file.write(data)


@contextmanager
def written(name: str) -> Iterator[str]:
    """A path to write to: ``name`` itself, or for a URL a temporary file that is uploaded when the block ends well.

    After an exception there is no new object at the URL.
    """
    if not is_url(name):
        yield plain(name)
        return
    check_writable(name)
    folder = tempfile.mkdtemp(prefix="dqkv-")
    try:
        path = Path(folder) / base_name(name)
        yield str(path)
        upload(path, name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def upload(path: Path, url: str) -> None:
    """Put the file at ``path`` to ``url``, where it appears whole or not at all.  Raises OSError."""
    fs, target = filesystem(url)
    place = target if appears_whole(url) else _partial(target)
    size = path.stat().st_size
    try:
        with storage(url):
            fs.put_file(str(path), place)
            fs.invalidate_cache(fs._parent(place))
            found = fs.info(place)["size"]
        if found != size:
            raise OSError(errno.EIO, f"{found} bytes arrived of {size}", shown(url))
        if place != target:
            with storage(url):
                fs.mv(place, target)
    except BaseException:
        if place != target:
            with suppress(Exception):
                fs.rm_file(place)
        raise


def _partial(name: str) -> str:
    folder, _, last = name.rpartition("/")
    return f"{folder}/.{last}.{secrets.token_hex(6)}.partial"
