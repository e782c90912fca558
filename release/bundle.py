"""A release: all that users need, in one folder with checksums, from a tagged commit."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from . import image, licenses, sbom
from .contents import Contents
from .project import MODULE, ROOT, Refused, output_of

MANIFESTS = Path("envoy")
"""What users apply, seen from the root. All of it that is committed is part of a release."""

SCHEMA = MANIFESTS / "mcp-resume-guard.schema.json"

_UNRELEASED = "Unreleased"

_BUILDS = re.compile(r"CARGO_|RUSTC|RUSTFLAGS|RUSTDOC")
"""Variables by which a build can be changed."""

_HARMLESS = re.compile(
    r"CARGO_(HOME|TARGET_DIR|INCREMENTAL|PROFILE_DEV_.*|(TERM|NET|HTTP|REGISTRY|REGISTRIES)_.*)"
)
"""Those of them that don't change the module."""

_CHANGES_BUILDS = re.compile(
    r"^\s*(\[(profile|target|build|env|unstable|patch)\b|rustflags)", re.MULTILINE
)
"""The same in a configuration of cargo."""


def reasons_against(version: str) -> list[str]:
    """Why HEAD can't be released as `version`; nothing if it can."""
    tags = output_of("git", "tag", "--points-at", "HEAD").split()
    found = []
    if f"v{version}" not in tags:
        has = f"its tags: {', '.join(tags)}" if tags else "it has no tag"
        found.append(f"Cargo.toml says {version}, and HEAD is not tagged v{version} ({has})")
    changed = output_of("git", "status", "--porcelain", "--untracked-files=all").rstrip()
    if changed:
        found.append(f"the work tree differs from HEAD:\n{changed}")
    for line in output_of("git", "ls-files", "-v").splitlines():
        tag, _, path = line.partition(" ")
        if tag.islower() or tag == "S":
            found.append(f"git doesn't look whether {path} has changed (`git update-index`)")
    if _section(version) is None:
        found.append(f"CHANGELOG.md has no section `## {version}`")
    for name in sorted(os.environ):
        if _BUILDS.match(name) and not _HARMLESS.fullmatch(name):
            found.append(f"{name} is set, and may change what is built")
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    for folder in {home, *(parent / ".cargo" for parent in ROOT.parents)}:
        for file in (folder / "config", folder / "config.toml"):
            if file.is_file() and _CHANGES_BUILDS.search(file.read_text(encoding="utf-8")):
                found.append(f"{file} changes what is built")
    return found


def check(version: str, trial: bool) -> list[str]:
    """Refuses what can't be released; for a trial, returns what would have been refused."""
    if not output_of("git", "ls-files", str(SCHEMA)):
        raise Refused(f"{SCHEMA} is missing, or not committed")
    against = reasons_against(version)
    if against and not trial:
        listed = "\n".join(f"* {reason}" for reason in against)
        raise Refused(f"not released:\n{listed}\n(ALLOW_UNTAGGED=1 makes a trial all the same)")
    return against


def build(module: bytes, contents: Contents, name: str, against: list[str]) -> dict[str, bytes]:
    """The files of a release, by their paths; `name` is the image's, without a tag."""
    version = contents.version
    made = image.build(module, contents)
    layout = f"{contents.name}-{version}.oci"
    files = {
        MODULE.name: module,
        f"{layout}.tar": image.tar(made.files),
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
        licenses.FILE: licenses.text(contents).encode(),
        sbom.FILE: sbom.text(module, contents).encode(),
        "RELEASE_NOTES.md": _notes(version, against).encode(),
    }
    files.update({f"{layout}/{path}": data for path, data in made.files.items()})
    module_digest = hashlib.sha256(module).hexdigest()
    for path in output_of("git", "ls-files", str(MANIFESTS)).splitlines():
        data = (ROOT / path).read_bytes()
        if path.endswith((".yaml", ".yml")):
            filled = fill(data.decode(), f"{name}:{version}", made.digest, module_digest)
            data = filled.replace(str(MODULE), MODULE.name).encode()
        files[path] = data
    files["SHA256SUMS"] = "".join(
        f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in sorted(files.items())
    ).encode()
    return files


def write(files: dict[str, bytes], folder: Path) -> None:
    """Writes a release beside `folder` and renames it, so that it's there whole or not at all."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for path, data in files.items():
        file = unfinished / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def fill(text: str, reference: str, image_digest: str, module_digest: str) -> str:
    """A manifest with the image's reference in the place of the example's, and a digest in each
    field `sha256`: the image's where an image stands beside it, the module's where a URL does.

    The text is changed and not written anew, because YAML's writers drop comments.
    """
    example = re.compile(re.escape(image.NAME) + r":[\w.-]+")
    digests = [
        (value.start_mark.index, value.end_mark.index, _digest(value, beside, example))
        for document in yaml.compose_all(text, yaml.SafeLoader)
        for value, beside in _digest_fields(document)
    ]
    for start, end, which in sorted(digests, reverse=True):
        digest = image_digest if which == "image" else module_digest
        # In quotes: digits with one `e` among them would be a number.
        text = f'{text[:start]}"{digest}"{text[end:]}'
    return example.sub(reference, text)


def _digest_fields(
    node: yaml.Node,
) -> Iterator[tuple[yaml.ScalarNode, yaml.MappingNode]]:
    """Every value of a key `sha256`, with the mapping that it stands in."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == "sha256":
                yield value, node
            else:
                yield from _digest_fields(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _digest_fields(value)


def _digest(value: yaml.ScalarNode, beside: yaml.MappingNode, example: re.Pattern[str]) -> str:
    texts = list(_scalars(beside))
    if any(example.search(text) for text in texts):
        return "image"
    if any(text.startswith(("http://", "https://", "file://")) for text in texts):
        return "module"
    line = value.start_mark.line + 1
    raise Refused(f"a manifest has a sha256 on line {line}, and neither {image.NAME} nor a URL")


def _scalars(node: yaml.Node) -> Iterator[str]:
    if isinstance(node, yaml.ScalarNode):
        yield node.value
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _scalars(value)
    elif isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            yield from _scalars(value)


def _section(version: str) -> str | None:
    """What the changelog has under the heading of a version."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = rf"^## \[?{re.escape(version)}\]?(?: .*)?$\n(.*?)(?=^## |\Z)"
    found = re.search(heading, text, re.MULTILINE | re.DOTALL)
    return found.group(1).strip() + "\n" if found else None


def _notes(version: str, against: list[str]) -> str:
    section = _section(version) or _section(_UNRELEASED) or ""
    if not against:
        return f"# mcp-resume-guard {version}\n\n{section}"
    listed = "\n".join(f"* {reason}" for reason in against)
    return f"# A trial, and no release, of mcp-resume-guard {version}\n\n{listed}\n\n{section}"
