"""Request and response bodies as pydantic models."""
