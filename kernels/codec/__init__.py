"""Block codes: FP32 values in messages of 8 bits per entry and fewer."""
