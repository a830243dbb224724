"""The `kvferry` command: the net under everything else.

Exit codes: 0 done; 1 something failed; 2 refused (usage, a setting, the model, a port, resources, the cluster is
already up): nothing was started; 3 there is no such cluster; 130 interrupted before it was ready. `down` of a cluster
that is not up is 0: what was asked for is so.

Whatever happens, a person gets one sentence. So everything that takes time to import is imported inside the net.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

FAILED = 1
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("kvferry: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`kvferry status | head -1`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        print(f"kvferry: unexpected error: {str(error) or type(error).__name__}; {_record()}", file=sys.stderr)
        return FAILED


def _run(arguments: Sequence[str]) -> int:
    from deploy.command_line import parser
    from deploy.errors import DeployError

    try:
        options = parser().parse_args(arguments)
        code: int = options.run(options, list(arguments))
        sys.stdout.flush()
        return code
    except DeployError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return error.exit_code


def _record() -> str:
    import traceback
    from pathlib import Path

    log = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvferry" / "crash.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError as error:
        return f"its details could not be written to {log}: {error.strerror}"
    return f"details in {log}"


if __name__ == "__main__":
    sys.exit(main())
