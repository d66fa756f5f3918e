"""Program behind ``prepare_in_subprocess``: let one plugin do its heavy start-up work.

``python -m hotshoe.plugins.preparation KIND NAME DISTRIBUTION VERSION MODULE OPTIONS RESULT_FILE``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hotshoe.errors import HotshoeError
from hotshoe.plugin_options import validate_plugin_options
from hotshoe.plugins.checks import ask_component, call_prepare, import_plugin
from hotshoe.plugins.discovery import PluginInfo


def prepare(info: PluginInfo, options: dict[str, Any]) -> list[str]:
    """Import a plugin here and prepare it; why it can't work, an error included."""
    try:
        component = ask_component(info, import_plugin(info))
        validated = validate_plugin_options(component.options, options, "options")
        return call_prepare(info, component, validated)
    except HotshoeError as error:
        return [str(error)]


def main() -> None:
    """Prepare one plugin; what it logs goes to the terminal, only the file is the answer."""
    info = PluginInfo(*sys.argv[1:6])
    reasons = prepare(info, json.loads(sys.argv[6]))
    Path(sys.argv[7]).write_text(json.dumps(reasons))
    # threads that the plugin started must not keep this process alive
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
