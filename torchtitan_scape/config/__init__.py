"""The TOML sections that this project adds, how they are read, and what is refused."""
