"""``python -m hotshoe_smollm2_drafters eagle``: print where a head lies, for command lines."""

import sys

from hotshoe_smollm2_drafters import EAGLE, MEDUSA

_FOLDERS = {"eagle": EAGLE, "medusa": MEDUSA}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in _FOLDERS:
        sys.exit(f"usage: python -m hotshoe_smollm2_drafters {'|'.join(_FOLDERS)}")
    print(_FOLDERS[sys.argv[1]])
