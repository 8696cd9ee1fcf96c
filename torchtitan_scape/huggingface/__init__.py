"""Export to and import from Hugging Face model folders. The checks and the import need `transformers`."""
