"""An image layout, read back as Istio and Envoy Gateway read an image."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
WASM_LAYER = "application/vnd.module.wasm.content.layer.v1+wasm"


class NotAnImage(Exception):
    """The fetchers would refuse it."""


class Layout:
    """An image layout, and what the fetchers of Istio (pkg/wasm/imagefetcher.go) and of Envoy
    Gateway (internal/wasm/imagefetcher.go), which is its copy, do once a registry serves it."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
        (described,) = json.loads(files["index.json"])["manifests"]
        self.tag = described["annotations"]["org.opencontainers.image.ref.name"]
        self.digest = described["digest"].partition(":")[2]
        """What `sha256` in a manifest is compared with."""
        self.manifest = json.loads(self.blob(described))

    def blob(self, descriptor: dict[str, Any]) -> bytes:
        """A blob, if it is what the descriptor says."""
        algorithm, _, digits = descriptor["digest"].partition(":")
        data = self.files[f"blobs/{algorithm}/{digits}"]
        assert hashlib.new(algorithm, data).hexdigest() == digits
        assert len(data) == descriptor["size"]
        return data

    def fetch(self) -> bytes:
        """The module: as from a Docker image, else compat, else from an OCI artifact."""
        if self.manifest["mediaType"] == DOCKER_MANIFEST:
            return self.from_archive(DOCKER_LAYER)
        try:
            return self.from_archive(OCI_LAYER)
        except NotAnImage:
            return self.from_artifact()

    def from_archive(self, media_type: str) -> bytes:
        """From the tar of the last layer, whatever the file's folder."""
        layer = self.manifest["layers"][-1]
        if layer["mediaType"] != media_type:
            raise NotAnImage(layer["mediaType"])
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(self.blob(layer)))) as archive:
            for member in archive:
                if member.name.rpartition("/")[2] == "plugin.wasm":
                    return archive.extractfile(member).read()  # type: ignore[union-attr]
        raise NotAnImage("no plugin.wasm")

    def from_artifact(self) -> bytes:
        """From the one of two layers that is the module itself."""
        layers = self.manifest["layers"]
        found = [layer for layer in layers if layer["mediaType"] == WASM_LAYER]
        if len(layers) != 2 or not found:
            raise NotAnImage("no artifact")
        return self.blob(found[0])


def read(folder: Path) -> dict[str, bytes]:
    """All files of a folder, by their paths in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
