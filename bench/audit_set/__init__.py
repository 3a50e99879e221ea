"""Small models that leak and small models that do not, written without sight of the audit's code."""
