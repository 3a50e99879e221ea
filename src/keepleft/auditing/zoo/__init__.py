"""Every language model class of transformers as a tiny random model, to be audited."""
