"""Caches of the docstrings and the fields that the parser of the command line reads from the sources in every call.

That takes most of its time. Importing this module turns the caches on, in pytest and in the test server.
"""

import functools

from tyro import _docstrings, _resolver

_docstrings.get_field_docstring = functools.cache(_docstrings.get_field_docstring)
_resolver.resolved_fields = functools.cache(_resolver.resolved_fields)
