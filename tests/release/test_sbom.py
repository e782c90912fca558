"""What the SBOM and the list of licences say, against cargo, the crates' archives and the module."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from release.contents import Contents
from release.project import MODULE, ROOT, TARGET, Refused

from release import contents, licenses, sbom

TOOLCHAIN = {"rust-std", "wasi-libc"}
"""What isn't cargo's."""


@pytest.fixture(scope="module")
def found() -> Contents:
    """What is in the module."""
    return contents.read()


@pytest.fixture(scope="module")
def document(found: Contents) -> dict[str, Any]:
    """The SBOM."""
    return json.loads(sbom.text((ROOT / MODULE).read_bytes(), found))


def test_the_crates_are_those_that_cargo_builds_in(document: dict[str, Any]) -> None:
    """`cargo tree` resolves features for this package alone, and knows the same crates."""
    kinds = ["--edges", "normal,no-proc-macro", "--target", TARGET]
    command = ["cargo", "tree", "--locked", "--package", "mcp-resume-guard", *kinds]
    shown = ["--prefix", "none", "--no-dedupe", "--format", "{p}"]
    done = subprocess.run([*command, *shown], cwd=ROOT, check=True, capture_output=True, text=True)
    built = {tuple(line.split()[:2]) for line in done.stdout.splitlines() if line}
    built.remove(("mcp-resume-guard", f"v{document['metadata']['component']['version']}"))
    listed = {
        (component["name"], f"v{component['version']}")
        for component in document["components"]
        if component["name"] not in TOOLCHAIN
    }
    assert listed == built
    # Of the configuration's schema, and of the command line beside the module.
    assert not {"schemars", "clap"} & {name for name, _ in listed}


def test_what_the_module_names_is_listed(document: dict[str, Any]) -> None:
    """Its panic messages name files of crates, and none of this machine."""
    module = (ROOT / MODULE).read_bytes()
    crates = set(re.findall(rb"cargo/registry/src/[^/]+/([^/]+)/src/", module))
    assert crates
    listed = {f"{part['name']}-{part.get('version')}" for part in document["components"]}
    assert {crate.decode() for crate in crates} <= listed
    assert str(Path.home()).encode() + b"/" not in module
    assert str(ROOT).encode() not in module


def test_a_checksum_is_that_of_the_archive(found: Contents, document: dict[str, Any]) -> None:
    """Of the very file that the crate was unpacked from."""
    digests = {part["bom-ref"]: part["hashes"] for part in document["components"]}
    crates = [part for part in found.components if part.folder]
    assert crates
    for crate in crates:
        assert crate.folder is not None
        source = crate.folder.parent
        archive = source.parents[1] / "cache" / source.name / f"{crate.folder.name}.crate"
        content = hashlib.sha256(archive.read_bytes()).hexdigest()
        assert digests[crate.purl] == [{"alg": "SHA-256", "content": content}]


def test_every_part_has_a_licence_and_is_reached(document: dict[str, Any]) -> None:
    """From the product, along the dependencies."""
    product = document["metadata"]["component"]
    module = hashlib.sha256((ROOT / MODULE).read_bytes()).hexdigest()
    assert product["hashes"] == [{"alg": "SHA-256", "content": module}]
    needs = {entry["ref"]: entry.get("dependsOn", []) for entry in document["dependencies"]}
    reached, todo = set(), [product["bom-ref"]]
    while todo:
        ref = todo.pop()
        if ref not in reached:
            reached.add(ref)
            todo += needs[ref]
    parts = document["components"]
    assert reached == {part["bom-ref"] for part in parts} | {product["bom-ref"]}
    assert {part["name"] for part in parts} >= TOOLCHAIN
    for part in (product, *parts):
        assert part["licenses"][0]["expression"]
        assert part["purl"].startswith("pkg:")


def test_it_follows_the_schema(document: dict[str, Any]) -> None:
    """And what doesn't is refused by the same check."""
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(document)) is None
    document = {**document, "colour": "blue"}
    assert validator.validate_str(json.dumps(document)) is not None


def test_it_is_always_the_same_and_has_no_time(found: Contents) -> None:
    """Its serial number goes with what it says."""
    module = (ROOT / MODULE).read_bytes()
    first, again = sbom.text(module, found), sbom.text(module, contents.read())
    assert first == again
    assert "timestamp" not in json.loads(first)["metadata"]
    other = json.loads(sbom.text(b"another module", found))
    assert other["serialNumber"] != json.loads(first)["serialNumber"]


def test_the_licences_are_there_in_full(found: Contents) -> None:
    """Every text that a crate brings, and those of the toolchain's libraries."""
    whole = " ".join(licenses.text(found).split())
    for part in found.components:
        assert f"{part.name} {part.version or ''}".strip() in whole
        for file in part.folder.iterdir() if part.folder else ():
            if file.name.upper().startswith(("LICEN", "COPYING", "NOTICE", "UNLICENSE")):
                assert " ".join(file.read_text(encoding="utf-8").split()) in whole, file
    for line in (
        "Apache License Version 2.0, January 2004",
        "UNICODE LICENSE V3",
        "Copyright © 2005-2020 Rich Felker, et al. Permission is hereby granted",
        "Copyright (c) 2015 Nuxi, https://nuxi.nl/ Redistribution and use",
    ):
        assert line in whole


def test_a_crate_without_a_text_is_refused(found: Contents, tmp_path: Path) -> None:
    """Unless Apache-2.0 is offered, whose text is at hand."""
    forgotten = contents.Component("forgotten", "1.0.0", "MIT", "pkg:cargo/x@1", "0" * 64, tmp_path)
    with pytest.raises(Refused, match="forgotten"):
        licenses.text(Contents(**{**vars(found), "components": (forgotten,)}))
    offered = contents.Component("o", "1", "MIT OR Apache-2.0", "pkg:cargo/o@1", "0" * 64, tmp_path)
    assert "Apache License" in licenses.text(Contents(**{**vars(found), "components": (offered,)}))
