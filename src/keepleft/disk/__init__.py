"""Files on disk: atomic writing, checksums, safetensors, tokenizer.json."""
