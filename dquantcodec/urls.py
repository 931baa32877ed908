"""Names of inputs and outputs that may be URLs: ``s3://bucket/key``, ``memory://name``, ``https://host/path``.

Everything that is no URL is a path of this machine, and so is ``file://``.  Storage is reached through fsspec, which is
imported when a URL is first used and never otherwise.  Credentials come from where fsspec and its storage packages look
for them; what this module shows of a URL has none.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .errors import DQuantError, InputError

#: One scheme before ``://``, or several joined by ``::`` as fsspec has them.
_URL = re.compile(r"(?:[a-z][a-z0-9+.-]*::)*([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_LOCAL = ("file", "local")
_WEB = ("http", "https")
#: Storage in which an object appears whole or not at all; elsewhere it is written beside its name and renamed.
_WHOLE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss")
#: What of a URL may be secret: a user's name and password, and the signature in a query.
_LOGIN = re.compile(r"://[^/\s'\"]*@")
_QUERY = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", re.IGNORECASE)
#: Packages by scheme that an extra of ours installs.
_EXTRAS = {"s3": "s3", "s3a": "s3", "memory": "fsspec", "http": "fsspec", "https": "fsspec"}


def is_url(name: str) -> bool:
    """Whether ``name`` is a URL of storage; ``file://`` is not, see :func:`plain`.

    >>> is_url("s3://bucket/kv.dqkv"), is_url("kv.dqkv"), is_url("file:///kv.dqkv")
    (True, False, False)
    """
    found = _URL.match(name)
    return found is not None and found[1].lower() not in _LOCAL


def plain(name: str | os.PathLike[str]) -> str:
    """``name`` as text, and ``file://`` URLs as the path they stand for.

    >>> plain("file:///tmp/two%20words.dqkv")
    '/tmp/two words.dqkv'
    """
    text = os.fspath(name)
    found = _URL.match(text)
    if found and found[1].lower() in _LOCAL:
        from urllib.request import url2pathname  # brings much along

        return url2pathname(urlsplit(text).path)
    return text


def shown(name: str) -> str:
    """``name`` without what may be secret in it: logins, and queries of web addresses.  Paths stay as they are.

    >>> shown("https://me:secret@host/kv.dqkv?signature=secret")
    'https://host/kv.dqkv'
    """
    return _QUERY.sub(r"\1", _LOGIN.sub("://", name)) if "://" in name else name


def scheme(url: str) -> str:
    found = _URL.match(url)
    return found[1].lower() if found else ""


def base_name(name: str) -> str:
    """The last part of a path or URL.

    >>> base_name("https://host/a/kv%201.safetensors?signature=x"), base_name("s3://bucket/a/"), base_name("a/b.npz")
    ('kv 1.safetensors', 'a', 'b.npz')
    """
    if scheme(name) in _WEB:
        name = unquote(urlsplit(name).path)
    return re.split(r"[/\\]" if os.sep == "\\" else "/", name.rstrip("/"))[-1]


def beside(name: str, other: str) -> str:
    """``other`` in the folder ``name``, both as they are written.

    >>> beside("s3://bucket/out/", "a/kv.dqkv")
    's3://bucket/out/a/kv.dqkv'
    """
    return f"{name.rstrip('/')}/{other}" if is_url(name) else str(Path(name, *other.split("/")))


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of ``url``, and its name there.

    Raises :class:`InputError`: ``url-package`` where fsspec or the storage's package is not installed, ``url-scheme``
    for storage that fsspec does not know.
    """
    kind = scheme(url)
    try:
        from fsspec.core import url_to_fs

        found: tuple[Any, str] = url_to_fs(url)
    except ImportError as error:
        extra = _EXTRAS.get(kind, "fsspec" if error.name == "fsspec" else "")
        hint = f"; python -m pip install 'dquantcodec[{extra}]'" if extra else ""
        raise InputError(
            f"{shown(url)}: {kind}:// needs a package that is not installed ({without_secrets(error)}){hint}",
            code="url-package",
            path=shown(url),
        ) from None
    except ValueError:
        raise InputError(
            f"{shown(url)}: no storage is known by {kind}://", code="url-scheme", path=shown(url)
        ) from None
    return found


def refuse_appending(url: str) -> InputError:
    """Why a URL cannot be appended to."""
    return InputError(
        f"{shown(url)}: objects in storage cannot grow; append to a file of this machine and upload it, or write a new "
        "object with create or repack",
        code="url-append",
        path=shown(url),
    )


def appears_whole(url: str) -> bool:
    """Whether an object put at ``url`` is there whole or not at all."""
    return scheme(url) in _WHOLE


def check_writable(url: str) -> None:
    """Refuse what can only be read (``url-read-only``) before any work; raises what :func:`filesystem` raises."""
    if scheme(url) in _WEB:
        raise InputError(
            f"{shown(url)}: web addresses can only be read; write to a path or to a store such as s3://",
            code="url-read-only",
            path=shown(url),
        )
    filesystem(url)


@contextmanager
def storage(url: str) -> Iterator[None]:
    """Whatever storage raises inside becomes an OSError that names the URL and holds no secret.

    FileNotFoundError and PermissionError stay what they are; everything else has errno EIO.
    """
    name = shown(url)
    try:
        yield
    except (DQuantError, MemoryError):
        raise
    except Exception as found:
        # For web addresses fsspec says "not found" whatever happened; what did is behind it.
        cause = found.__cause__ if scheme(url) in _WEB else None
        error = cause if isinstance(cause, Exception) else found
        if isinstance(error, FileNotFoundError) or getattr(error, "status", None) == 404:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", name) from None
        if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
            raise PermissionError(errno.EACCES, "access was refused; check the credentials", name) from None
        raise OSError(errno.EIO, without_secrets(error), name) from None


def without_secrets(error: Exception) -> str:
    """The error's own words in one line, URLs in it as :func:`shown` has them."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {shown(words)}" if words else type(error).__name__
