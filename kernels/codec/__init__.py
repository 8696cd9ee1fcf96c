"""Block codes: how FP32 values travel in 8 bits and fewer."""
