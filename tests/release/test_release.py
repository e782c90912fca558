"""`make release`, in a repository of its own: what it makes, and what it refuses."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from release.project import MODULE, ROOT, Refused
from tests.release.layout import Layout, read

from release import bundle, contents, image

VERSION = contents.read().version


def run(repository: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command there, without what a `make` around this one, or a user's Git, would change."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "GIT_", "CARGO_PROFILE_", "CARGO_ENCODED_"))
        and name not in ("RUSTFLAGS", "ALLOW_UNTAGGED", "IMAGE")
    }
    kept["GIT_CONFIG_GLOBAL"] = kept["GIT_CONFIG_SYSTEM"] = os.devnull
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        kept[f"{name}_NAME"], kept[f"{name}_EMAIL"] = "A Tester", "tester@example.com"
    return subprocess.run(
        command,
        cwd=repository,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**kept, **environment},
    )


def git(repository: Path, *arguments: str) -> None:
    """Git, which has to succeed."""
    done = run(repository, "git", *arguments)
    assert done.returncode == 0, done.stdout


def release(repository: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`make release` with the module and the Python packages that are there already: a build
    there would be the same minute's work again."""
    venv = Path(sys.prefix)
    there = ("build", f"{venv}/ready", f"{venv}/release-ready")
    old = [argument for name in there for argument in ("-o", name)]
    return run(repository, "make", *old, f"VENV={venv}", "release", **environment)


@pytest.fixture(scope="session")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the files of this one as they are now, ready to be released."""
    repository = tmp_path_factory.mktemp("tagged")
    listed = run(ROOT, "git", "ls-files", "--cached", "--others", "--exclude-standard").stdout
    for path in (*listed.splitlines(), str(MODULE)):
        if (ROOT / path).is_file():
            (repository / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, repository / path)
    changelog = repository / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    if f"## {VERSION}" not in text:
        changelog.write_text(text.replace("## Unreleased", f"## {VERSION}"), encoding="utf-8")
    git(repository, "init", "--quiet")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "All of it")
    git(repository, "tag", f"v{VERSION}")
    return repository


@pytest.fixture
def repository(tagged: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    copy = tmp_path / "repository"
    shutil.copytree(tagged, copy, ignore=shutil.ignore_patterns("release-*"))
    return copy


@pytest.fixture(scope="session")
def released(tagged: Path) -> tuple[dict[str, bytes], str]:
    """The files of a release, and what was printed."""
    done = release(tagged)
    assert done.returncode == 0, done.stdout
    return read(tagged / "target" / f"release-{VERSION}"), done.stdout


def test_the_checksums_are_of_all_files(released: tuple[dict[str, bytes], str]) -> None:
    """In the form that `sha256sum --check` reads."""
    files = dict(released[0])
    lines = files.pop("SHA256SUMS").decode().splitlines()
    sums = dict(reversed(line.split("  ", 1)) for line in lines)  # type: ignore[misc]
    assert sums == {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}


def test_the_module_and_its_image(released: tuple[dict[str, bytes], str]) -> None:
    """The image is there as a folder and as one file, and its digest is printed."""
    files, printed = released
    module = (ROOT / MODULE).read_bytes()
    assert files["mcp_resume_guard.wasm"] == module
    name = f"mcp-resume-guard-{VERSION}.oci"
    folder = {
        path[len(name) + 1 :]: data for path, data in files.items() if path.startswith(f"{name}/")
    }
    layout = Layout(folder)
    assert layout.fetch() == module
    assert f"image   sha256:{layout.digest}\n" in printed
    with tarfile.open(fileobj=io.BytesIO(files[f"{name}.tar"])) as archive:
        packed = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert packed == folder


def test_the_papers(released: tuple[dict[str, bytes], str]) -> None:
    """The licences, the SBOM of this module, the schema, and the changelog's section."""
    files = released[0]
    assert files["LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"serde_json" in files["THIRD_PARTY_LICENSES"]
    (digest,) = json.loads(files["mcp-resume-guard.cdx.json"])["metadata"]["component"]["hashes"]
    assert digest["content"] == hashlib.sha256(files["mcp_resume_guard.wasm"]).hexdigest()
    assert str(bundle.SCHEMA) in files
    notes = files["RELEASE_NOTES.md"].decode()
    assert notes.startswith(f"# mcp-resume-guard {VERSION}\n\n")
    body = notes.partition("\n\n")[2].strip()
    assert len(body.splitlines()) > 3
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert body in changelog
    assert "\n## " not in body


def test_the_manifests_have_the_digests(released: tuple[dict[str, bytes], str]) -> None:
    """Of this image and this module, wherever one stands."""
    files, printed = released
    digests = set(re.findall(r"^(?:image|module)  ? sha256:(\w{64})$", printed, re.MULTILINE))
    assert len(digests) == 2
    manifests = {path: data.decode() for path, data in files.items() if path.endswith(".yaml")}
    assert "filename: mcp_resume_guard.wasm" in manifests["envoy/envoy.yaml"]
    for path, text in manifests.items():
        assert set(re.findall(r'^\s*sha256: "(\w*)"', text, re.MULTILINE)) <= digests, path
        assert "0" * 64 not in text, path
        assert set(re.findall(re.escape(image.NAME) + r":([\w.-]+)", text)) <= {VERSION}, path


def test_a_second_run_makes_the_same_bytes(
    released: tuple[dict[str, bytes], str], repository: Path
) -> None:
    """In another folder, too."""
    done = release(repository)
    assert done.returncode == 0, done.stdout
    assert read(repository / "target" / f"release-{VERSION}") == released[0]


def untagged(repository: Path) -> None:
    git(repository, "tag", "--delete", f"v{VERSION}")


def tagged_before(repository: Path) -> None:
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "One more")


