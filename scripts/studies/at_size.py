"""The text of the runs at size: Python sources that lie beside the trainer, prepared for training.

The embedded model (2.2 M parameters) wants 44.6 M tokens for 20 a parameter; the standard library alone has 3.3 M. With
the sources of PyTorch, SymPy and NumPy, tests left out, there are 26 M, which are read 1.7 times. The text depends on
the versions of the packages: the manifest that lies with the results names them and has its digest.

    python -m scripts.studies.at_size
    python -m scripts.studies.quality_study run --grid scripts/studies/at_size_grid.toml --output results/at_size
    python -m scripts.studies.quality_study report --output results/at_size
"""

import json
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from scripts.common import OUTPUTS, RESULTS, ROOT, guarded, parser, read, write
from torchtitan_scape.data import prepare
from torchtitan_scape.data.manifest import MANIFEST
from torchtitan_scape.data.standard_library import read_sources

PACKAGES = ("torch", "sympy", "numpy")
PREPARED = OUTPUTS / "at_size" / "prepared"  # as at_size_recipe.toml names it


def sources() -> dict[str, dict[str, str]]:
    """{what and its version: {relative path: text}}. Raises ValueError where a package is not installed."""
    found = {f"Python {sys.version.split()[0]}": read_sources(Path(sysconfig.get_path("stdlib")))}
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"the package {name} is not installed: pip install {name}")
        found[f"{name} {version(name)}"] = read_sources(Path(spec.origin).parent)
    return found


def run() -> int:
    text = PREPARED.parent / "sources.jsonl"
    text.parent.mkdir(parents=True, exist_ok=True)
    found = sources()
    with open(text, "w") as file:
        for files in found.values():
            file.writelines(json.dumps({"text": source}) + "\n" for source in files.values())
    tokenizer = ROOT / "torchtitan_scape" / "data" / "tokenizer"
    arguments = [f"--path={text}", f"--tokenizer={tokenizer}", f"--output={PREPARED}", "--validation=0.01"]
    if code := prepare.main(arguments):
        return code
    manifest = read(PREPARED / MANIFEST)
    manifest["source"]["path"] = None  # of one machine
    manifest["sources"] = {what: {"files": len(files)} for what, files in found.items()}
    stored = RESULTS / "at_size" / MANIFEST
    write(stored, manifest)
    print(f"wrote {stored}")
    return 0


def main() -> int:
    parser(__doc__).parse_args()
    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
