"""Bytes that are whole or not there: atomic writing, checksums."""
