"""The image, read back as Istio and Envoy Gateway read it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from release.project import MODULE, ROOT
from tests.release.layout import DOCKER_LAYER, DOCKER_MANIFEST, Layout, NotAnImage, read

from release import image


def write(folder: Path) -> tuple[Layout, str]:
    """Writes the image as `make image` does; also returns what that prints."""
    command = [sys.executable, "-m", "release", "image", "--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return Layout(read(folder)), done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Layout, str]:
    """The image of the built module, and what was printed."""
    return write(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def layout(written: tuple[Layout, str]) -> Layout:
    """The image of the built module."""
    return written[0]


@pytest.fixture(scope="module")
def module() -> bytes:
    """The built module."""
    return (ROOT / MODULE).read_bytes()


def test_the_fetchers_get_the_module(layout: Layout, module: bytes) -> None:
    """Byte for byte, as compat, and in no other way."""
    assert layout.fetch() == module
    with pytest.raises(NotAnImage):
        layout.from_archive(DOCKER_LAYER)
    with pytest.raises(NotAnImage):
        layout.from_artifact()


def test_the_fetchers_get_the_module_of_a_docker_image(layout: Layout, module: bytes) -> None:
    """A registry or tool that turns the image into Docker's form changes nothing but names."""
    docker = Layout(layout.files)
    docker.manifest["mediaType"] = DOCKER_MANIFEST
    for layer in docker.manifest["layers"]:
        layer["mediaType"] = DOCKER_LAYER
    assert docker.fetch() == module


def test_the_manifest_is_of_the_compat_variant(layout: Layout) -> None:
    """One layer, the annotation, and a configuration that is a container's."""
    assert layout.manifest["mediaType"] == image.MANIFEST
    assert layout.manifest["annotations"]["module.wasm.image/variant"] == "compat"
    (layer,) = layout.manifest["layers"]
    assert layout.manifest["config"]["mediaType"] == image.CONFIG
    config = json.loads(layout.blob(layout.manifest["config"]))
    assert (config["os"], config["architecture"]) == ("linux", "amd64")
    archive = hashlib.sha256(gzip.decompress(layout.blob(layer))).hexdigest()
    assert config["rootfs"] == {"type": "layers", "diff_ids": [f"sha256:{archive}"]}
    labels = config["config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "mcp-resume-guard"
    assert labels["org.opencontainers.image.version"] == layout.tag
    assert labels.items() <= layout.manifest["annotations"].items()


def test_nothing_else_is_in_the_layout(layout: Layout) -> None:
    """Three blobs, no more: what a push sends is what is there."""
    described = [layout.manifest["config"], *layout.manifest["layers"]]
    blobs = {descriptor["digest"].partition(":")[2] for descriptor in described} | {layout.digest}
    paths = {f"blobs/sha256/{digits}" for digits in blobs}
    assert set(layout.files) == paths | {"oci-layout", "index.json"}


def test_the_layer_has_no_times_and_no_owner(layout: Layout) -> None:
    """And the licences are in it."""
    (layer,) = layout.manifest["layers"]
    packed = layout.blob(layer)
    # No flags, no time, an unknown system: RFC 1952, 2.3.
    assert packed[:10] == b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(packed))) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == ["plugin.wasm", "LICENSE", "THIRD_PARTY_LICENSES"]
    for member in members:
        assert (member.mtime, member.uid, member.gid, member.mode) == (0, 0, 0, 0o644)
        assert (member.uname, member.gname) == ("", "")


def test_what_is_printed_is_what_is_there(written: tuple[Layout, str], module: bytes) -> None:
    """The two digests, and the commands with the tag."""
    layout, printed = written
    image_digest, module_digest = re.findall(r"sha256:([0-9a-f]{64})$", printed, re.MULTILINE)
    assert image_digest == layout.digest
    assert module_digest == hashlib.sha256(module).hexdigest()
    for command in ("skopeo copy", "crane push", "oras cp"):
        (line,) = (line for line in printed.splitlines() if line.strip().startswith(command))
        assert line.endswith(f"{image.NAME}:{layout.tag}")


def test_twice_built_is_the_same(layout: Layout, tmp_path: Path) -> None:
    """To the byte, in the place of something else."""
    (tmp_path / "blobs" / "sha256").mkdir(parents=True)
    (tmp_path / "blobs" / "sha256" / "old").write_bytes(b"of another build")
    again, _ = write(tmp_path)
    assert again.files == layout.files


@pytest.mark.parametrize("size", [1, 65534, 65535, 65536, 200_000])
def test_stored_blocks(size: int) -> None:
    """Whoever reads gzip reads them."""
    data = bytes(number * 31 % 251 for number in range(size))
    assert gzip.decompress(image.gzip(data)) == data


def test_no_python_makes_other_bytes() -> None:
    """The digest of an archive is the same in every release of Python and with every zlib."""
    packed = image.gzip(image.tar({"plugin.wasm": bytes(range(256)) * 1000, "LICENSE": b"x"}))
    expected = "365e5e2a9acf92a304432d83ce789247caad33333348f045d2ab665db4ccdf4e"
    assert hashlib.sha256(packed).hexdigest() == expected
