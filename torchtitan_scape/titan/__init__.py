"""The only package that imports TorchTitan.

TorchTitan binds the device by name while it is imported, so importing this package, or a module of it, selects the
device first. The modules export by subject the names of TorchTitan that other folders use.
"""

from torchtitan_scape.titan.device import prepare

DEVICE_TYPE = prepare()

__all__ = ["DEVICE_TYPE"]
