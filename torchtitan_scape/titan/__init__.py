"""The only package that imports TorchTitan.

TorchTitan binds the device by name while it is imported. Importing this package, or one of its modules, therefore
selects the device first. Its modules export the TorchTitan names that other folders use, by subject.
"""

from torchtitan_scape.titan.device import prepare

DEVICE_TYPE = prepare()
