"""Commands and supervisors that tests start get their workers from the server of `prestarted`, if one serves."""

import os
import sys

_WORDS = sys.orig_argv[1:]
_STARTS = ("engine.run.supervise", "ipykernel_launcher", "workbench")
_MODULE = _WORDS[_WORDS.index("-m") + 1] if "-m" in _WORDS[:-1] else ""
# `bin/workbench` too, which the demos, the guide and the Makefile start.
if "WORKBENCH_TESTS_ROOM" in os.environ and (_MODULE or os.path.basename(_WORDS[0] if _WORDS else "")) in _STARTS:
    import prestarted

    prestarted.install()