def tagged_otherwise(repository: Path) -> None:
    untagged(repository)
    git(repository, "tag", "v99.0.0")


def changed(repository: Path) -> None:
    with (repository / "README.md").open("a") as file:
        file.write("more\n")


def file_left(repository: Path) -> None:
    (repository / "src" / "left.rs").write_text("// not committed\n")


def without_section(repository: Path) -> None:
    file = repository / "CHANGELOG.md"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(f"## {VERSION}", "## Unreleased"), encoding="utf-8")
    git(repository, "commit", "--quiet", "--all", "--message", "No section")
    git(repository, "tag", "--force", f"v{VERSION}")


def without_schema(repository: Path) -> None:
    git(repository, "rm", "--quiet", str(bundle.SCHEMA))
    git(repository, "commit", "--quiet", "--message", "No schema")
    git(repository, "tag", "--force", f"v{VERSION}")


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (untagged, f"HEAD is not tagged v{VERSION} (it has no tag)"),
    (tagged_before, f"HEAD is not tagged v{VERSION} (it has no tag)"),
    (tagged_otherwise, f"HEAD is not tagged v{VERSION} (its tags: v99.0.0)"),
    (changed, " M README.md"),
    (file_left, "?? src/left.rs"),
    (without_section, f"CHANGELOG.md has no section `## {VERSION}`"),
    (without_schema, f"{bundle.SCHEMA} is missing"),
]


@pytest.mark.parametrize(("change", "told"), REFUSED, ids=[c.__name__ for c, _ in REFUSED])
def test_what_is_refused(repository: Path, change: Callable[[Path], None], told: str) -> None:
    """Says why, and leaves nothing."""
    change(repository)
    done = release(repository)
    assert done.returncode != 0
    assert told in done.stdout
    assert not list((repository / "target").glob("release-*"))


def test_flags_that_change_the_module_are_refused(repository: Path) -> None:
    """They take the place of .cargo/config.toml."""
    for name in ("CARGO_TARGET_WASM32_WASIP1_RUSTFLAGS", "RUSTC_WRAPPER"):
        assert f"{name} is set" in release(repository, **{name: ""}).stdout
    done = release(repository, RUSTFLAGS="-C opt-level=3")
    assert done.returncode != 0
    assert "RUSTFLAGS is set" in done.stdout


def test_a_trial_says_that_it_is_one(repository: Path) -> None:
    """On the terminal and in its notes."""
    untagged(repository)
    changed(repository)
    done = release(repository, ALLOW_UNTAGGED="1", IMAGE="ghcr.io/me/guard")
    assert done.returncode == 0, done.stdout
    assert "This is a trial and no release:\n* Cargo.toml says" in done.stdout
    assert f"ghcr.io/me/guard:{VERSION}" in done.stdout
    files = read(repository / "target" / f"release-{VERSION}")
    assert files["RELEASE_NOTES.md"].startswith(b"# A trial, and no release,")
    assert b" M README.md" in files["RELEASE_NOTES.md"]


IMAGE_DIGEST, MODULE_DIGEST = "a" * 64, "b" * 64

ISTIO = """\
# A comment that stays.
apiVersion: extensions.istio.io/v1alpha1
kind: WasmPlugin
spec:
  sha256: 0000  # of the image
  url: oci://registry.example.com/mcp-resume-guard:0.0.9
  pluginConfig: {mode: observe}
---
kind: EnvoyExtensionPolicy
spec:
  wasm:
  - code:
      type: Image
      image: {url: "registry.example.com/mcp-resume-guard:0.0.9", sha256: "TO BE SET"}
  - code:
      type: HTTP
      http: {url: "https://example.com/guard.wasm", sha256: ""}
---
remote:
  http_uri: {uri: https://example.com/guard.wasm, cluster: files, timeout: 10s}
  sha256: 1111
"""


def test_each_digest_goes_where_it_belongs() -> None:
    """The image's and the module's; the rest stays as it is."""
    filled = bundle.fill(ISTIO, "ghcr.io/me/guard:1.2.3", IMAGE_DIGEST, MODULE_DIGEST)
    expected = ISTIO.replace(
        "registry.example.com/mcp-resume-guard:0.0.9", "ghcr.io/me/guard:1.2.3"
    )
    for old, new in (
        ("0000", IMAGE_DIGEST),
        ('"TO BE SET"', IMAGE_DIGEST),
        ('""', MODULE_DIGEST),
        ("1111", MODULE_DIGEST),
    ):
        expected = expected.replace(f"sha256: {old}", f'sha256: "{new}"')
    assert filled == expected


def test_a_digest_of_nothing_is_refused() -> None:
    """Nobody could say which one to put there."""
    with pytest.raises(Refused, match="line 2"):
        bundle.fill("code:\n  sha256: 0000\n", "x:1", IMAGE_DIGEST, MODULE_DIGEST)
