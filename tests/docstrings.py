"""A cache of the docstrings that the parser of the command line reads from the sources in every call.

That takes two thirds of its time. Importing this module turns the cache on, in pytest and in the test server.
"""

import functools

from tyro import _docstrings

_docstrings.get_field_docstring = functools.cache(_docstrings.get_field_docstring)
