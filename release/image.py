"""The module as a container image: an OCI image layout, written without a container tool.

The image is of the *compat* form that Istio and Envoy Gateway fetch (solo-io/wasm,
spec/spec-compat.md): one layer, a gzipped tar, with the file `plugin.wasm`.

It is one manifest and no index. Both fetchers take a manifest as it is, whatever its platform, on
every machine. Of an index they take the entry for linux/amd64, compare `sha256` with the digest of
that entry and not with the one that the registry shows, and find nothing where the entry is
missing. The configuration names linux/amd64, so that a tool that makes an index of it all the same
makes one in which they find the module; the module itself runs anywhere.

The layer is stored, not compressed: what deflate makes of the same bytes differs between zlib,
its forks and their releases, and so would the digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import licenses
from .contents import Contents
from .project import ROOT

NAME = "registry.example.com/mcp-resume-guard"
"""The image's name in the manifests under envoy/."""

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"

_STORED = 0xFFFF
"""The most bytes that a stored block of deflate can hold (RFC 1951, 3.2.4)."""


@dataclass(frozen=True)
class Image:
    """An image layout, by the paths of its files."""

    files: dict[str, bytes]
    digest: str
    """The manifest's: 64 hexadecimal digits."""


def build(module: bytes, contents: Contents) -> Image:
    """The image of a module."""
    files = {
        # First, so that whoever looks for it reads no further.
        "plugin.wasm": module,
        # The fetchers pass over what has another name. The licences want to be handed on.
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
        licenses.FILE: licenses.text(contents).encode(),
    }
    archive = tar(files)
    labels = {
        "org.opencontainers.image.title": contents.name,
        "org.opencontainers.image.description": contents.description,
        "org.opencontainers.image.version": contents.version,
        "org.opencontainers.image.licenses": contents.license,
    }
    if contents.repository:
        labels["org.opencontainers.image.source"] = contents.repository
    blobs: dict[str, bytes] = {}
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_sha256(archive)}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _put(blobs, CONFIG, _json(config)),
        "layers": [_put(blobs, LAYER, gzip(archive))],
        "annotations": {"module.wasm.image/variant": "compat", **labels},
    }
    described = _put(blobs, MANIFEST, _json(manifest))
    tag = {"org.opencontainers.image.ref.name": contents.version}
    index = {"schemaVersion": 2, "manifests": [{**described, "annotations": tag}]}
    layout = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json(index),
    }
    return Image({**layout, **blobs}, described["digest"].partition(":")[2])


def write(image: Image, folder: Path) -> None:
    """Writes the layout in the place of what `folder` holds."""
    shutil.rmtree(folder, ignore_errors=True)
    for path, data in image.files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def tar(files: dict[str, bytes]) -> bytes:
    """An archive of files that belong to nobody and are of 1970."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def gzip(data: bytes) -> bytes:
    """A gzip file (RFC 1952) of stored blocks, without a time and a name."""
    packed = [b"\x1f\x8b\x08\0\0\0\0\0\0\xff"]
    for start in range(0, len(data), _STORED):
        block = data[start : start + _STORED]
        last = start + _STORED >= len(data)
        packed += [struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF), block]
    return b"".join(packed) + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def _put(blobs: dict[str, bytes], media_type: str, data: bytes) -> dict[str, Any]:
    """Adds a blob; returns its descriptor."""
    blobs[f"blobs/sha256/{_sha256(data)}"] = data
    return {
        "mediaType": media_type,
        "digest": f"sha256:{_sha256(data)}",
        "size": len(data),
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
