"""The inference engine: requests in, tokens out. No HTTP here."""
