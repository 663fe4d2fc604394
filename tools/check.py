"""`make check`: style, format, types, layers, container files, manifests, the site, house rules, the documents' snippets."""

import sys
from pathlib import Path

from processes import run, say
from run_tests import HOUSE_RULES, SIDE_BY_SIDE

COMPOSE_FILE = ("--builtin-schema", "vendor.compose-spec", "compose.yaml")
# All but the file of kustomize, which is no object of Kubernetes's. The version is that of the tests' cluster.
MANIFESTS = sorted(
    str(path) for path in Path("deploy/kubernetes").glob("*.yaml") if path.stem != "kustomization"
)
CHECKS = {
    "style": ["ruff", "check"],
    "format": ["ruff", "format", "--check"],
    "types": ["mypy"],
    "layers": ["lint-imports", "--no-logo"],
    "Dockerfile": ["hadolint", "Dockerfile"],
    "compose file": ["check-jsonschema", *COMPOSE_FILE],
    "manifests": ["kubernetes-validate", "--quiet", "--strict", "-k", "1.34", *MANIFESTS],
    "site": [sys.executable, "tools/build_docs.py", "--check"],
    "house rules and snippets": [sys.executable, "-m", "pytest", "-q", *HOUSE_RULES, *SIDE_BY_SIDE],
}


def main() -> int:
    """Run every check, also after one has failed."""
    failed = []
    for name, command in CHECKS.items():
        say(f"check: {name}")
        if run(command):
            failed.append(name)
    say(f"check: failed: {', '.join(failed)}" if failed else "check: all good")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
