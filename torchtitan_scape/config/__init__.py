"""The TOML sections that this project adds to TorchTitan's, their parser, and checks across sections."""
