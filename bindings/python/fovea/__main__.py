"""The command line, as `python -m fovea` and as `fovea`."""

import os
import sys

from . import _core


def main() -> int:
    if not hasattr(_core, "main"):
        print(
            "fovea: this package was built without its command line, which needs CLI11, fmt and nlohmann-json "
            "(Debian: libcli11-dev libfmt-dev nlohmann-json3-dev)",
            file=sys.stderr,
        )
        return 1
    # `fovea report` starts a program in Python that lies beside this one.
    os.environ.setdefault("FOVEA_PYTHON", sys.executable)
    os.environ.setdefault("FOVEA_SHARE", os.path.dirname(os.path.abspath(__file__)))
    return _core.main(["fovea", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
