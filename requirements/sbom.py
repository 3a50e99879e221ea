"""Write the software bill of materials of the wheel, as CycloneDX JSON: `make sbom`.

It lists what pip installs with keepleft and its extras, at the versions that keepleft is tested with
(extras.lock, torch.lock), the translator's package of this repository, and the npm packages that are bundled
into the explorer's page (package-lock.json). The hashes of a component are those of every file of that
release; the translator's has none before it is built. The same sources give the same bytes.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import uuid
from base64 import b64decode
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lock import ENTRY

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("extras", "torch")
NPM_BUILD_TOOLS = {"esbuild"}  # a dependency of the page's build, and not in the page
NPM_ALGORITHMS = {"sha512": "SHA-512"}
JSON = dict[str, Any]


@dataclass(frozen=True)
class LockedPackage:
    """A line of a lock file with its hashes; `parents` are the packages that require it."""

    name: str
    version: str
    marker: str | None
    hashes: tuple[str, ...]
    parents: tuple[str, ...]

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def read_lock(text: str) -> list[LockedPackage]:
    packages = []
    for entry in ENTRY.findall(text):
        first_line, *lines = entry.splitlines()
        requirement, _, marker = first_line.removesuffix("\\").partition(" ; ")
        name, _, version = requirement.strip().partition("==")
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)
        notes = [line.strip().removeprefix("#").strip() for line in lines if line.strip().startswith("#")]
        parents = [note.removeprefix("via").strip().partition(" (")[0] for note in notes if note != "via"]
        packages.append(LockedPackage(name, version, marker.strip() or None, tuple(hashes), tuple(parents)))
    return packages


def bill_of_materials() -> JSON:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    source = (ROOT / "src" / "keepleft" / "__init__.py").read_text("utf-8")
    version = re.search(r'^__version__ = "(.+)"$', source, re.M)
    assert version is not None
    root = f"pkg:pypi/{project['name']}@{version[1]}"
    packages = [
        package
        for name in LOCKS
        for package in read_lock((ROOT / "requirements" / f"{name}.lock").read_text("utf-8"))
    ]
    npm_components, npm_dependencies = bundled_npm_packages()
    required = required_names(packages, map(requirement_name, project["dependencies"]))
    components = [pypi_component(package, package.name in required) for package in packages]
    translator = translator_component()
    direct = [package.purl for package in packages if project["name"] in package.parents]
    dependencies = [
        {"ref": root, "dependsOn": sorted([*direct, translator["bom-ref"], *npm_dependencies.pop("")])},
        {"ref": translator["bom-ref"], "dependsOn": []},
        *({"ref": package.purl, "dependsOn": children(package, packages)} for package in packages),
        *({"ref": ref, "dependsOn": npm_dependencies[ref]} for ref in npm_dependencies),
    ]
    bill: JSON = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "pre-build"}],
            "component": {
                "type": "library",
                "bom-ref": root,
                "name": project["name"],
                "version": version[1],
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": root,
            },
        },
        "components": sorted(
            [*components, translator, *npm_components], key=lambda component: component["bom-ref"]
        ),
        "dependencies": sorted(dependencies, key=lambda dependency: str(dependency["ref"])),
    }
    bill["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bill))}"
    return bill


def requirement_name(requirement: str) -> str:
    """`jsonargparse` of "jsonargparse[signatures]>=4.40", as PyPI normalizes it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def required_names(packages: list[LockedPackage], direct: Iterable[str]) -> set[str]:
    """The packages that come with keepleft even without extras."""
    required = set(direct)
    while more := {p.name for p in packages if p.name not in required and required & set(p.parents)}:
        required |= more
    return required


def children(package: LockedPackage, packages: list[LockedPackage]) -> list[str]:
    return sorted(child.purl for child in packages if package.name in child.parents)


def pypi_component(package: LockedPackage, required: bool) -> JSON:
    component: JSON = {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "scope": "required" if required else "optional",
        "hashes": [{"alg": "SHA-256", "content": content} for content in package.hashes],
        "purl": package.purl,
    }
    if package.marker is not None:
        component["properties"] = [{"name": "keepleft:marker", "value": package.marker}]
    return component


def translator_component() -> JSON:
    """keepleft-translator, the weights behind the extra `translator`."""
    project = tomllib.loads((ROOT / "translator" / "pyproject.toml").read_text("utf-8"))["project"]
    url = f"pkg:pypi/{project['name']}@{project['version']}"
    return {
        "type": "machine-learning-model",
        "bom-ref": url,
        "name": project["name"],
        "version": project["version"],
        "description": project["description"],
        "scope": "optional",
        "licenses": [{"license": {"id": project["license"]}}],
        "purl": url,
    }


def bundled_npm_packages() -> tuple[list[JSON], dict[str, list[str]]]:
    """The components of the explorer's page, and package URL → those it requires; "" is the page itself."""
    locked = json.loads((ROOT / "web" / "package-lock.json").read_text("utf-8"))["packages"]
    url = lambda name: f"pkg:npm/{name.replace('@', '%40')}@{locked[f'node_modules/{name}']['version']}"
    names = sorted(set(locked[""]["dependencies"]) - NPM_BUILD_TOOLS)
    dependencies = {"": [url(name) for name in names]}
    components: list[JSON] = []
    while names:
        name = names.pop()
        if url(name) in dependencies:
            continue
        entry = locked[f"node_modules/{name}"]
        required = sorted(entry.get("dependencies", {}))
        names += required
        dependencies[url(name)] = [url(child) for child in required]
        algorithm, _, digest = entry["integrity"].partition("-")
        components.append(
            {
                "type": "library",
                "bom-ref": url(name),
                "name": name,
                "version": entry["version"],
                "scope": "required",
                "hashes": [{"alg": NPM_ALGORITHMS[algorithm], "content": b64decode(digest).hex()}],
                "licenses": [{"license": {"id": entry["license"]}}],
                "purl": url(name),
            }
        )
    return components, dependencies


def schema_error(text: str) -> str | None:
    """What the CycloneDX schema has against a bill of materials."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return None if error is None else str(error)


def main() -> None:
    bill = bill_of_materials()
    text = json.dumps(bill, indent=2) + "\n"
    if (error := schema_error(text)) is not None:
        sys.exit(f"the bill of materials is not valid CycloneDX: {error}")
    component = bill["metadata"]["component"]
    path = ROOT / "dist" / f"{component['name']}-{component['version']}.cdx.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, "utf-8")
    print(f"{path.relative_to(ROOT)}: {len(bill['components'])} components, valid CycloneDX")


if __name__ == "__main__":
    main()
