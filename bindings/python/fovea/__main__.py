"""The command line, as `python -m fovea` and as `fovea`."""

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
    return _core.main(["fovea", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
