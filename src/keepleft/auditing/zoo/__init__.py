"""Small random models of every kind that a library offers, to be audited."""
