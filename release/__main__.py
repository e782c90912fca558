"""`python -m release COMMAND`; the Makefile's `image`, `sbom` and `release` build the module first."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path

from . import contents, image, licenses, project
from .project import ROOT, Refused

PUSH = """\
Push it with one of these (docs/release.md has more):
  skopeo copy --preserve-digests oci:{layout}:{version} docker://{name}:{version}
  crane push {layout} {name}:{version}
  oras cp --from-oci-layout {layout}:{version} {name}:{version}
"""

DIGESTS = """\
image   sha256:{image}
        in Istio's WasmPlugin (`sha256`) and Envoy Gateway's policy (`image.sha256`): the digits alone
module  sha256:{module}
        where the module is fetched by HTTP instead: the same fields, and Envoy's `remote.sha256`
"""


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    layout = commands.add_parser("image", help="the module as an OCI image layout")
    bill = commands.add_parser("sbom", help="the module's contents, and their licences")
    check = commands.add_parser("check", help="can HEAD be released?")
    bundle = commands.add_parser("bundle", help="the files of a release")
    layout.add_argument("--output", type=Path, default=ROOT / "target" / "image")
    bill.add_argument("--output", type=Path, default=ROOT / "target")
    bundle.add_argument("--output", type=Path, help="target/release-VERSION, if not said")
    for command in (layout, bundle):
        # `make` hands on an empty name where none was said.
        command.add_argument("--name", default="", help=f"the image's name, else {image.NAME}")
    for command in (check, bundle):
        command.add_argument("--trial", action="store_true", help="what can't be released, too")
    arguments = parser.parse_args()
    try:
        {"image": _image, "sbom": _sbom, "check": _check, "bundle": _bundle}[arguments.command](
            arguments
        )
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 1
    return 0


def _image(arguments: argparse.Namespace) -> None:
    module, found = project.module(), contents.read()
    made = image.build(module, found)
    image.write(made, arguments.output)
    _tell(made, module, arguments.output, arguments.name or image.NAME, found.version)


def _sbom(arguments: argparse.Namespace) -> None:
    from . import sbom

    module, found = project.module(), contents.read()
    written = {sbom.FILE: sbom.text(module, found), licenses.FILE: licenses.text(found)}
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        file = arguments.output / name
        file.write_bytes(text.encode())
        print(_short(file))


def _check(arguments: argparse.Namespace) -> None:
    from . import bundle

    bundle.check(contents.read().version, arguments.trial)


def _bundle(arguments: argparse.Namespace) -> None:
    from . import bundle

    module, found = project.module(), contents.read()
    against = bundle.check(found.version, arguments.trial)
    folder = arguments.output or ROOT / "target" / f"release-{found.version}"
    name = arguments.name or image.NAME
    bundle.write(bundle.build(module, found, name, against), folder)
    layout = folder / f"{found.name}-{found.version}.oci"
    _tell(image.build(module, found), module, layout, name, found.version)
    if against:
        print("This is a trial and no release:")
        print("\n".join(f"* {reason}" for reason in against))


def _tell(made: image.Image, module: bytes, folder: Path, name: str, version: str) -> None:
    layout = _short(folder)
    print(layout)
    print(DIGESTS.format(image=made.digest, module=hashlib.sha256(module).hexdigest()))
    print(PUSH.format(layout=layout, name=name, version=version), end="")


def _short(path: Path) -> str:
    """Seen from where the command was given, if that is above."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


if __name__ == "__main__":
    sys.exit(main())
