"""The list of the module's contents in CycloneDX 1.6 (JSON), by the OWASP project's own library,
which also checks it against the standard's schema."""

from __future__ import annotations

import hashlib
import uuid

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from .contents import Contents
from .project import Refused

FILE = "mcp-resume-guard.cdx.json"


def text(module: bytes, contents: Contents) -> str:
    """The document. Its serial number follows from the rest of it."""
    document = _document(module, contents, uuid.UUID(int=0))
    document = _document(module, contents, uuid.uuid5(uuid.NAMESPACE_OID, document))
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(document)
    if wrong:
        raise Refused(f"the SBOM does not follow CycloneDX's schema: {wrong}")
    return document + "\n"


def _document(module: bytes, contents: Contents, serial: uuid.UUID) -> str:
    product = Component(
        type=ComponentType.APPLICATION,
        name=contents.name,
        version=contents.version,
        description=contents.description,
        licenses=[LicenseExpression(contents.license)],
        purl=PackageURL("generic", None, contents.name, contents.version),
        hashes=[_sha256(hashlib.sha256(module).hexdigest())],
        bom_ref=contents.name,
    )
    parts = {
        part.purl: Component(
            type=ComponentType.LIBRARY,
            name=part.name,
            version=part.version,
            licenses=[LicenseExpression(part.license)],
            purl=PackageURL.from_string(part.purl),
            hashes=[_sha256(part.sha256)],
            bom_ref=part.purl,
        )
        for part in contents.components
    }
    bom = Bom(serial_number=serial, components=parts.values())
    bom.metadata.component = product
    # The library puts in the time of day, which the standard doesn't ask for.
    bom.metadata.timestamp = None  # type: ignore[assignment]
    everywhere = [part.purl for part in contents.components if part.folder is None]
    bom.register_dependency(product, [parts[purl] for purl in (*contents.needs, *everywhere)])
    for part in contents.components:
        bom.register_dependency(parts[part.purl], [parts[purl] for purl in part.needs])
    return JsonV1Dot6(bom).output_as_string(indent=2)


def _sha256(digits: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=digits)
