"""How our ASGI middleware reaches a server of vLLM: as a default of its command line. Loads neither torch nor vLLM."""

from typing import Any


def add_middleware(class_path: str, parser: Any) -> None:
    """Make the middleware a default of the parser, if it is that of a server; ``--middleware`` adds others to it.

    Args:
        class_path: import path of the class.
        parser: an ``argparse`` parser, or None.
    """
    present = None if parser is None else parser.get_default("middleware")
    if present is not None and class_path not in present:
        parser.set_defaults(middleware=[*present, class_path])
