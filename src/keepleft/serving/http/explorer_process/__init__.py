"""The explorer's questions and attention maps in processes of their own, beside the engine."""
