"""Changes of databases, captured into the log.

The package can be called: ``ms.capture(url, …)`` is :func:`millstream.capture.run.capture`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from millstream.capture.run import capture  # noqa: PLC0415 - what it needs loads when it is used

        return capture(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
