"""Sandbox processes for grammars, chat templates and tokenizers, with limits of time and memory."""
