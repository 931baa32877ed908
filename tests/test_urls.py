"""Inputs and outputs at URLs: what is fetched, what is left of a failure, and what errors say."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

import dquantcodec as dq
from dquantcodec.cli.main import main
from dquantcodec.file import repack
from dquantcodec.remote import RemoteBytes
from dquantcodec.staged import upload
from dquantcodec.tensors import open_source

fsspec = pytest.importorskip("fsspec")

LAYERS = [dq.Layer(2, 64, "float16", storage="exact")] * 4
ROWS = np.random.default_rng(0).standard_normal((2000, 2, 64)).astype(np.float16)


def write(url: str | Path) -> None:
    with dq.create(url, LAYERS, model="m") as out:
        for start in range(0, 2000, 500):
            out.append([ROWS[start : start + 500]] * 4, [ROWS[start : start + 500]] * 4)


@pytest.fixture
def memory() -> Iterator[Any]:
    """The file system behind memory://, empty."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go; nothing may stay in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that says how many bytes were asked of storage since it was last called."""
    fetch = RemoteBytes.fetch
    sizes: list[int] = []

    def fetching(self: RemoteBytes, start: int, stop: int) -> bytes:
        sizes.append(stop - start)
        return fetch(self, start, stop)

    def total() -> int:
        found = sum(sizes)
        sizes.clear()
        return found

    monkeypatch.setattr(RemoteBytes, "fetch", fetching)
    return total


