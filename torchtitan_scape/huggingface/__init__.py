"""Export to and import from Hugging Face model folders. Only the checks need `transformers`."""
