"""Models as folders of Hugging Face's form, there and back; nothing here needs `transformers` but the check."""