def tensors(layers: int = 2) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(7)
    names = [f"layers.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    return {name: rng.standard_normal((1, 2, 400, 64)).astype(np.float16) for name in names}


def check_ranges(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening fetches little, one layer of four about a quarter, and a second read of the newest tokens nothing."""
    total = counted(monkeypatch)
    with dq.open(url, expect={"model": "m"}) as cache:
        assert total() < cache.data.nbytes // 8
        assert np.array_equal(cache.layers[2].key[:], ROWS)
        assert np.array_equal(cache.layers[2].value[700:1100], ROWS[700:1100])
        assert 0 < total() < cache.data.nbytes // 2
        assert np.array_equal(cache.layers[2].key[1990:], ROWS[1990:])
        assert total() == 0
        assert not list(cache.verify())


def test_a_reader_fetches_only_the_ranges_it_needs(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write("memory://box/kv.dqkv")
    check_ranges("memory://box/kv.dqkv", monkeypatch)


def test_bytes_of_an_object_slice_as_a_view_does(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(3).integers(0, 256, (3 << 20) + 17, np.uint8)
    memory.pipe_file("/bytes", data.tobytes())
    total = counted(monkeypatch)
    remote = RemoteBytes("memory://bytes")
    assert remote.nbytes == data.nbytes
    assert np.array_equal(remote[77 : 77 + (2 << 20)], data[77 : 77 + (2 << 20)])
    assert total() == 2 << 20
    for part in (
        slice(0, 0),
        slice(65_530, 65_540),
        slice(-17, None),
        slice(5, 3),
        slice(1 << 30),
        slice(131_072, 400_000),
    ):
        assert np.array_equal(remote[part], data[part])


def test_objects_are_the_files_that_paths_would_be(memory: Any, tmp_path: Path) -> None:
    write(tmp_path / "kv.dqkv")
    write("memory://kv.dqkv")
    local, remote = (tmp_path / "kv.dqkv").read_bytes(), memory.cat_file("/kv.dqkv")
    assert len(local) == len(remote)
    with dq.open((tmp_path / "kv.dqkv").as_uri()) as cache:
        assert cache.path == str(tmp_path / "kv.dqkv")
        repack(cache, "memory://packed.dqkv")
    with dq.open("memory://packed.dqkv", mode="strict") as cache:
        assert np.array_equal(cache.layers[0].key[:], ROWS)


@pytest.mark.parametrize("cut", [1, 5000, 300_000])
def test_torn_objects_read_as_torn_files_do(memory: Any, tmp_path: Path, cut: int) -> None:
    write("memory://kv.dqkv")
    data = memory.cat_file("/kv.dqkv")[:-cut]
    (tmp_path / "kv.dqkv").write_bytes(data)
    memory.pipe_file("/kv.dqkv", data)
    with dq.open(tmp_path / "kv.dqkv") as local, dq.open("memory://kv.dqkv") as remote:
        assert remote.torn and remote.tokens == local.tokens
        assert [one.code for one in remote.verify()] == [one.code for one in local.verify()]


class StoppedError(Exception):
    """What a test stops a writer with."""


def test_nothing_is_left_of_a_write_that_fails(memory: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe_file("/kv.dqkv", b"older")
    with pytest.raises(StoppedError), dq.create("memory://kv.dqkv", LAYERS) as out:
        out.append([ROWS] * 4, [ROWS] * 4)
        raise StoppedError
    put = type(memory).put_file

    def half(self: Any, local: str, name: str, **options: Any) -> None:
        put(self, local, name, **options)
        self.store[name].truncate(1000)
        raise ConnectionResetError("cut off while user:secret@host was asked")

    monkeypatch.setattr(type(memory), "put_file", half)
    with pytest.raises(OSError, match=r"ConnectionResetError.*'memory://kv.dqkv'"):
        write("memory://kv.dqkv")
    assert list(memory.store) == ["/kv.dqkv"]
    assert memory.cat_file("/kv.dqkv") == b"older"
    assert not list(temporary.iterdir())


def test_a_flush_is_refused_and_the_writer_goes_on(memory: Any) -> None:
    with dq.create("memory://kv.dqkv", LAYERS[:1]) as out:
        out.append([ROWS[:10]], [ROWS[:10]])
        with pytest.raises(dq.DQuantError) as refused:
            out.flush()
        assert refused.value.code == "url-flush"
        with pytest.raises(dq.DQuantError, match="cannot grow"):
            out._target.publish()
        out.append([ROWS[10:20]], [ROWS[10:20]])
    with dq.open("memory://kv.dqkv") as cache:
        assert cache.tokens == 20


@pytest.mark.parametrize(
    ("attempt", "code"),
    [
        (lambda: dq.append("https://me:secret@host/kv.dqkv?signature=secret"), "url-append"),
        (lambda: dq.create("https://me:secret@host/kv.dqkv?signature=secret", LAYERS), "url-read-only"),
        (lambda: dq.open("nonesuch://me:secret@host/kv.dqkv"), "url-scheme"),
    ],
)
def test_refusals_name_the_url_without_its_secrets(attempt: Callable[[], object], code: str) -> None:
    with pytest.raises(dq.DQuantError, match=r"://host/kv\.dqkv: ") as refused:
        attempt()
    assert refused.value.code == code
    assert "secret" not in f"{refused.value} {refused.value.where}"


def test_commands_take_urls(memory: Any, temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory.pipe_file("/in/kv.safetensors", save(tensors()))
    exact = ["--exact-layers", "0,1", "--quiet"]
    assert main(["compress", "memory://in/kv.safetensors", "memory://out/kv.dqkv", *exact]) == 0
    assert main(["verify", "memory://out/kv.dqkv"]) == 0
    assert main(["decompress", "memory://out/kv.dqkv", "memory://out/back.safetensors", "--quiet"]) == 0
    (temporary.parent / "back.safetensors").write_bytes(memory.cat_file("/out/back.safetensors"))
    back = load_file(temporary.parent / "back.safetensors")
    assert {name: array.tobytes() for name, array in back.items()} == {
        name: array.tobytes() for name, array in tensors().items()
    }
    capsys.readouterr()
    bad = tensors()
    bad["layers.1.value"][0, 0, 399, 0] = np.nan
    memory.pipe_file("/in/bad.safetensors", save(bad))
    for command in (
        ["compress", "memory://in/bad.safetensors", "memory://out/bad.dqkv", *exact, "--recent", "0"],
        ["compress", "memory://in/none.safetensors", "memory://out/bad.dqkv", *exact],
        ["append", "memory://in/kv.safetensors", "memory://out/kv.dqkv", "--quiet"],
    ):
        assert main(command) == 1
    errors = capsys.readouterr().err.splitlines()
    for line, code in zip(errors, ("input-nonfinite", "not-found", "url-append"), strict=True):
        assert line.startswith("dqkv: error: memory://") and line.endswith(f"[{code}]"), line
    assert sorted(memory.store) == [
        "/in/bad.safetensors", "/in/kv.safetensors", "/out/back.safetensors", "/out/kv.dqkv"
    ]  # fmt: skip
    assert not list(temporary.glob("*.partial"))


def test_layers_of_an_input_are_fetched_alone_and_once(
    memory: Any, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two shards that an index names, one is needed, and of it one layer of three."""
    whole = tensors(4)
    first = {name: array for name, array in whole.items() if not name.startswith("layers.3")}
    last = {name: array for name, array in whole.items() if name.startswith("layers.3")}
    for name, part in (("a", first), ("b", last)):
        memory.pipe_file(f"/in/{name}.safetensors", save(part))
    index = {name: "b.safetensors" if name in last else "a.safetensors" for name in whole}
    memory.pipe_file("/in/model.safetensors.index.json", json.dumps({"weight_map": index}).encode())
    total = counted(monkeypatch)
    out = str(tmp_path / "kv.dqkv")
    assert main(["compress", "memory://in", out, "--layers", "1", "--exact-layers", "1", "--quiet"]) == 0
    layer = whole["layers.1.key"].nbytes * 2
    assert layer <= total() < layer + 10_000
    with dq.open(out) as cache:
        assert np.array_equal(cache.layers[0].key[:], whole["layers.1.key"][0].transpose(1, 0, 2))
    source = open_source("memory://in")
    total()
    for first in (0, 100):
        source.read(3, "value", 0, first, first + 100)
    assert total() == whole["layers.3.value"].nbytes


def test_paths_do_not_load_fsspec(tmp_path: Path) -> None:
    write(tmp_path / "kv.dqkv")
    code = (
        "import sys, dquantcodec as dq; from dquantcodec.cli.main import main; from dquantcodec.file import creating; "
        "assert main(['info', 'kv.dqkv', '--json']) == 0; assert 'fsspec' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


class Web(BaseHTTPRequestHandler):
    """Serves one file, by ranges unless the path says otherwise, to who has the signature."""

    data = b""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        if not self.path.endswith("?signature=secret"):
            self.send_error(403)
            return
        part, status = self.data, 200
        wanted = self.headers.get("Range")
        if wanted and not self.path.startswith("/whole"):
            first, last = wanted.removeprefix("bytes=").split("-")
            part, status = self.data[int(first) : int(last) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Accept-Ranges", "none" if self.path.startswith("/whole") else "bytes")
        self.end_headers()
        if body:
            self.wfile.write(part)

    def log_message(self, *_: object) -> None: ...


def test_web_addresses_are_read_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    write(tmp_path / "kv.dqkv")
    monkeypatch.setattr(Web, "data", (tmp_path / "kv.dqkv").read_bytes())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        host = f"http://127.0.0.1:{server.server_port}"
        with dq.open(f"{host}/kv.dqkv?signature=secret") as cache:
            assert np.array_equal(cache.layers[3].value[10:600], ROWS[10:600])
        with pytest.raises(OSError, match="gives no ranges") as refused:
            dq.open(f"{host}/whole?signature=secret")
        assert "secret" not in str(refused.value)
        with pytest.raises(PermissionError) as forbidden:
            dq.open(f"{host}/kv.dqkv?signature=wrong-secret")
        assert "secret" not in str(forbidden.value)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a server of this process: ranges, uploads in one and in many parts, nothing left of failures."""
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    from fsspec.config import conf

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "someone", "secret": "hidden-secret", "endpoint_url": f"http://{host}:{port}"}
    monkeypatch.setitem(conf, "s3", options)
    put = s3fs.S3FileSystem._put_file

    async def in_parts(self: Any, *arguments: Any, **others: Any) -> None:
        # Parts of an upload are 5 MiB at least.
        await put(self, *arguments, **{**others, "chunksize": 5 << 20})

    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", in_parts)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        fs = s3fs.S3FileSystem()
        fs.mkdir("bucket")
        write("s3://bucket/deep/kv.dqkv")
        check_ranges("s3://bucket/deep/kv.dqkv", monkeypatch)
        fs.pipe_file("bucket/in.safetensors", save(tensors()))
        large = tmp_path / "large"
        large.write_bytes(ROWS.tobytes() * 24)
        upload(large, "s3://bucket/large.dqkv")
        assert fs.cat_file("bucket/large.dqkv") == large.read_bytes()

        exact = ["--exact-layers", "0,1", "--quiet"]
        assert main(["compress", "s3://bucket/in.safetensors", "s3://bucket/out.dqkv", *exact]) == 0
        with pytest.raises(StoppedError), dq.create("s3://bucket/half.dqkv", LAYERS[:1]) as out:
            out.append([ROWS], [ROWS])
            raise StoppedError

        async def refuse(*_: Any, **__: Any) -> None:
            raise OSError("part refused by https://someone:hidden-secret@host/?signature=hidden")

        monkeypatch.setattr(s3fs.S3FileSystem, "_upload_file_part_concurrent", refuse)
        with pytest.raises(OSError, match=r"s3://bucket/half\.dqkv") as refused:
            upload(large, "s3://bucket/half.dqkv")
        assert "hidden" not in str(refused.value)
        fs.invalidate_cache()
        assert fs.find("bucket") == [
            f"bucket/{name}" for name in ("deep/kv.dqkv", "in.safetensors", "large.dqkv", "out.dqkv")
        ]
        assert not fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")
        capsys.readouterr()
        for name in ("s3://bucket/none.dqkv", "s3://nobucket/kv.dqkv"):
            assert main(["info", name]) == 1
            message = capsys.readouterr().err
            assert f"error: {name}: " in message and "[not-found]" in message and "hidden" not in message
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
