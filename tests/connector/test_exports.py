from __future__ import annotations

import connector
from connector import errors


def test_every_exported_name_is_there() -> None:
    for name in connector.__all__:
        assert hasattr(connector, name), name


def test_every_error_is_exported_and_drawn_in_the_tree() -> None:
    named = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert named <= set(connector.__all__)
    assert errors.__doc__ is not None
    for name in named:
        assert name in errors.__doc__, f"{name} is missing in the tree"
        assert issubclass(getattr(errors, name), errors.ConnectorError)
